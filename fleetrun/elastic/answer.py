"""Answer the requests of commands and other nodes to this node. `ask_wire.py` describes the protocol.

The launcher answers `state`, `ranks`, `stop`, `restart` and `type` by itself, in one piece. For the other
requests it runs a helper process (`fleetrun.relay`), which computes the next piece of the answer when the
asker has read the previous one. If a command reads slowly, only this process waits for it. When the command
ends, is killed or is suspended, its lease ends and its request disappears. The node then ends the process.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from fleetrun.aliases import Callback
from fleetrun.decoding import WRONG
from fleetrun.elastic.ask_wire import (
    LARGEST,
    LONGEST_NAME,
    LONGEST_REQUEST,
    Piece,
    Request,
    pack_piece,
    unpack_request,
)
from fleetrun.elastic.membership import Membership
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.store import Entries, Entry, Store
from fleetrun.errors import LaunchError
from fleetrun.host.interpreter import helper_command
from fleetrun.pod.companion import Companion
from fleetrun.pod.events import Detail
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.process import Exit

MOST_PROCESSES = 8
"""Most helper processes at a time. Each costs one of the few watches of a store session."""

LINGER, LINGER_LEAST = 0.5, 0.25
"""Seconds that a node stays at the end of a job for commands that follow its logs: at most `LINGER`. Within
`LINGER_LEAST`, its helper process reads the logs once more.
"""

_AGAIN = 0.2  # seconds until a failed write of a piece is repeated
_LONG = 0.2  # seconds; the store keeps the request of a lost asker for longer
_LONGEST_BY = 100


class Answers:
    """The answers of this node to the requests in the store.

    `pod` names this node's pod on a command line. `companions` contains the pids of the helper processes.

    `state(brief, most)` returns the state of this node, and `ranks(most, detail, then)` passes the positions
    of its ranks to `then`, both in at most `most` bytes. `stop(command, now)` ends the job on this node on
    behalf of `command`. `restart(name, command)` restarts a process of the job, and returns the reason if it
    cannot.
    """

    def __init__(
        self,
        loop: Loop,
        membership: Membership,
        me: str,
        pod: str,
        companions: set[int],
        token: str,
        *,
        state: Callable[[bool, int], bytes],
        ranks: Callable[[int, Detail, Callable[[bytes], None]], None],
        stop: Callable[[str, bool], None],
        restart: Callable[[str, str], str],
    ) -> None:
        self._loop = loop
        self._membership = membership
        self._me = me
        self._pod = pod
        self._companions = companions
        self._token = token
        self._state = state
        self._ranks = ranks
        self._stop = stop
        self._restart = restart
        self._seen: dict[str, int] = {}
        """Requests in the store, with their revisions."""
        self._answers: dict[str, _Answer] = {}
        self._lingers: float | None = None
        membership.when_looked.append(self._look)
        membership.lingers = self._stays

    def close(self) -> None:
        """End all answers, before the launcher ends. You may call it twice."""
        for name in list(self._answers):
            self._drop(name)

    def _look(self, others: Entries) -> None:
        """Take new requests, drop the answers to ended requests, and continue the other answers."""
        for name in [name for name in self._seen if records.request_key(name) not in others]:
            del self._seen[name]
            self._drop(name)
        for key, entry in others.items():
            if key.startswith(records.REQUESTS_PREFIX):
                self._take(key.removeprefix(records.REQUESTS_PREFIX), entry)
        for answer in list(self._answers.values()):
            answer.go_on()

    def _stays(self) -> bool:
        """Return True if this node should stay for a moment because a command follows its logs.

        This happens once, at the end of the job.
        """
        now = self._loop.clock()
        answers = [each for each in self._answers.values() if each.several]
        if self._lingers is None:
            self._lingers = now
            for seconds in (LINGER_LEAST, LINGER) if answers else ():
                self._loop.after(seconds, self._look_again)
        waited, unread = now - self._lingers, any(each.unread for each in answers)
        return bool(answers) and (waited < LINGER_LEAST or (unread and waited < LINGER))

    def _look_again(self) -> None:
        if not self._membership.closed:
            self._membership.changed()

    def _take(self, name: str, entry: Entry) -> None:
        if self._seen.get(name) == entry.revision or len(name) > LONGEST_NAME:  # else no key for the answer
            return
        self._seen[name] = entry.revision
        self._drop(name)
        if len(entry.value) > LONGEST_REQUEST or name.startswith(f"{self._me}."):
            return
        request = unpack_request(name, entry.value, self._token)
        if request is None or (request.nodes and self._me not in request.nodes):
            return
        key = records.answers_prefix(name) + self._me
        answer = _Answer(self._loop, self._membership.store, key, partial(self._drop, name))
        self._answers[name] = answer
        try:
            self._begin(answer, request)
        except ValueError as error:
            answer.add(code=2, error=str(error))
        except LaunchError as error:
            answer.add(code=1, error=error.message)

    def _begin(self, answer: _Answer, request: Request) -> None:
        """Start to answer a request. Raises LaunchError and ValueError."""
        secret, options = bool(self._token), request.options
        request.check(secret=secret)
        most = min(LARGEST, max(0, options.get("most", LARGEST)))
        if request.verb == "state":
            answer.add(self._state(options.get("brief", False), most), 0)
        elif request.verb == "ranks":
            detail = Detail(options.get("detail", Detail.OUTSIDE))
            self._ranks(most, detail, lambda data: answer.add(data, 0))
        elif request.verb == "stop":
            now = options.get("now", False)
            answer.add(code=0)
            command = f"`fleetrun stop{' --now' if now else ''}` {_asker(request)}"
            answer.when_ended(lambda: self._stop(command, now))
        elif request.verb == "restart":
            why_not = self._restart(options.get("name", ""), f"`fleetrun top` {_asker(request)}")
            answer.add(code=1 if why_not else 0, error=why_not)
        elif request.verb == "type":
            if (into := self._answers.get(options.get("into", ""))) is not None:
                into.type(options.get("line", ""))
            answer.add(code=0)
        elif sum(each.several for each in self._answers.values()) >= MOST_PROCESSES:
            raise LaunchError(f"the node already answers {MOST_PROCESSES} other requests")
        else:
            answer.run(self._companions, request.words(self._pod, secret=secret))

    def _drop(self, name: str) -> None:
        answer = self._answers.pop(name, None)
        if answer is not None:
            answer.close(leave=self._membership.closed)


def _asker(request: Request) -> str:
    name = "".join(char if char.isprintable() else "?" for char in request.by[:_LONGEST_BY])
    return f"of {name}" if name else "on another host"


class _Answer:
    """The answer to one request: one piece, or the pieces of a helper process. `read` is called after the
    last of several pieces was read.
    """

    def __init__(self, loop: Loop, store: Store, key: str, read: Callback) -> None:
        self.several = False
        """True if a helper process makes the answer."""
        self._loop = loop
        self._store = store
        self._key = key
        self._read = read
        self._since = loop.clock()
        self._number = 0
        self._waiting: deque[Piece] = deque()
        self._sent: Piece | None = None
        self._written = False
        self._companion: Companion | None = None
        self._when_ended = Timer()
        self._closed = False

    @property
    def unread(self) -> bool:
        """True if a piece is on its way."""
        return self._sent is not None or bool(self._waiting)

    def run(self, companions: set[int], words: Sequence[str]) -> None:
        """Start the helper process that runs the command. Raises LaunchError."""
        self._companion = Companion(
            self._loop,
            companions,
            helper_command("fleetrun.relay", *words),
            received=self._receive,
            ended=self._ended,
        )
        self.several = True
        self._store.watch(self._key)
        self.add()

    def type(self, line: str) -> None:
        """Write a line to the stdin of the command."""
        if self._companion is not None:
            self._companion.write(f"{line}\n".encode())

    def when_ended(self, then: Callback) -> None:
        """Call `then` after the asker has all answers, or after a moment."""
        self._when_ended = Timer(then)
        self._loop.after(LINGER, self._when_ended.fire)

    def add(self, data: bytes = b"", code: int | None = None, error: str = "") -> None:
        """Add a piece. With a code, it is the last."""
        self._waiting.append(Piece(number=self._number, data=data, code=code, error=error))
        self._number += 1
        self.go_on()

    def go_on(self) -> None:
        """Write the next piece, if the previous piece was read."""
        if self._closed:
            return
        if self.several and self._written and self._key not in self._store.mirror:
            last, self._sent, self._written = self._sent, None, False
            if last is not None and last.code is not None:
                self._read()
                return
            if self._companion is not None:
                self._companion.write(b"more\n")
        if self._sent is None and self._waiting:
            self._sent = self._waiting.popleft()
            self._put(self._sent)

    def close(self, *, leave: bool) -> None:
        """End the answer. With `leave`, the store is closed already."""
        self._closed = True
        if self._companion is not None:
            self._companion.close()
        if self.several and not leave:
            self._store.unwatch(self._key)
        # The asker deletes short answers by itself, unless it is lost.
        if not leave and (self.several or self._loop.clock() - self._since >= _LONG):
            self._store.delete(self._key)
        self._when_ended.fire()  # last, because it may close the store

    def _put(self, piece: Piece) -> None:
        def then(done: bool) -> None:
            """Continue after the write. Only now the mirror has the piece, unless it was read meanwhile."""
            if self._closed:
                return
            self._written = done
            if done:
                self.go_on()
            else:
                self._loop.after(_AGAIN, partial(self._put, piece))

        if not self._closed:
            self._store.put(self._key, pack_piece(piece), leased=True, then=then)

    def _receive(self, line: bytes) -> None:
        """Handle a line of the helper process: a piece, or the end of the command."""
        try:
            fields = json.loads(line)
            data = b64decode(fields.get("data", ""))
            code, error = fields.get("code"), str(fields.get("error", ""))
        except WRONG:
            return
        self.add(data, code, error)

    def _ended(self, exit: Exit) -> None:
        """Handle the end of the helper process. If it did not report the command's end, it was killed."""
        if not any(each.code is not None for each in (*self._waiting, *filter(None, (self._sent,)))):
            self.add(code=1, error=f"the process that answers was ended: {exit}")
