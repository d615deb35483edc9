"""A server's state as bytes and back: what comes after must not tell the difference."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest
import torch

from tests.trainers.ps.server.test_service import INITIAL, SPECS, WANT, Bench
from trainers.ps.server.members import Members, SequenceSet
from trainers.ps.server.pushes import Gradient
from trainers.ps.server.state import (
    StateError,
    _length_at,
    _packed_length,
    dump_state,
    restore_state,
    table_names,
)
from trainers.ps.server.store import Overlay
from trainers.ps.tables.rules import SGD, SparseAdam
from trainers.ps.tables.spec import RowOptions, TableKind, TableSpec
from trainers.ps.wire import MAX_FRAME_BYTES, MAX_PARTS, Code, Field, Kind, Message, Part

ADAM = TableSpec(
    kind=TableKind.SPARSE, name="adam", size=2, rule=SparseAdam(), rows=RowOptions(statistics=True)
)


def saved_and_back(bench: Bench) -> Bench:
    """Another server with the tables and the state of this one."""
    blob = dump_state(bench.service._members, bench.store, bench.steps)
    back = Bench(sync=bench.sync)
    names = table_names(blob)
    assert names == {number: table.spec.name for number, table in bench.store.tables.items()}
    back.store.make({number: bench.store.tables[number].spec for number in names})
    for number, table in bench.store.tables.items():
        cut = table.cut()
        mine = back.store.tables[number]
        if table.spec.kind is TableKind.DENSE:
            mine.load(cut.rows)
        else:
            mine.load(cut.read(0, cut.rows))
            cut.close(saved=False)
        mine.step = table.step
    restore_state(blob, back.service._members, back.store, back.steps)
    back.sequence = bench.sequence
    return back


def gradient(rank: int, step: int) -> tuple[Part, ...]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    keys = torch.randperm(6, generator=generator)[:3]
    rows = torch.randn(3, 1, generator=generator)
    return (
        Part(0, Field.VALUES, torch.randn(2, generator=generator), lr=0.5),
        Part(1, Field.KEYS, keys),
        Part(1, Field.ROWS, rows, lr=0.25),
    )


def push(bench: Bench, rank: int, step: int) -> Message:
    return bench.ask(Kind.PUSH, rank, number=step, parts=gradient(rank, step))


def all_values(bench: Bench) -> list[torch.Tensor]:
    parts = (WANT[0], Part(1, Field.PEEK, torch.arange(6)))
    reply = bench.ask(Kind.PULL, number=bench.steps.step if bench.sync else 0, parts=parts)
    assert reply.kind is Kind.DATA, reply.text
    return [part.data for part in reply.parts]


@pytest.mark.parametrize("sync", [True, False])
def test_a_server_restored_in_the_middle_of_a_step_ends_as_one_that_was_not(sync: bool) -> None:
    quiet, moved = Bench(sync=sync).opened(), Bench(sync=sync).opened()
    for step in range(5):
        for rank in (0, 1):
            for bench in (quiet, moved):
                assert push(bench, rank, step).kind is Kind.DONE
            moved = saved_and_back(moved)
            assert all(map(torch.equal, all_values(quiet), all_values(moved)))
    assert moved.steps.step == quiet.steps.step == (5 if sync else 10)
    assert all(bool(values.abs().sum() > 0) for values in all_values(moved))


def test_pushes_that_wait_for_others_come_back_with_everything() -> None:
    bench = Bench().opened()
    bench.store.make({number: table.spec for number, table in bench.store.tables.items()} | {3: ADAM})
    stats = Part(3, Field.STATS, torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
    rows = (Part(3, Field.KEYS, torch.tensor([7, -(2**63)])), Part(3, Field.ROWS, torch.ones(2, 2), lr=0.1))
    bench.ask(Kind.PUSH, 0, number=0, parts=(*gradient(0, 0), *rows, stats))
    before = bench.steps.pushes.by_rank
    after = saved_and_back(bench).steps.pushes.by_rank
    assert before.keys() == after.keys() == {0}
    for mine, other in zip(before[0], after[0], strict=True):
        assert (mine.table, mine.lr) == (other.table, other.lr)
        for name in ("values", "keys", "stats"):
            left, right = getattr(mine, name), getattr(other, name)
            assert (left is None) == (right is None), name
            assert left is None or torch.equal(left, right), name
    assert [each.stats is not None for each in after[0]] == [False, False, True]


def test_a_run_of_blocks_that_waits_for_another_trainer_comes_back_as_its_blocks() -> None:
    """The other trainer then has other blocks in its runs, and no gradient for one."""
    one_block = TableSpec(kind=TableKind.DENSE, name="", size=1, rule=SGD())
    specs = {number: replace(one_block, name=f"w{number}") for number in range(4)}

    def run(first: int, *values: float) -> Part:
        return Part(first, Field.VALUES, torch.tensor(values), lr=1.0)

    bench = Bench(specs=specs)
    for rank in (0, 1):
        bench.hello(rank)
    bench.ask(Kind.READY)
    bench.ask(Kind.PUSH, 0, number=0, parts=(run(0, 2, 4, 6, 8),))
    bench = saved_and_back(bench)
    assert bench.ask(Kind.PUSH, 1, number=0, parts=(run(0, 10), run(2, 20, 30))).kind is Kind.DONE
    reply = bench.ask(Kind.PULL, number=1, parts=(Part(0, Field.WANT, torch.tensor([4])),))
    assert reply.parts[0].data.tolist() == [-6, -2, -13, -19]


@pytest.mark.parametrize("first", [0, 1])
def test_a_step_that_one_trainer_cannot_use_changes_nothing_on_a_restored_server_too(first: int) -> None:
    """Whichever of them pushes first; then the step counts, and the next one is a step as ever."""
    bench = Bench().opened()
    before = all_values(bench)
    for rank in (first, 1 - first):
        if rank == 1:
            bench.ask(Kind.PUSH, 1, number=0, code=Code.NOT_FINITE)
        else:
            push(bench, 0, 0)
        bench = saved_and_back(bench)
    assert bench.steps.step == 1
    assert all(map(torch.equal, before, all_values(bench)))
    for rank in (0, 1):
        push(bench, rank, 1)
    assert bench.steps.step == 2
    assert not any(map(torch.equal, before, all_values(bench)))


def test_a_push_that_counted_does_not_count_again() -> None:
    for sync in (True, False):
        bench = Bench(sync=sync).opened()
        message = Message(kind=Kind.PUSH, rank=0, sequence=77, number=0, parts=gradient(0, 0))
        bench.send(message)
        push(bench, 1, 0)
        values = all_values(bench)
        back = saved_and_back(bench)
        assert back.send(message).kind is Kind.DONE
        assert all(map(torch.equal, values, all_values(back)))


def test_a_trainer_that_does_its_last_step_again_sees_what_it_saw() -> None:
    bench = Bench().opened()
    before = all_values(bench)
    for rank in (0, 1):
        push(bench, rank, 0)
    assert not torch.equal(before[0], all_values(bench)[0])
    back = saved_and_back(bench)
    back.gone.update(member.route for member in back.service._members)  # they have no connection yet
    assert back.hello(0, life=5, restarts=1).number == 1
    again = back.ask(Kind.PULL, 0, life=5, number=0, parts=(WANT[0], Part(1, Field.PEEK, torch.arange(6))))
    assert all(map(torch.equal, before, (part.data for part in again.parts)))


def test_members_come_back_as_they_were() -> None:
    bench = Bench(sync=False).opened()
    bench.ask(Kind.BARRIER, 0, number=3)
    bench.gone.add(b"1-0")
    bench.hello(1, life=9, restarts=4)
    for step in range(3):
        push(bench, 0, step)
    bench.store.skipped = 5
    bench.ask(Kind.FINISH, 0)
    back = saved_and_back(bench)
    assert back.store.ready
    assert back.store.skipped == 5
    names = ("rank", "incarnation", "restart_count", "step", "resumed", "barrier", "finished", "left")
    for mine, other in zip(bench.service._members, back.service._members, strict=True):
        assert [getattr(mine, name) for name in names] == [getattr(other, name) for name in names]
        assert mine.applied.numbers == other.applied.numbers
    first = next(iter(back.service._members))
    assert first.barrier == 3
    assert first.finished
    assert len(first.applied.numbers) == 3


def test_a_window_of_sequence_numbers_comes_back_with_its_floor() -> None:
    bench = Bench(sync=False).opened()
    member = next(iter(bench.service._members))
    for sequence in range(1, 10_001):
        member.applied.add(sequence)
    back = next(iter(saved_and_back(bench).service._members)).applied
    assert back.floor == member.applied.floor > 0
    assert all(sequence in back for sequence in (1, back.floor, back.floor + 1, 10_000))
    assert 10_001 not in back
    assert len(back.numbers) < 2 * SequenceSet._WINDOW


def test_a_state_may_be_larger_than_any_message() -> None:
    """The rows of a step are those of all trainers together, and may have more bytes than a message can."""
    bench = Bench().opened()
    rows = torch.zeros(MAX_FRAME_BYTES // (4 * 512) + 1, 512)
    rows[-1] = 7
    keys = torch.arange(len(rows))
    bench.steps.before = Overlay({}, [Gradient(1, rows, keys, 0.5)])
    (found,) = saved_and_back(bench).steps.before.rows
    assert found.values[-2:].tolist() == rows[-2:].tolist()
    assert found.keys is not None
    assert found.keys[-2:].tolist() == keys[-2:].tolist()


def test_a_state_may_have_more_parts_than_any_message() -> None:
    bench = Bench().opened()
    blocks = {number: torch.tensor([float(number)]) for number in range(MAX_PARTS + 5)}
    bench.steps.before = Overlay(blocks)
    assert saved_and_back(bench).steps.before.dense == blocks


def test_small_parts_of_a_state_may_be_larger_together_than_any_message() -> None:
    bench = Bench().opened()
    block = torch.zeros(16_000)
    bench.steps.before = Overlay(dict.fromkeys(range(MAX_FRAME_BYTES // block.nbytes + 1), block))
    assert len(saved_and_back(bench).steps.before.dense) == len(bench.steps.before.dense)


@pytest.mark.parametrize("length", [0, 5, 2**32 - 2, 2**32 - 1, 2**32, 2**40])
def test_a_frame_may_have_any_length(length: int) -> None:
    packed = _packed_length(length)
    assert _length_at(b"before" + packed, 6) == (length, 6 + len(packed))
    assert len(packed) == (4 if length < 2**32 - 1 else 12), "as it always was, where it fits"


def test_a_server_before_its_initial_values_comes_back_so() -> None:
    bench = Bench()
    bench.hello(0)
    back = saved_and_back(bench)
    assert not back.store.ready
    back.hello(1)
    back.ask(Kind.ASSIGN, parts=INITIAL)
    back.ask(Kind.READY)
    assert back.values() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x05",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 400) + b'{"version": 2}',
        struct.pack("<I", 14) + b'{"version": 2}',
        (lambda text: struct.pack("<I", len(text)) + text)(json.dumps({"version": 99}).encode()),
    ],
)
def test_bytes_that_are_no_state_are_refused(blob: bytes) -> None:
    bench = Bench()
    with pytest.raises(StateError):
        restore_state(blob, Members(2, 1.0, 1.0, 0.0), bench.store, bench.steps)


def test_a_state_that_is_cut_off_is_refused() -> None:
    bench = Bench().opened()
    push(bench, 0, 0)
    blob = dump_state(bench.service._members, bench.store, bench.steps)
    assert len(SPECS) == len(table_names(blob))
    for cut in (1, 10, 40, len(blob) - 400):
        with pytest.raises(StateError):
            restore_state(blob[:-cut], Members(2, 1.0, 1.0, 0.0), bench.store, bench.steps)


def written(*values: float) -> Part:
    return Part(0, Field.WRITTEN, torch.tensor(values))


FROZEN = Part(2, Field.WRITTEN, torch.tensor([5.0]))


@pytest.mark.parametrize("overflow", [False, True])
def test_written_values_come_before_the_gradients_of_a_step_and_count_once(overflow: bool) -> None:
    """Of the lowest rank, whichever comes first; also on a server that is restored or replays its log."""
    bench = Bench().opened()
    parts = (written(7.0, 8.0), *gradient(1, 0))
    bench.ask(Kind.PUSH, 1, number=0, parts=parts)
    restored, replayed = saved_and_back(bench), Bench()
    for message in bench.recorded:
        replayed.service.replay(message)
    replayed.sequence = bench.sequence
    mine = (FROZEN,) if overflow else (written(3.0, float("nan")), FROZEN, *gradient(0, 0))
    found = []
    for each in (bench, restored, replayed):
        for _ in range(2):
            number = each.sequence
            code = Code.NOT_FINITE if overflow else Code.NONE
            assert each.ask(Kind.PUSH, 0, number=0, parts=mine, code=code).kind is Kind.DONE
            each.sequence = number
        found.append([*all_values(each), each.store.tables[2].values.clone()])
        again = each.ask(Kind.PULL, number=0, parts=WANT[:1]).parts[0].data
        assert again.tolist() == [0.0, 0.0], "a trainer that repeats the step sees the values before it"
        each.sequence = number + 1
    both = torch.stack([gradient(rank, 0)[0].data for rank in (0, 1)]).mean(0)
    wanted = torch.tensor([7.0, 8.0]) if overflow else torch.tensor([3.0, float("nan")]) - 0.5 * both
    for dense, _, frozen in found:
        torch.testing.assert_close(dense, wanted, equal_nan=True)
        assert frozen.item() == (1.0 if overflow else 5.0)
