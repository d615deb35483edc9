"""Answer requests of commands to the nodes of a running job, through the rendezvous store.

Each asked node runs a command of fleetrun on itself, such as `fleetrun logs --json`, and passes the output on
piece by piece.

    state/requests/NAME    the request and its nodes    all nodes watch `state/` anyway
    answers/NAME/ID        the next piece of node ID    only the asking command and this node watch it

The store holds these keys only during a request, and all keys are leased. The asking command deletes a piece
after it has read it, and the node then writes the next one. The store therefore holds at most one piece of
each node. If a command reads slowly, only the helper process that reads the log waits for it. When the
command ends, is killed or is suspended, its lease ends and its request disappears. The nodes then end the
processes that they run for it.

In a job with a token, the token signs each request. Without a token, anyone who can reach the store can write
requests, and could also join the job and end it. A node then answers only `stop`, `restart`, `status`, `why`,
`stacks` and `logs`. For `logs` it reads only the last `MOST_BYTES_OPEN` bytes, and new lines.
"""

from __future__ import annotations

import hmac
import json
import os
import zlib
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fleetrun.aliases import Callback, Fields, Strings
from fleetrun.elastic.membership import Membership
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import WRONG
from fleetrun.elastic.store import Entries, Entry, Store
from fleetrun.envs.contract import derive_key
from fleetrun.errors import LaunchError
from fleetrun.frozen import frozen_by_name
from fleetrun.host.interpreter import helper_command
from fleetrun.pod.companion import Companion
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.process import Exit

# ---- Requests and answers

MOST_REQUESTS = 8
"""Most requests that a node answers at a time. Each costs the node a process."""

MOST_ANSWERS = 2 * MOST_REQUESTS
"""Most answers at a time, including refusals. Further requests are ignored.

Each answer costs one of the few watches of a store session.
"""

MOST_BYTES, MOST_BYTES_OPEN = 16 << 20, 256 << 10
"""Bytes of older log lines: most bytes that a node sends with a token, and most bytes that it reads without
one.
"""

LINGER, LINGER_LEAST = 0.5, 0.25
"""Seconds that a node stays at the end of a job for commands that follow its logs: at most `LINGER`. Within
`LINGER_LEAST`, its helper process reads the logs once more.
"""

_AGAIN = 0.2  # seconds until a failed write of a piece is repeated
_LONGEST_REQUEST = 16 << 10
_LONGEST_NAME = 64
_LONGEST_BY = 100
_UNPACKED = 1 << 20


VERBS: Mapping[str, Mapping[str, type]] = {
    "logs": {"follow": bool, "lines": int, "role": str, "rank": str, "since": str, "grep": str},
    "stacks": {"role": str, "rank": str, "timeout": float},
    "why": {"json": bool},
    "stop": {"now": bool},
    "restart": {"name": str},
    "status": {"json": bool, "watch": bool, "interval": float},
    "report": {"record": bool},
    "bundle": {},
}
"""The permitted requests, with the options that are passed on and the types of their values. Anything else is
kept out of command lines.
"""

ALWAYS = frozenset({"logs", "stacks", "stop", "restart", "status", "why"})
"""The requests that a node answers without a token."""


@frozen_by_name
class Request:
    """A request of a command to nodes."""

    verb: str
    options: Fields
    nodes: Strings = ()  # the ids of the asked nodes; empty: all nodes
    by: str = ""  # `USER on HOST`, for the message of a stop

    def words(self, pod: str, *, secret: bool) -> list[str]:
        """Return the command line after `fleetrun`. Raises ValueError for anything outside `VERBS`."""
        kinds = VERBS.get(self.verb)
        if kinds is None:
            raise ValueError(f"this fleetrun does not know what to answer to {self.verb[:40]!r}")
        words = [self.verb, pod, "--here"]
        for name, value in self.options.items():
            if type(value) is not kinds.get(name):
                raise ValueError(f"{self.verb} of another node takes no {name[:40]!r} such as {value!r:.40}")
            if isinstance(value, str) and _is_no_word(value):
                raise ValueError(f"the {name[:40]!r} of {self.verb} has control characters, or no text")
            if value is True:
                words.append(f"--{name}")
            elif value is not False:
                words.append(f"--{name}={value}")
        if self.verb == "logs":
            limit = ("--most_bytes", str(MOST_BYTES)) if secret else ("--most_read", str(MOST_BYTES_OPEN))
            words += limit
        return words


def _is_no_word(value: str) -> bool:
    """Return True if a shell cannot pass the value to a command, or no user would type it."""
    try:
        return any(byte < 32 and byte != 9 for byte in os.fsencode(value))
    except UnicodeEncodeError:
        return True


def pack_request(name: str, request: Request, token: str) -> bytes:
    """Pack a request, signed with the token if there is one."""
    said = {"do": request.verb, "with": dict(request.options), "nodes": request.nodes, "by": request.by}
    text = json.dumps(said, separators=(",", ":"))
    return json.dumps({"request": text, "signed": _signature(name, text, token)}).encode()


