"""Client: requests to all servers, with retry and a deadline. Knows sequences and silence; leaves their
meaning to `worker`.

A request is sent again, unchanged, until its reply comes: the server applies a push once for each sequence
number. A server that says nothing for `request_timeout` seconds is an error that names it. A request may
wait for other trainers as long as it takes: the server answers each repetition with WAIT.

Sending and waiting are apart, so that a trainer computes while its requests are underway: libzmq's thread
does the sending and receiving.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from trainers.errors import FleetError, ServerError, TrainerLostError
from trainers.process.log import glog
from trainers.ps.configs import PsConfigs
from trainers.ps.transport import JobKeys, client_socket, receive, send
from trainers.ps.wire import Buffer, Code, Kind, Message, Part, WireError, decode, encode

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
    limit: float
    retry_at: float
    retry_after: float
    notice_at: float
    awaited: str = ""
    reply: Message | None = None


class PendingReplies:
    """Requests that are underway."""

    __slots__ = ("_first", "_pending")

    def __init__(self, pending: Sequence[_Pending]) -> None:
        self._pending = pending
        self._first = 0  # all before this one are answered

    @property
    def open(self) -> bool:
        """Whether a reply is missing, as far as was looked."""
        while self._first < len(self._pending) and self._pending[self._first].reply is not None:
            self._first += 1
        return self._first < len(self._pending)

    @property
    def replies(self) -> list[Message]:
        """What has been answered, in the order of the requests."""
        return [each.reply for each in self._pending if each.reply is not None]


class Client:
    """One trainer's connections. Not for use by several threads at once."""

    def __init__(
        self,
        endpoints: Sequence[str],
        rank: int,
        configs: PsConfigs,
        *,
        keys: JobKeys | None = None,
        first_retry_s: float = 1.0,
    ) -> None:
        self._first_retry_s = first_retry_s
        self._endpoints = endpoints
        self._rank = rank
        self._incarnation = secrets.randbits(63)
        self._configs = configs
        self._sequence = 0
        self._pending: dict[int, _Pending] = {}
        self._listened = 0.0
        """Seconds of waiting for servers, as long as each was to be: in no other time is a server silent."""
        self._retry_at = math.inf
        """No request is to be sent again before this."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        name = f"trainer-{rank}-{self._incarnation:x}".encode()
        self._sockets = [
            client_socket(self._context, endpoint, name, configs.trainer_timeout_s, keys)
            for endpoint in endpoints
        ]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._servers = {socket: server for server, socket in enumerate(self._sockets)}

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def ask(self, requests: Sequence[Request], silence: float | None = None) -> list[Message]:
        """Send all requests, in this order, and return their replies in the same order.

        Raises ServerError when a server is silent for `silence` seconds (the request timeout) or refuses,
        TrainerLostError when a reply will not come because another trainer is gone.
        """
        return self.wait(self.send(requests, silence))

    def send(self, requests: Sequence[Request], silence: float | None = None) -> PendingReplies:
        """Send all requests, in this order, without waiting. Their tensors belong to the client from here
        on.
        """
        now = time.monotonic()
        if not self._pending:
            self._retry_at = math.inf
        self._retry_at = min(self._retry_at, now + self._first_retry_s)
        ticket = []
        for request in requests:
            self._sequence += 1
            each = _Pending(
                request=request,
                frames=encode(self._message(request)),
                heard=self._listened,
                limit=silence or self._configs.request_timeout_s,
                retry_at=now + self._first_retry_s,
                retry_after=self._first_retry_s,
                notice_at=now + _NOTICE_AFTER_S,
            )
            self._pending[self._sequence] = each
            ticket.append(each)
            self._send(request.server, each.frames)
        return PendingReplies(ticket)

    def wait(self, ticket: PendingReplies) -> list[Message]:
        """The replies, in the order of the requests; raises as `ask`."""
        while ticket.open:
            self._turn(max(0.0, self._retry_at - time.monotonic()))
        return ticket.replies

    def look(self) -> None:
        """Take what has come, without waiting; raises as `ask` for anything that is underway."""
        if self._pending:
            self._turn(0.0)

    def _message(self, request: Request) -> Message:
        return Message(
            kind=request.kind,
            rank=self._rank,
            incarnation=self._incarnation,
            sequence=self._sequence,
            number=request.number,
            parts=request.parts,
        )

    def _turn(self, wait_s: float) -> None:
        """Wait for news, take it, and look after what is overdue."""
        news = self._take(wait_s)
        if time.monotonic() < self._retry_at and wait_s:
            return
        while news:  # all of it: who has answered is not overdue
            news = self._take(0.0)
        now = time.monotonic()
        for each in list(self._pending.values()):
            if now >= each.retry_at:
                self._overdue(each, now)
        self._retry_at = min((each.retry_at for each in self._pending.values()), default=math.inf)

    def _take(self, wait_s: float) -> bool:
        """Wait for a message, and take one of every server that has sent any.

        What it took longer, this process stood still: what has been sent since, nobody has read yet.
        """
        started = time.monotonic()
        ready = self._poller.poll(math.ceil(wait_s * 1000))
        self._listened += min(wait_s, time.monotonic() - started)
        for socket, _ in ready:
            self._receive(socket)
        return bool(ready)

    def _overdue(self, each: _Pending, now: float) -> None:
        if self._listened - each.heard > each.limit:
            silent = f"{self._name(each.request.server)} has not answered {each.request.kind.name}"
            raise ServerError(
                f"{silent} for {each.limit:g} s; it may have died or be unreachable: see its log"
            )
        self._send(each.request.server, each.frames)
        each.retry_after = min(2 * each.retry_after, _LONGEST_RETRY_S, each.limit / 2)
        # Not all trainers at the same moment, when a server is back.
        each.retry_at = now + each.retry_after * random.uniform(0.75, 1.0)
        self._notice(each, now)

    def _notice(self, each: _Pending, now: float) -> None:
        if now >= each.notice_at:
            each.notice_at = now + _NOTICE_AFTER_S
            what = each.awaited or f"an answer of {self._name(each.request.server)}"
            glog(f"trainer {self._rank} is waiting for {what} ({each.request.kind.name})")

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        server = self._servers[socket]
        try:
            reply = decode([frame.buffer for frame in receive(socket)])
        except WireError as error:
            if error.code is Code.BAD_VERSION:
                raise ServerError(f"{self._name(server)} answers in another language: {error}") from error
            return  # damaged on its way: the retry asks for it again
        if reply.code is Code.BAD_VERSION:
            raise ServerError(f"{self._name(server)} runs another version of fleetrun: {reply.text}")
        each = self._pending.get(reply.sequence)
        if each is None or each.request.server != server or reply.incarnation != self._incarnation:
            return  # a probe, a second answer, or a complaint about damaged bytes, which the retry mends
        each.heard = self._listened
        if reply.kind is Kind.WAIT:
            each.awaited = reply.text
            return
        del self._pending[reply.sequence]
        if reply.kind is Kind.REFUSED:
            raise self._refused(each, reply)
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
            send(self._sockets[server], frames)
        except zmq.Again:
            return  # the queue to this server is full: the retry comes later

    def _name(self, server: int) -> str:
        return f"server {server} at {self._endpoints[server]}"
