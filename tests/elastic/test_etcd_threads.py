"""What the two threads of a client do, in the thread of the test, with an etcd that follows a script."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fleetrun.elastic.etcd.client import (
    NOT_FOUND,
    Rejected,
    StreamEnded,
    StreamInterrupt,
    UnknownOutcome,
    Unreachable,
)
from fleetrun.elastic.etcd.threads import LONGEST, SHORTEST, Backoff, Request, Watcher, Worker
from fleetrun.elastic.etcd.wire import Keys
from fleetrun.errors import LaunchError

KEYS = Keys("job")
GRANTED = {"ID": "77"}
ALIVE = {"result": {"TTL": "2"}}
EXPIRED = {"result": {"ID": "77"}}


class Script:
    """A client whose answers are written down: values to return, errors to raise, functions to call first."""

    name = "h:2379"
    deadline: float | None = None

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, Any]] = []
        self.closed = False

    def ask(self, path: str, body: Any, *, repeat: bool = True) -> Any:
        self.asked.append((path, body))
        return self._next()

    def follow(self, path: str, questions: Any, patience: float, cut: StreamInterrupt) -> Any:
        self.asked.append((path, questions))
        stream = self._next()
        for each in stream:
            if isinstance(each, Exception):
                raise each
            yield each

    def _next(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    def close(self) -> None:
        self.closed = True

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


class Seen:
    """Of both kinds of threads; `story` is what it was told."""

    def __init__(self) -> None:
        self.story: list[Any] = []

    def reading(self):
        return

    def read_all(self, turn, entries, revision):
        self.story.append(("all", turn, sorted(entries), revision))

    def changed(self, changes):
        self.story.append([change.revision for change in changes])

    def unreadable(self, why):
        self.story.append(why)

    def leased(self, *, fresh):
        self.story.append("fresh" if fresh else "again")

    def unanswered(self, why):
        self.story.append(why)

    def gave_up(self, error):
        self.story.append(error)


# ---- watching

CREATED = {"created": True}
REVISION_6 = {"header": {"revision": "6"}}


def event(revision: int) -> dict[str, Any]:
    kv = {"key": KEYS.one("k/1"), "create_revision": "1", "mod_revision": str(revision)}
    return {"events": [{"kv": kv}]}


def watched(*streams_and_readings: Any, prefixes: tuple[str, ...] = ("k/",)) -> tuple[Script, list[Any]]:
    """Until the script ends, which it does as the last stream."""
    seen = Seen()
    script = Script(*streams_and_readings, lambda: watcher.end() or ())
    watcher = Watcher(script, KEYS, 5.0, seen)
    watcher.watch(prefixes)
    watcher.run()
    assert script.closed
    return script, seen.story


def test_the_watch_begins_before_the_reading_and_counts_after_it():
    script, story = watched([CREATED | event(5), event(6), event(7), event(8)], REVISION_6)
    assert script.paths == ["/watch", "/kv/txn", "/watch"]
    assert story == [("all", 1, [], 6), [7], [8]]


def test_the_reading_waits_for_the_watches_of_all_prefixes():
    _, story = watched([CREATED, event(5), event(7), CREATED, event(8)], REVISION_6, prefixes=("k/", "s"))
    assert story == [("all", 1, [], 6), [7], [8]]


def test_a_watch_that_is_cancelled_is_begun_anew():
    script, story = watched([CREATED, {"canceled": True}], REVISION_6, REVISION_6, [CREATED], REVISION_6)
    assert script.paths.count("/watch") == 3
    assert story == [("all", 1, [], 6)] * 2


def test_a_stream_that_ends_is_not_a_failure_yet():
    _, story = watched([CREATED, StreamEnded("closed")], REVISION_6, [CREATED], REVISION_6)
    assert story == [("all", 1, [], 6)] * 2


@pytest.mark.parametrize("error", [Unreachable("no"), Rejected(3, "no")])
def test_a_failure_is_reported_and_tried_again(error):
    _, story = watched([CREATED], error, [CREATED], REVISION_6)
    assert story == ["no", ("all", 1, [], 6)]


def test_a_watch_that_is_not_confirmed_is_a_failure():
    _, story = watched([], [CREATED], REVISION_6)
    assert story == ["h:2379: no answer to a watch within 5 s", ("all", 1, [], 6)]


def test_a_final_error_ends_the_watcher():
    seen, error = Seen(), LaunchError("never")
    script = Script(error)
    watcher = Watcher(script, KEYS, 5.0, seen)
    watcher.watch(("k/",))
    watcher.run()
    assert (seen.story, script.closed) == ([error], True)


def test_without_prefixes_nothing_is_asked():
    script, seen = Script(), Seen()
    watcher = Watcher(script, KEYS, 5.0, seen)
    thread = threading.Thread(target=watcher.run)
    thread.start()
    watcher.end()
    thread.join(60)
    assert (script.asked, seen.story) == ([], [])


# ---- asking


class Asked:
    """A worker, its script, and what became of its jobs."""

    def __init__(self, *answers: Any, seconds: int = 40) -> None:
        self.seen = Seen()
        self.script = Script(*answers)
        self.proofs: list[bool] = []
        self.worker = Worker(self.script, seconds, self.seen, lambda: self.proofs.append(True))
        self.told: list[Any] = []

    def job(self, name: str, *, repeat: bool = True, last: bool = False) -> None:
        def answered(answer: Any) -> None:
            self.told.append((name, answer))
            if last:
                self.worker.end(5.0)

        body: Callable[[str], Any] = lambda lease: {"name": name, "lease": lease}  # noqa: E731
        self.worker.submit(Request(path=name, body=body, answered=answered, repeat=repeat, write=True))

    def run(self) -> list[Any]:
        self.worker.run()
        assert self.script.closed
        return self.seen.story


def test_a_lease_then_the_jobs_in_their_order_then_the_end():
    asked = Asked(GRANTED, {"n": 1}, {"n": 2}, {})
    asked.job("first")
    asked.job("second", last=True)
    assert asked.run() == ["fresh"]
    assert asked.told == [("first", {"n": 1}), ("second", {"n": 2})]
    assert asked.script.paths == ["/lease/grant", "first", "second", "/lease/revoke"]
    assert asked.script.asked[1][1]["lease"] == "77"
    assert asked.proofs == [True, True]


def test_no_member_answers_and_then_one_does():
    asked = Asked(Unreachable("no"), Unreachable("still no"), GRANTED, {}, {})
    asked.job("job", last=True)
    assert asked.run() == ["no", "still no", "fresh"]


def test_what_was_not_answered_is_asked_again_after_the_lease_was_looked_at():
    asked = Asked(GRANTED, Unreachable("no"), ALIVE, {}, {})
    asked.job("job", last=True)
    assert asked.run() == ["fresh", "no", "again"]
    assert asked.script.paths == ["/lease/grant", "job", "/lease/keepalive", "job", "/lease/revoke"]


def test_what_must_not_be_repeated_is_given_up():
    asked = Asked(GRANTED, UnknownOutcome("no"), ALIVE, {}, {})
    asked.job("once", repeat=False)
    asked.job("next", last=True)
    assert asked.run() == ["fresh", "no", "again"]
    assert asked.told == [("once", None), ("next", {})]


def test_a_lease_that_has_ended_is_replaced_and_the_job_done_under_the_new_one():
    asked = Asked(GRANTED, Rejected(NOT_FOUND, "lease"), {"ID": "78"}, {}, {})
    asked.job("job", last=True)
    assert asked.run() == ["fresh", "fresh"]
    assert asked.script.asked[3] == ("job", {"name": "job", "lease": "78"})


@pytest.mark.slow
def test_a_lease_is_renewed_after_a_quarter_of_its_time_and_replaced_when_it_is_gone():
    asked = Asked(GRANTED, ALIVE, EXPIRED, GRANTED, lambda: asked.worker.end(5.0) or ALIVE, {}, seconds=2)
    asked.seen.leased = lambda *, fresh: due.append(asked.worker._renew_at - time.monotonic())
    due: list[float] = []
    started = time.monotonic()
    assert asked.run() == []
    assert time.monotonic() - started >= 1.5
    assert len(due) == 2
    assert max(due) <= 0.5
    assert asked.script.paths[-1] == "/lease/revoke"


def test_a_final_error_ends_the_worker():
    error = LaunchError("never")
    asked = Asked(error)
    assert asked.run() == [error]


def test_the_end_does_not_wait_for_an_etcd_that_does_not_answer():
    asked = Asked(GRANTED, lambda: {}, Unreachable("no"))
    asked.job("job", last=True)
    assert asked.run() == ["fresh"]
    asked = Asked(lambda: asked.worker.end(5.0) or GRANTED, Unreachable("no"))
    asked.job("job")
    assert asked.run() == ["fresh"]


def test_pauses_grow_until_it_works():
    pauses = Backoff()
    found = [pauses.next() for _ in range(10)]
    assert (found[0], found[-1]) == (SHORTEST, LONGEST)
    assert found == sorted(found)
    pauses.reset()
    assert pauses.next() == SHORTEST