def unpack_request(name: str, data: bytes, token: str) -> Request | None:
    """Read a request. Return None if it lacks the token's signature, or if this version cannot read it."""
    try:
        envelope = json.loads(data)
        text = envelope["request"]
        if not hmac.compare_digest(str(envelope["signed"]), _signature(name, text, token)):
            return None
        said = json.loads(text)
        nodes = tuple(map(str, said["nodes"]))
        return Request(verb=str(said["do"]), options=dict(said["with"]), nodes=nodes, by=str(said["by"]))
    except WRONG:
        return None


def _signature(name: str, text: str, token: str) -> str:
    if not token:
        return ""
    return hmac.new(derive_key(token, b"requests"), f"{name}\n{text}".encode(), "sha256").hexdigest()


@frozen_by_name
class Piece:
    """A piece of a node's output."""

    number: int  # from 0; the first piece is empty and confirms the request
    data: bytes = b""
    code: int | None = None  # in the last piece, the exit code of the command
    error: str = ""  # in the last piece, the end of the command's standard error


def pack_piece(piece: Piece) -> bytes:
    """Pack a piece whose `data` is compressed already."""
    head = {"n": piece.number, "code": piece.code, "error": piece.error}
    return json.dumps(head).encode() + b"\n" + piece.data


def unpack_piece(value: bytes) -> Piece | None:
    """Read a piece. Return None for an invalid value."""
    head, _, packed = value.partition(b"\n")
    try:
        said = json.loads(head)
        data = zlib.decompressobj().decompress(packed, _UNPACKED) if packed else b""
        code = said["code"]
        if not isinstance(said["n"], int) or not (code is None or isinstance(code, int)):
            return None
        return Piece(number=said["n"], data=data, code=code, error=str(said["error"]))
    except (*WRONG, zlib.error):
        return None


# ---- A node that is asked


class Requests:
    """The requests that this node answers.

    `stop(command, now)` ends the job on this node on behalf of `command`. `restart(name, command)` restarts a
    process of the job, and returns the reason if it cannot.

    Set `membership` first, and let it call `look`: `membership.when_looked = requests.look`.
    """

    def __init__(
        self,
        loop: Loop,
        me: str,
        pod: str,
        companions: set[int],
        token: str,
        stop: Callable[[str, bool], None],
        restart: Callable[[str, str], str],
    ) -> None:
        self.membership: Membership | None = None
        """The membership of this node, or None before the node has one."""
        self._loop = loop
        self._me = me
        self._pod = pod
        self._companions = companions
        self._token = token
        self._stop = stop
        self._restart = restart
        self._seen: dict[str, int] = {}
        """Requests in the store, with their revisions."""
        self._answers: dict[str, _Answer] = {}
        self._lingers: float | None = None

    def look(self, others: Entries) -> None:
        """Handle the entries that `membership` sees: take new requests, and continue the answers."""
        for name in [name for name in self._seen if records.request_key(name) not in others]:
            del self._seen[name]
            self._drop(name)
        for key, entry in others.items():
            if key.startswith(records.REQUESTS_PREFIX):
                self._take(key.removeprefix(records.REQUESTS_PREFIX), entry)
        for answer in list(self._answers.values()):
            answer.go_on()

    def close(self) -> None:
        """End all answers, before the launcher ends. May be called twice."""
        for name in list(self._answers):
            self._drop(name)

    def lingers(self) -> bool:
        """Return True if this node should stay for a moment because a command follows its logs.

        This happens once, at the end of the job.
        """
        now = self._loop.clock()
        if self._lingers is None:
            self._lingers = now
            if self._answers:
                for seconds in (LINGER_LEAST, LINGER):
                    self._loop.after(seconds, self._look_again)
        waited = now - self._lingers
        unread = any(answer.unread for answer in self._answers.values())
        return bool(self._answers) and (waited < LINGER_LEAST or (unread and waited < LINGER))

    def _look_again(self) -> None:
        if self.membership is not None and not self.membership.closed:
            self.membership.changed()

    def _take(self, name: str, entry: Entry) -> None:
        if self._seen.get(name) == entry.revision or len(name) > _LONGEST_NAME:
            return
        self._seen[name] = entry.revision
        self._drop(name)
        if len(entry.value) > _LONGEST_REQUEST or self.membership is None:
            return
        request = unpack_request(name, entry.value, self._token)
        if request is None or (request.nodes and self._me not in request.nodes):
            return
        if len(self._answers) >= MOST_ANSWERS:
            return
        key = records.answers_prefix(name) + self._me
        answer = _Answer(self._loop, self.membership.store, key, partial(self._drop, name))
        self._answers[name] = answer
        answer.say()
        try:
            self._begin(answer, request)
        except ValueError as error:
            answer.say(code=2, error=str(error))
        except LaunchError as error:
            answer.say(code=1, error=error.message)

    def _begin(self, answer: _Answer, request: Request) -> None:
        """Start to answer a request. Raises LaunchError and ValueError."""
        words = request.words(self._pod, secret=bool(self._token))
        if not self._token and request.verb not in ALWAYS:
            raise ValueError(f"the job has no secret (FLEETRUN_TOKEN): its nodes tell no {request.verb}")
        if request.verb == "stop":
            answer.say(code=0)
            now = request.options.get("now") is True
            command = f"`fleetrun stop{' --now' if now else ''}` {_asker(request)}"
            answer.when_taken(lambda: self._stop(command, now))
            return
        if request.verb == "restart":
            why_not = self._restart(str(request.options.get("name")), f"`fleetrun top` {_asker(request)}")
            answer.say(code=1 if why_not else 0, error=why_not)
            return
        if sum(each.works for each in self._answers.values()) >= MOST_REQUESTS:
            raise LaunchError(f"it answers {MOST_REQUESTS} other requests")
        answer.run(self._companions, words)

    def _drop(self, name: str) -> None:
        answer = self._answers.pop(name, None)
        if answer is not None:
            answer.close(leave=self.membership is None or self.membership.closed)


