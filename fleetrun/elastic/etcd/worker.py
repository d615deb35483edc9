"""The thread that asks an etcd: a lease, which it keeps alive, and writes and readings one after the other,
in the order in which they were asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleetrun.elastic.etcd.client import Client
from fleetrun.elastic.etcd.errors import NOT_FOUND, Rejected, UnknownFate, Unreachable
from fleetrun.elastic.etcd.pauses import Pauses
from fleetrun.elastic.etcd.wire import Body
from fleetrun.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A question. `body` is told the lease's id; `answered` is called in the thread, with None when nobody
    knows what became of it.
    """

    path: str
    body: Callable[[str], Body]
    answered: Callable[[Body | None], None]
    repeat: bool
    """Asking twice does no harm."""
    write: bool


class Asker(Protocol):
    """Is called in the worker's thread."""

    def leased(self, *, fresh: bool) -> None:
        """There is a lease, a new one or (after trouble) still the old one."""
        ...

    def unanswered(self, why: str) -> None:
        """No member answers; the worker goes on trying."""
        ...

    def hopeless(self, error: LaunchError) -> None:
        """The worker has stopped."""
        ...


class Worker:
    def __init__(self, client: Client, seconds: int, asker: Asker, proven: Callable[[], None]) -> None:
        """`seconds`: of the lease. `proven` is called when etcd took a write."""
        self._client = client
        self._seconds = seconds
        self._asker = asker
        self._proven = proven
        self._news = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._until: float | None = None  # with the end in sight: when to give up
        self._lease = ""
        self._renew_at = 0.0
        self._in_trouble = False

    def ask(self, job: Job) -> None:
        with self._news:
            self._jobs.append(job)
            self._news.notify()

    def end(self, within: float) -> None:
        """Do what was asked for, revoke the lease, and stop; give up after so many seconds."""
        with self._news:
            self._until = self._client.deadline = time.monotonic() + within
            self._news.notify()

    def run(self) -> None:
        """The thread's. Until `end`."""
        pauses = Pauses()
        while not self._finished():
            try:
                self._take_turn()
                pauses.over()
            except (Unreachable, Rejected) as error:
                if self._until is not None:
                    break
                self._in_trouble = True
                self._asker.unanswered(str(error))
                self._rest(pauses.next())
            except LaunchError as error:
                self._asker.hopeless(error)
                break
        self._client.close()

    def _finished(self) -> bool:
        """At the end, and there is nothing left to do. Revokes the lease."""
        if self._until is None or self._jobs:
            return False
        if self._lease:
            try:
                self._client.ask("/lease/revoke", {"ID": self._lease})
            except (Unreachable, Rejected, LaunchError):
                return True  # it ends by itself
        return True

    def _rest(self, seconds: float) -> None:
        with self._news:
            self._news.wait_for(lambda: self._until is not None, seconds)

    def _take_turn(self) -> None:
        if not self._lease:
            self._grant()
        elif self._in_trouble or time.monotonic() >= self._renew_at:
            self._renew()
        else:
            with self._news:
                patience = max(0.0, self._renew_at - time.monotonic())
                self._news.wait_for(lambda: self._jobs or self._until is not None, patience)
            if self._jobs:
                self._do(self._jobs[0])

    def _grant(self) -> None:
        answer = self._client.ask("/lease/grant", {"TTL": self._seconds, "ID": 0})
        self._lease = str(answer["ID"])
        self._kept(fresh=True)

    def _renew(self) -> None:
        answer = self._client.ask("/lease/keepalive", {"ID": self._lease})
        if int(answer.get("result", {}).get("TTL", 0)) > 0:
            self._kept(fresh=False)
        else:
            self._lease = ""

    def _kept(self, *, fresh: bool) -> None:
        self._renew_at = time.monotonic() + self._seconds / 4
        if fresh or self._in_trouble:
            self._asker.leased(fresh=fresh)
        self._in_trouble = False

    def _do(self, job: Job) -> None:
        try:
            answer = self._client.ask(job.path, job.body(self._lease), repeat=job.repeat)
        except UnknownFate as error:
            self._jobs.popleft()
            job.answered(None)
            raise Unreachable(str(error)) from None
        except Rejected as error:
            if error.code != NOT_FOUND:
                raise
            self._lease = ""  # the job is done under the next one
            return
        self._jobs.popleft()
        if job.write:
            self._proven()
        job.answered(answer)
