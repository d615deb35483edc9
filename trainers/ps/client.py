"""Send requests to all servers, with retries and a deadline. `worker` defines the meaning of requests.

A request is sent again, unchanged, until its reply arrives. The server applies a push once for each sequence
number. A server that is silent for `request_timeout_s` causes an error that names the server. A request may
wait for other trainers without limit, because the server answers each repetition with WAIT.

Sending and waiting are separate, so a trainer can compute while its requests are in flight. The thread of
libzmq sends and receives.
"""

from __future__ import annotations

import math
import random
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from fleetrun.aliases import Document
from fleetrun.frozen import frozen
from trainers.errors import FleetError, ServerError, ServerFullError, TrainerLostError
from trainers.process.log import glog
from trainers.ps.configs import PsConfigs
from trainers.ps.transport import CurveKeys, client_socket, receive, send
from trainers.ps.wire import (
    MAX_COLS,
    Buffer,
    Code,
    Field,
    Kind,
    Message,
    Part,
    WireError,
    decode,
    encode,
    route_of,
)

_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 10.0
_LOG_WAIT_AFTER_S = 30.0
_IN_WORDS = {
    Kind.HELLO: "fleet.init_worker()",
    Kind.OPEN: "fleet.init_worker()",
    Kind.BARRIER: "fleet.barrier_worker()",
    Kind.GATHER: "fleet.util",
    Kind.FINISH: "fleet.stop_worker()",
    Kind.SAVE: "a save",
    Kind.SHRINK: "fleet.shrink()",
    Kind.REFRESH: "fleet.publish()",
}


@frozen(kw_only=True)
class Request:
    """One message to one server. `code` belongs to a push, see `wire.Kind`."""

    server: int
    kind: Kind
    number: int = 0
    code: Code = Code.NONE
    parts: tuple[Part, ...] = ()


def to_all(servers: int, kind: Kind, number: int = 0, *parts: Part) -> list[Request]:
    """Return the same request for each of the first `servers` servers."""
    return [Request(server=server, kind=kind, number=number, parts=parts) for server in range(servers)]


@dataclass(slots=True, kw_only=True)
class _PendingReply:
    """A request in flight. `last_seen` is the time of the server's last answer, in listening time. `limit` is
    the allowed silence in seconds.
    """

    request: Request
    frames: list[Buffer]
    last_seen: float
    limit: float
    retry_at: float
    retry_after: float
    log_at: float
    since: float
    awaited: str = ""
    reply: Message | None = None


class PendingReplies:
    """The replies to requests in flight."""

    __slots__ = ("_first", "_pending")

    def __init__(self, pending: Sequence[_PendingReply]) -> None:
        self._pending = pending
        self._first = 0  # all requests before this one have replies

    @property
    def open(self) -> bool:
        """True if a reply was missing when the sockets were last read."""
        while self._first < len(self._pending) and self._pending[self._first].reply is not None:
            self._first += 1
        return self._first < len(self._pending)

    @property
    def without_reply(self) -> list[_PendingReply]:
        return [each for each in self._pending if each.reply is None]

    @property
    def replies(self) -> list[Message]:
        """The received replies, in the order of the requests."""
        return [each.reply for each in self._pending if each.reply is not None]


