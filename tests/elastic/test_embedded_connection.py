"""Names are resolved in a thread, without blocking the loop."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence

import pytest

from fleetrun.elastic.embedded.connection import Address, Resolver
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import run_for, until
from tests.support.waiting import eventually

Answers = list[tuple[Sequence[Address], str]]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def ask(resolver: Resolver) -> Answers:
    answers: Answers = []
    resolver.ask(lambda addresses, why: answers.append((addresses, why)))
    return answers


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a Path has its own descriptor


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_is_itself_without_a_thread(loop: Loop, host: str) -> None:
    before = set(threading.enumerate())
    answers = ask(Resolver(loop, host, 6768))
    assert set(threading.enumerate()) <= before
    assert answers == [], "not before the loop's turn"
    until(loop, lambda: answers)
    (((family, where),), why) = answers[0]
    assert (where[:2], why) == ((host, 6768), "")
    assert family == (socket.AF_INET6 if ":" in host else socket.AF_INET)


def test_a_name(loop: Loop) -> None:
    answers = ask(Resolver(loop, "localhost", 6768))
    until(loop, lambda: answers)
    assert {where[0] for _, where in answers[0][0]} <= {"127.0.0.1", "::1"}
    assert answers[0][1] == ""


def test_the_loop_runs_while_a_name_is_looked_up(loop: Loop) -> None:
    go = threading.Event()

    def slow(host: str, port: int, **options: object) -> list[object]:
        assert go.wait(60)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    answers = ask(Resolver(loop, "h1", 6768, slow))
    run_for(loop, 0.05)
    assert answers == []
    go.set()
    until(loop, lambda: answers)
    assert answers == [((), "Name or service not known")]


def test_a_cancelled_lookup_is_not_answered(loop: Loop) -> None:
    go = threading.Event()
    before = open_descriptors()
    resolver = Resolver(loop, "h1", 6768, lambda *words, **options: go.wait(60) and [])
    answers = ask(resolver)
    resolver.close()
    resolver.close()
    again = ask(resolver)
    go.set()
    until(loop, lambda: again)
    assert (answers, again) == ([], [((), "")])
    eventually(lambda: open_descriptors() <= before)


def test_an_invalid_name(loop: Loop) -> None:
    answers = ask(Resolver(loop, "x" * 300, 6768))
    until(loop, lambda: answers)
    assert answers[0][0] == ()
    assert answers[0][1] != ""
