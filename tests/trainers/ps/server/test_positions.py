"""Records of streams at a server: counted with their gradients, once, and refused where they cannot be."""

from __future__ import annotations

import random

import pytest
import torch

from tests.trainers.ps.server.test_service import Bench
from trainers.data.positions import Intervals, Records, decode_records, encode_records, missing
from trainers.errors import DataError
from trainers.ps.server.members import Members
from trainers.ps.server.state import apply_new_trainers, dump_state, new_trainers_record, restore_state
from trainers.ps.wire import Code, Field, Kind, Message, Part, bytes_part

LIFE = 7


def push(bench: Bench, rank: int, number: int, *pieces: tuple[int, int], life: int = 0) -> Message:
    """The gradient of each record is 1. `pieces`: of the shard "a"."""
    records = [Records("clicks", "a", *each) for each in pieces]
    gradient = torch.full((2,), float(sum(stop - start for start, stop in pieces)))
    parts = (
        bytes_part(Field.RECORDS, encode_records(records)),
        Part(0, Field.VALUES, gradient, 1.0),
    )
    options = {"life": life} if life else {}
    return bench.ask(Kind.PUSH, rank, number=number, parts=parts, **options)


def counted(bench: Bench) -> float:
    return -float(bench.store.tables[0].values[0])


def ends(bench: Bench) -> list[int]:
    positions = bench.service._members.positions.dump()["streams"]
    found: list[int] = positions["clicks"]["a"]
    return found


def test_records_count_once_in_any_order_and_whatever_their_step() -> None:
    bench = Bench(sync=False).opened()
    for number, piece in enumerate([(0, 10), (20, 30), (0, 10), (10, 20), (22, 28), (5, 25)]):
        assert push(bench, 0, number, piece).kind is Kind.DONE
    assert counted(bench) == 30
    assert ends(bench) == [0, 30]
    bench.gone.add(b"0-0")
    bench.hello(0, LIFE)
    push(bench, 0, 0, (30, 40), life=LIFE)  # a step that the former one had made
    push(bench, 0, 1, (20, 40), life=LIFE)
    assert counted(bench) == 40


@pytest.mark.parametrize("pieces", [[(5, 15)], [(0, 10), (10, 20)], [(20, 30), (0, 4)]])
def test_a_push_of_which_some_records_are_counted_is_refused(pieces: list[tuple[int, int]]) -> None:
    bench = Bench(sync=False).opened()
    push(bench, 0, 0, (0, 10))
    answer = push(bench, 0, 1, *pieces)
    assert answer.code is Code.MISMATCH
    assert "of 'a' in the stream 'clicks' some are counted already" in answer.text
    assert counted(bench) == 10


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'[["s","a",3,3]]',
        b'[["s","a",-1,3]]',
        b'[["s",1,0,3]]',
        b'[["s","a",0,3],["s","a",2,5]]',
    ],
)
def test_bytes_that_are_not_records_are_refused(content: bytes) -> None:
    with pytest.raises(DataError):
        decode_records(content)
    bench = Bench(sync=False).opened()
    answer = bench.ask(Kind.PUSH, parts=(bytes_part(Field.RECORDS, content),))
    assert answer.code is Code.BAD_MESSAGE
    behind = bench.ask(
        Kind.PUSH, parts=(Part(0, Field.VALUES, torch.ones(2)), bytes_part(Field.RECORDS, b""))
    )
    assert behind.code is Code.BAD_MESSAGE


def test_a_dropped_step_gives_its_records_back_and_servers_may_be_steps_apart() -> None:
    """In sync training; then another server is two steps behind."""
    bench = Bench().opened()
    for number in range(3):
        push(bench, 0, number, (10 * number, 10 * number + 10))
        push(bench, 1, number, (100 + 10 * number, 110 + 10 * number))
    push(bench, 1, 3, (130, 140))
    assert ends(bench) == [0, 30, 100, 140]
    members, steps, store = bench.service._members, bench.steps, bench.store
    blob = dump_state(members, store, steps)
    restored = Members(2, 1.0, 1.0, 0.0)
    restore_state(blob, restored, store, steps)
    members.positions = restored.positions
    apply_new_trainers(new_trainers_record(1, "another"), members, steps)
    assert ends(bench) == [0, 30, 100, 130]
    assert bench.hello(0, LIFE).number == 6
    restore_state(dump_state(members, store, steps), members, store, steps)  # still before the first push
    bench.gone.add(b"0-0")
    bench.hello(0, LIFE)
    assert counted(bench) == 30
    for number, piece in enumerate([(20, 30), (120, 130), (30, 40)], 4):
        assert push(bench, 0, number, piece, life=LIFE).kind is Kind.DONE
    assert counted(bench) == 40
    answer = push(bench, 0, 4, (40, 50), life=LIFE)
    assert answer.code is Code.MISMATCH
    assert "that are not counted here as step 4" in answer.text
    assert ends(bench) == [0, 40, 100, 130]


def test_a_first_step_without_records_is_not_taken_for_an_old_one() -> None:
    """After a change of trainers, on a server that is a step ahead of another."""
    bench = Bench().opened()
    for number in range(2):
        push(bench, 0, number, (10 * number, 10 * number + 10))
        push(bench, 1, number, (100 + 10 * number, 110 + 10 * number))
    apply_new_trainers(new_trainers_record(1, "another"), bench.service._members, bench.steps)
    assert bench.hello(0, LIFE).number == 4
    before = counted(bench)
    gradient = (Part(0, Field.VALUES, torch.ones(2), 1.0),)
    assert bench.ask(Kind.PUSH, 0, number=3, parts=gradient, life=LIFE).kind is Kind.DONE
    assert counted(bench) == before + 1
    assert push(bench, 0, 4, (20, 30), life=LIFE).kind is Kind.DONE


def test_intervals_are_sets_of_positions() -> None:
    rng = random.Random(1)
    for _ in range(300):
        made, wanted = Intervals(), set[int]()
        for _ in range(12):
            start = rng.randrange(20)
            stop = start + 1 + rng.randrange(6)
            some = set(range(start, stop))
            if rng.random() < 0.6:
                made.add(start, stop)
                wanted |= some
            else:
                made.remove(start, stop)
                wanted -= some
            assert made.ends == sorted(set(made.ends))
            assert {
                position
                for first, last in zip(made.ends[::2], made.ends[1::2], strict=True)
                for position in range(first, last)
            } == wanted
            has = {True: some <= wanted, False: not some & wanted}
            assert made.has(start, stop) is next((word for word, is_so in has.items() if is_so), None)


def test_what_servers_lack_is_cut_where_they_differ() -> None:
    servers = [Intervals([0, 30]), Intervals([0, 10, 20, 40])]
    assert [(*each,) for each in missing(servers, 5, 50)] == [
        (10, 20, (True, False)),
        (30, 40, (False, True)),
        (40, 50, (False, False)),
    ]