def _asker(request: Request) -> str:
    name = "".join(char if char.isprintable() else "?" for char in request.by[:_LONGEST_BY])
    return f"of {name}" if name else "on another host"


class _Answer:
    """The answer to one request. `over` is called after the last piece was read."""

    def __init__(self, loop: Loop, store: Store, key: str, over: Callback) -> None:
        self._loop = loop
        self._store = store
        self._key = key
        self._over = over
        self._number = 0
        self._waiting: deque[Piece] = deque()
        self._sent: Piece | None = None
        self._written = False
        self._companion: Companion | None = None
        self._taken: Callback | None = None
        self._limit = Timer()
        self._closed = False
        store.watch(key)

    @property
    def works(self) -> bool:
        return self._companion is not None

    @property
    def unread(self) -> bool:
        """True if a piece is on its way."""
        return self._sent is not None or bool(self._waiting)

    def run(self, companions: set[int], words: Sequence[str]) -> None:
        """Start the helper process that runs the command. Raises LaunchError."""
        self._companion = Companion(
            self._loop,
            companions,
            helper_command("fleetrun.elastic.relay", *words),
            heard=self._heard,
            ended=self._ended,
        )

    def when_taken(self, then: Callback) -> None:
        """Call `then` after the last piece was read, or a moment later."""
        self._taken = then
        self._limit = self._loop.after(LINGER, self._was_taken)

    def say(self, data: bytes = b"", code: int | None = None, error: str = "") -> None:
        self._waiting.append(Piece(number=self._number, data=data, code=code, error=error))
        self._number += 1
        self.go_on()

    def go_on(self) -> None:
        """Write the next piece, if the previous piece was read."""
        if self._closed:
            return
        if self._sent is not None and self._written and self._key not in self._store.mirror:
            last, self._sent = self._sent.code is not None, None
            if last:
                self._was_taken()
                self._over()
                return
            if self._companion is not None:
                self._companion.write(b"more\n")
        if self._sent is None and self._waiting:
            self._sent = self._waiting.popleft()
            self._put()

    def close(self, *, leave: bool) -> None:
        """End the answer. With `leave`, the store is closed already."""
        if self._closed:
            return
        self._closed = True
        self._was_taken()
        companion, self._companion = self._companion, None
        if companion is not None:
            companion.close()
        if not leave:
            self._store.unwatch(self._key)
            self._store.delete(self._key)

    def _put(self) -> None:
        if self._sent is None or self._closed:
            return
        sent, self._written = self._sent, False

        def then(done: bool) -> None:
            """Continue after the write. Only now the mirror has the piece, unless it was read meanwhile."""
            if self._sent is sent and not self._closed:
                self._written = done
                if done:
                    self.go_on()
                else:
                    self._loop.after(_AGAIN, self._put)

        self._store.put(self._key, pack_piece(sent), leased=True, then=then)

    def _was_taken(self) -> None:
        self._limit.cancel()
        if self._taken is not None:
            then, self._taken = self._taken, None
            then()

    def _heard(self, line: bytes) -> None:
        """Handle a line of the helper process: a piece, or the end of the command."""
        try:
            said = json.loads(line)
            data = b64decode(said.get("data", ""))
            code, error = said.get("code"), str(said.get("error", ""))
        except WRONG:
            return
        self.say(data, code, error)

    def _ended(self, exit: Exit) -> None:
        """Handle the end of the helper process. If it did not report the command's end, it was killed."""
        self._companion = None
        if not any(each.code is not None for each in (*self._waiting, *filter(None, (self._sent,)))):
            self.say(code=1, error=f"the process that answers was ended: {exit}")
