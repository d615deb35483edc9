"""Trainers that wait for each other in vain are told; who waits for something else is not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trainers.ps.server.test_service import WANT, Bench
from trainers.ps.configs import PsConfigs
from trainers.ps.server.publisher import Publisher
from trainers.ps.server.saving import SaveRequest
from trainers.ps.wire import Code, Field, Kind, Message, bytes_part


def waiting_for_each_other() -> tuple[Bench, Message, Message]:
    """What trainer 0 asks, at a barrier, and trainer 1, for the end of a step that needs both."""
    bench = Bench().opened()
    barrier = Message(kind=Kind.BARRIER, rank=0, sequence=500, number=1)
    bench.push(1, 0)
    step = Message(kind=Kind.PULL, rank=1, sequence=501, number=1, parts=WANT)
    return bench, barrier, step


def test_trainers_that_wait_for_each_other_are_told() -> None:
    bench, barrier, step = waiting_for_each_other()
    for _ in range(2):
        for request in (barrier, step):
            assert bench.send(request).kind is Kind.WAIT
    bench.pass_time(100)
    assert bench.late[500].kind is Kind.WAIT  # trainer 1 may still compute: it has asked but once more
    for request in (barrier, step):
        bench.send(request)
    bench.pass_time(1)
    for sequence in (500, 501):
        assert bench.late[sequence].code is Code.DEADLOCK
        assert "trainer 0 waits at fleet.barrier_worker(), trainer 1 waits for" in bench.late[sequence].text


def test_who_asks_something_new_is_not_at_a_standstill() -> None:
    bench, barrier, step = waiting_for_each_other()
    for _ in range(4):
        bench.send(barrier)
        bench.send(step)
        bench.ask(Kind.PULL, 1, parts=WANT)
    bench.pass_time(10)
    assert bench.late[500].kind is Kind.WAIT


def wait_long(bench: Bench, *requests: Message) -> None:
    """All of them have been asked again and again."""
    for _ in range(4):
        for request in requests:
            assert bench.send(request).kind is Kind.WAIT
    bench.pass_time(10)


def test_who_waits_for_a_disk_is_not_at_a_standstill(tmp_path: Path) -> None:
    """One saves and the others wait for it at a barrier, however long it takes."""
    publisher = Publisher([], str(tmp_path), PsConfigs(), sync=False, keys=None, wake=lambda: None)
    bench = Bench(sync=False, reading=True, publisher=publisher).opened()
    order = bytes_part(Field.TEXT, SaveRequest(str(tmp_path), "save-1", 0).encode())
    barrier = Message(kind=Kind.BARRIER, rank=1, sequence=500, number=1)
    for sequence, kind, parts in (
        (501, Kind.SAVE, (order,)), (502, Kind.SHRINK, ()), (503, Kind.REFRESH, ())
    ):  # fmt: skip
        wait_long(bench, barrier, Message(kind=kind, sequence=sequence, parts=parts))
        assert bench.late[500].kind is Kind.WAIT
        assert bench.late[sequence].kind is Kind.WAIT


def test_a_save_that_waits_for_somebody_at_a_barrier_is_at_a_standstill(tmp_path: Path) -> None:
    bench = Bench(sync=False, max_staleness=0).opened()
    order = bytes_part(Field.TEXT, SaveRequest(str(tmp_path), "save-1", 0).encode())
    barrier = Message(kind=Kind.BARRIER, rank=1, sequence=500, number=1)
    wait_long(bench, barrier, Message(kind=Kind.SAVE, sequence=501, number=1, parts=(order,)))
    for sequence in (500, 501):
        assert bench.late[sequence].code is Code.DEADLOCK


def test_who_comes_back_while_its_former_connection_is_there_is_not_at_a_standstill() -> None:
    bench = Bench(sync=False).opened()
    barrier = Message(kind=Kind.BARRIER, rank=0, sequence=500, number=1)
    again = bench.hello(1, life=1, restarts=1)
    parts = bench.hello_parts()
    hello = Message(kind=Kind.HELLO, rank=1, incarnation=1, sequence=again.sequence, number=1, parts=parts)
    wait_long(bench, barrier, hello)
    assert bench.late[500].kind is Kind.WAIT
    bench.gone.add(b"1-0")
    bench.pass_time(1)
    assert bench.late[hello.sequence].kind is Kind.DONE


def test_the_save_of_one_that_was_killed_over_it_is_no_standstill(tmp_path: Path) -> None:
    """At the look that lets its successor in, it is still there."""
    bench = Bench(sync=False, reading=True).opened()
    order = bytes_part(Field.TEXT, SaveRequest(str(tmp_path), "save-1", 0).encode())
    barrier = Message(kind=Kind.BARRIER, rank=0, sequence=500, number=1)
    wait_long(bench, barrier, Message(kind=Kind.SAVE, rank=1, sequence=501, parts=(order,)))
    hello = bench.hello(1, life=1, restarts=1)
    bench.gone.add(b"1-0")
    bench.pass_time(1)
    assert bench.late[hello.sequence].kind is Kind.DONE
    assert bench.late[501].code is Code.UNKNOWN_CLIENT
    assert bench.late[500].kind is Kind.WAIT


def saves(
    bench: Bench, rank: int, id: str, folder: Path, mode: int = 0, after: Sequence[str] = ()
) -> Message:
    order = bytes_part(Field.TEXT, SaveRequest(str(folder), id, mode, after).encode())
    return bench.ask(Kind.SAVE, rank, parts=(order,))


def committed(bench: Bench, rank: int, id: str) -> None:
    bench.ask(Kind.SAVED, rank, number=1, parts=(bytes_part(Field.TEXT, id.encode()),))


def test_two_trainers_do_not_wait_for_each_others_saves(tmp_path: Path) -> None:
    """On two servers each of them could be the first on one, and neither would end."""
    bench = Bench(sync=False).opened()
    turn = bytes_part(Field.TEXT, SaveRequest(str(tmp_path), "turn-1", 0, turn="tables").encode())
    assert bench.ask(Kind.SAVE, 0, parts=(turn,)).kind is Kind.DONE
    assert saves(bench, 0, "save-1", tmp_path).kind is Kind.WAIT
    refused = saves(bench, 1, "save-2", tmp_path)
    assert (refused.code, refused.text) == (
        Code.FAILED,
        "trainer 0 is saving; one trainer can save at a time",
    )
    committed(bench, 0, "save-1")
    committed(bench, 0, "turn-1")
    assert saves(bench, 1, "save-3", tmp_path).kind is Kind.WAIT
    assert saves(bench, 0, "save-4", tmp_path).kind is Kind.WAIT, "on a server that does not give turns"


@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.SHRINK])
def test_a_trainer_whose_pushes_were_lost_does_not_wait_for_a_save_that_waits_for_them(
    kind: Kind, tmp_path: Path
) -> None:
    """The save may wait on another server, where it cannot see that the trainer waits here."""
    bench = Bench(sync=False, max_staleness=0).opened()
    bench.steps.lose_pushes([0, 1])
    first, second = (
        bytes_part(Field.TEXT, SaveRequest(str(tmp_path), f"turn-{rank}", 0, turn="tables").encode())
        for rank in (0, 1)
    )
    assert bench.ask(Kind.SAVE, 0, number=4, parts=(first,)).kind is Kind.DONE
    order = bytes_part(Field.TEXT, SaveRequest(str(tmp_path), "save-1", 0).encode())
    bench.ask(Kind.SAVE, 0, number=4, parts=(order,))
    bench.push(1, 2)
    of_second = (second,) if kind is Kind.SAVE else ()
    refused = bench.ask(kind, 1, number=3, parts=of_second)
    assert (refused.code, refused.text) == (
        Code.FAILED,
        "trainer 0 is saving; one trainer can save at a time",
    )
    bench.push(1, 3)
    assert bench.ask(kind, 1, number=4, parts=of_second).kind is Kind.WAIT, "the save is not waiting for it"


def test_a_delta_may_follow_a_save_that_this_server_was_not_told_was_committed(tmp_path: Path) -> None:
    bench = Bench(sync=False).opened()
    saves(bench, 0, "save-1", tmp_path)
    committed(bench, 0, "save-1")
    saves(bench, 0, "save-2", tmp_path, mode=1, after=("save-1",))  # and then its trainer is killed
    bench.gone.add(b"0-0")
    bench.hello(0, life=1, restarts=1)
    bench.pass_time(1)
    for after in (("save-0", "save-2"), ()):
        assert "it has recorded changes since save-1" in saves(bench, 1, "x", tmp_path, 1, after).text
    assert saves(bench, 1, "save-3", tmp_path, 1, ("save-1", "save-2")).kind is Kind.WAIT
