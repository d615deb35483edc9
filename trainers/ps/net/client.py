"""Client: requests to all servers, with retry and a deadline. Knows sequences and silence; leaves their
meaning to `worker`.

A request is sent again, unchanged, until its reply comes: the server applies a push once for each sequence
number. A server that says nothing for `request_timeout` seconds is an error that names it. A request may
wait for other trainers as long as it takes: the server answers each repetition with WAIT.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from trainers.errors import FleetError, ServerError, TrainerLostError
from trainers.glog import glog
from trainers.ps.net.transport import client_socket
from trainers.ps.net.wire import Buffer, Code, Kind, Message, Part, WireError, decode, encode
from trainers.strategy import PsConfigs

_LONGEST_RETRY_S = 10.0
_NOTICE_AFTER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One message to one server."""

    server: int
    kind: Kind
    number: int = 0
    parts: tuple[Part, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Pending:
    request: Request
    frames: list[Buffer]
    heard: float
    retry_at: float
    retry_after: float
    notice_at: float
    awaited: str = ""
    reply: Message | None = None


class Client:
    """One trainer's connections. Not for use by several threads at once."""

    def __init__(
        self, endpoints: Sequence[str], rank: int, configs: PsConfigs, *, first_retry_s: float = 1.0
    ) -> None:
        self._first_retry_s = first_retry_s
        self._endpoints = endpoints
        self._rank = rank
        self._incarnation = secrets.randbits(63)
        self._configs = configs
        self._sequence = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        name = f"trainer-{rank}-{self._incarnation:x}".encode()
        self._sockets = [
            client_socket(self._context, endpoint, name, configs.trainer_timeout_s) for endpoint in endpoints
        ]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def ask(self, requests: Sequence[Request], silence: float | None = None) -> list[Message]:
        """Send all requests, in this order, and return their replies in the same order.

        Raises ServerError when a server is silent for `silence` seconds (the request timeout) or refuses,
        TrainerLostError when a reply will not come because another trainer is gone.
        """
        limit = silence or self._configs.request_timeout_s
        pending: dict[int, _Pending] = {}
        now = time.monotonic()
        for request in requests:
            self._sequence += 1
            frames = encode(self._message(request))
            pending[self._sequence] = _Pending(
                request=request,
                frames=frames,
                heard=now,
                retry_at=now + self._first_retry_s,
                retry_after=self._first_retry_s,
                notice_at=now + _NOTICE_AFTER_S,
            )
            self._send(request.server, frames)
        while any(each.reply is None for each in pending.values()):
            self._turn(pending, limit)
        return [each.reply for each in pending.values() if each.reply is not None]

    def _message(self, request: Request) -> Message:
        return Message(
            kind=request.kind,
            rank=self._rank,
            incarnation=self._incarnation,
            sequence=self._sequence,
            number=request.number,
            parts=request.parts,
        )

    def _turn(self, pending: dict[int, _Pending], limit: float) -> None:
        """Wait for news or the next retry, whichever comes first."""
        open_ones = [each for each in pending.values() if each.reply is None]
        wait = max(0.0, min(each.retry_at for each in open_ones) - time.monotonic())
        for socket, _ in self._poller.poll(round(wait * 1000) + 1):
            self._receive(self._sockets.index(socket), pending)
        now = time.monotonic()
        for each in open_ones:
            if each.reply is not None or now < each.retry_at:
                continue
            if now - each.heard > limit:
                silent = f"{self._name(each.request.server)} has not answered {each.request.kind.name}"
                raise ServerError(
                    f"{silent} for {limit:g} s; it may have died or be unreachable: see its log"
                )
            self._send(each.request.server, each.frames)
            each.retry_after = min(2 * each.retry_after, _LONGEST_RETRY_S, limit / 2)
            each.retry_at = now + each.retry_after
            self._notice(each, now)

    def _notice(self, each: _Pending, now: float) -> None:
        if now >= each.notice_at:
            each.notice_at = now + _NOTICE_AFTER_S
            what = each.awaited or f"an answer of {self._name(each.request.server)}"
            glog(f"trainer {self._rank} is waiting for {what} ({each.request.kind.name})")

    def _receive(self, server: int, pending: dict[int, _Pending]) -> None:
        frames = self._sockets[server].recv_multipart(copy=False)
        try:
            reply = decode([frame.buffer for frame in frames])
        except WireError as error:
            raise ServerError(f"{self._name(server)} answers in another language: {error}") from error
        if reply.code is Code.BAD_VERSION:
            raise ServerError(f"{self._name(server)} runs another version of fleetrun: {reply.text}")
        each = pending.get(reply.sequence)
        if each is None or each.request.server != server or reply.incarnation != self._incarnation:
            return  # a probe, a second answer, or a complaint about damaged bytes, which the retry mends
        each.heard = time.monotonic()
        if reply.kind is Kind.WAIT:
            each.awaited = reply.text
        elif reply.kind is Kind.REFUSED:
            raise self._refused(each, reply)
        else:
            each.reply = reply

    def _refused(self, each: _Pending, reply: Message) -> FleetError:
        if reply.code is Code.TRAINER_LOST:
            return TrainerLostError(
                f"{reply.text}; {self._name(each.request.server)} cannot go on without it"
            )
        asked = each.request.kind.name
        return ServerError(
            f"{self._name(each.request.server)} refused {asked} ({reply.code.name}): {reply.text}"
        )

    def _send(self, server: int, frames: Sequence[Buffer]) -> None:
        try:
            self._sockets[server].send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return  # the queue to this server is full: the retry comes later

    def _name(self, server: int) -> str:
        return f"server {server} at {self._endpoints[server]}"