class Client:
    """The connections of one trainer, or of another process called `name`. Only one thread at a time may use
    them.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        rank: int,
        configs: PsConfigs,
        *,
        keys: CurveKeys | None = None,
        name: str = "",
    ) -> None:
        self._who = name or f"trainer {rank}"
        self._endpoints = endpoints
        self._rank = rank
        self._incarnation = secrets.randbits(63)
        self._random = random.Random(self._incarnation)  # the script may use the global generator
        self._configs = configs
        self._sequence = 0
        self._pending: dict[int, _PendingReply] = {}
        self._waiting: PendingReplies | None = None
        self._listened = 0.0
        """Seconds spent waiting for servers. A server can be silent only during this time."""
        self._retry_at = math.inf
        """No request needs to be sent again before this time."""
        self._context = zmq.Context()
        route = route_of(self._who, self._incarnation)
        self._sockets = [
            client_socket(self._context, endpoint, route, configs.trainer_timeout_s, keys)
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

        Raises ServerError if a server refuses, or is silent for `silence` seconds (the request timeout).
        Raises TrainerLostError if a reply cannot come because another trainer is lost.
        """
        return self.wait(self.send(requests, silence))

    def send(self, requests: Sequence[Request], silence: float | None = None) -> PendingReplies:
        """Send all requests, in this order, without waiting. Their tensors must not change until the replies
        have arrived.
        """
        now = time.monotonic()
        if not self._pending:
            self._retry_at = math.inf
        pending = []
        for request in requests:
            self._sequence += 1
            # An answer has at most so many bytes for the 8 bytes of a key.
            size = sum(
                part.data.nbytes * (MAX_COLS // 2 if part.field in (Field.KEYS, Field.PEEK) else 1)
                for part in request.parts
            )
            retry_after = _FIRST_RETRY_S + size / 200e6  # in bytes per second, so it can be answered before
            self._retry_at = min(self._retry_at, now + retry_after)
            each = _PendingReply(
                request=request,
                frames=self._encoded(request),
                last_seen=self._listened,
                limit=silence or self._configs.request_timeout_s,
                retry_at=now + retry_after,
                retry_after=retry_after,
                log_at=now + _LOG_WAIT_AFTER_S,
                since=now,
            )
            self._pending[self._sequence] = each
            pending.append(each)
            self._send(request.server, each.frames)
        return PendingReplies(pending)

    def wait(self, pending: PendingReplies) -> list[Message]:
        """Return the replies, in the order of the requests. Raises the same errors as `ask`."""
        self._waiting = pending
        try:
            while pending.open:
                self._poll(max(0.0, self._retry_at - time.monotonic()))
        finally:
            self._waiting = None
        return pending.replies

    def forget(self, kind: Kind) -> None:
        """Ignore the replies to requests of this kind. Call it after an error, or another refusal of the same
        call would be raised by the next one.
        """
        self._pending = {n: each for n, each in self._pending.items() if each.request.kind is not kind}

    def waits(self) -> Document | None:
        """Return this trainer's current wait for fleetrun's probe, or None if it does not wait. Another
        thread calls it. `trainers` are the trainers without which the server cannot answer. If `trainers` is
        empty, the trainer waits for the server itself.
        """
        waiting = self._waiting
        open_ = waiting.without_reply if waiting is not None else []
        if not open_:
            return None
        each = next((each for each in open_ if each.awaited), open_[0])
        found = re.fullmatch(r"trainer (\d+(?:, \d+)*)|the initial values of trainer (\d+)", each.awaited)
        return {
            "server": each.request.server,
            "what": _in_words(each.request, others=found is not None),
            "trainers": [int(rank) for rank in (found[1] or found[2]).split(", ")] if found else [],
            "why": "" if found else each.awaited,
            "seconds": round(time.monotonic() - each.since, 3),
        }

    def poll(self, wait_s: float = 0.0) -> None:
        """Read the received replies, after waiting up to `wait_s` for one. Raises the same errors as `ask`,
        for any request in flight.
        """
        if self._pending:
            self._poll(wait_s)

    def _encoded(self, request: Request) -> list[Buffer]:
        message = Message(
            kind=request.kind,
            rank=self._rank,
            incarnation=self._incarnation,
            sequence=self._sequence,
            number=request.number,
            code=request.code,
            parts=request.parts,
        )
        try:
            return encode(message)
        except WireError as error:
            what = _in_words(request, others=False)
            raise ServerError(f"Could not send {what} to {self._name(request.server)}: {error}") from error

    def _poll(self, wait_s: float) -> None:
        """Wait for replies, read them, and send overdue requests again."""
        received = self._receive_ready(wait_s)
        if time.monotonic() < self._retry_at and wait_s:
            return
        while received:  # read everything first, because an answered request is not overdue
            received = self._receive_ready(0.0)
        now = time.monotonic()
        for each in list(self._pending.values()):
            if now >= each.retry_at:
                self._send_again(each, now)
        self._retry_at = min((each.retry_at for each in self._pending.values()), default=math.inf)

    def _receive_ready(self, wait_s: float) -> bool:
        """Wait for a message, and receive one from every server that has sent any.

        Only `wait_s` counts as listening. If the wait took longer, this process was suspended, and unread
        replies may be waiting.
        """
        started = time.monotonic()
        ready = self._poller.poll(math.ceil(wait_s * 1000))
        self._listened += min(wait_s, time.monotonic() - started)
        for socket, _ in ready:
            self._receive(socket)
        return bool(ready)

    def _send_again(self, each: _PendingReply, now: float) -> None:
        if self._listened - each.last_seen > each.limit:
            raise ServerError(
                f"{self._name(each.request.server)} did not answer {each.request.kind.name} within "
                f"{each.limit:g} s. It may have failed or be unreachable. See its log."
            )
        self._send(each.request.server, each.frames)
        each.retry_after = min(2 * each.retry_after, _MAX_RETRY_S, each.limit / 2)
        # Random, so that trainers do not all retry at the same moment when a server returns.
        each.retry_at = now + each.retry_after * self._random.uniform(0.75, 1.0)
        if now >= each.log_at:
            each.log_at = now + _LOG_WAIT_AFTER_S
            what = each.awaited or f"an answer from {self._name(each.request.server)}"
            glog(f"{self._who} is waiting for {what} ({each.request.kind.name})")

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        server = self._servers[socket]
        try:
            reply = decode([frame.buffer for frame in receive(socket)])
        except WireError as error:
            if error.code is Code.BAD_VERSION:
                raise ServerError(
                    f"{self._name(server)} uses an incompatible protocol version: {error}. Install the same "
                    "version of fleetrun on all nodes."
                ) from error
            return  # damaged in transit, so the retry requests it again
        if reply.code is Code.BAD_VERSION:
            raise ServerError(
                f"{self._name(server)} runs another version of fleetrun: {reply.text}. Install one version "
                "on all nodes."
            )
        each = self._pending.get(reply.sequence)
        if each is None or each.request.server != server or reply.incarnation != self._incarnation:
            return  # a probe, a second answer, or an error about damaged bytes, which the retry repeats
        each.last_seen = self._listened
        if reply.kind is Kind.WAIT:
            each.awaited = reply.text
            return
        del self._pending[reply.sequence]
        if reply.kind is Kind.REFUSED:
            raise self._refused(each, reply)
        each.reply = reply

    def _refused(self, each: _PendingReply, reply: Message) -> FleetError:
        if reply.code is Code.TRAINER_LOST:
            return TrainerLostError(
                f"{reply.text}, and {self._name(each.request.server)} cannot continue without it"
            )
        kind = ServerFullError if reply.code is Code.NO_MEMORY else ServerError
        return kind(
            f"{self._name(each.request.server)} refused {each.request.kind.name} ({reply.code.name}): "
            f"{reply.text}"
        )

    def _send(self, server: int, frames: Sequence[Buffer]) -> None:
        try:
            send(self._sockets[server], frames)
        except zmq.Again:
            return  # the queue to this server is full, so the request is sent later

    def _name(self, server: int) -> str:
        return f"server {server} at {self._endpoints[server]}"


def _in_words(request: Request, *, others: bool) -> str:
    """Describe a trainer's wait in the words of its script. Steps are counted from 1. A pull as of step n
    waits for the pushes of the `others` before step n.
    """
    if request.kind is Kind.PULL:
        return f"the push of step {request.number}" if others else f"the pull of step {request.number + 1}"
    if request.kind is Kind.PUSH:
        return f"the push of step {request.number + 1}"
    name = _IN_WORDS.get(request.kind, request.kind.name)
    return f"{name} #{request.number}" if request.kind in (Kind.BARRIER, Kind.GATHER) else name
