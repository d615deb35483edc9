"""Records of streams at a server: counted with their gradients, once, and refused where they cannot be."""

from __future__ import annotations

import random

import pytest
import torch

from tests.trainers.ps.server.test_service import WANT, Bench
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
    assert "of 'a' in the stream 'clicks', but not other records" in answer.text
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
    assert "as step 4, but this server has not counted" in answer.text
    assert ends(bench) == [0, 40, 100, 130]


def begin_at(bench: Bench, rank: int = 0, life: int = LIFE) -> int:
    """The first step in which new records are taken from a trainer."""
    name = bytes_part(Field.TEXT, b"clicks")
    return bench.ask(Kind.POSITIONS, rank, life=life, parts=(name,)).number


def test_a_trainer_that_was_through_goes_on_with_the_others() -> None:
    """Servers are a step apart when it comes back."""
    ahead, behind = Bench().opened(), Bench().opened()
    for bench in (ahead, behind):
        for rank in (0, 1):
            push(bench, rank, 0, (100 * rank, 100 * rank + 10))
        bench.ask(Kind.FINISH)
        push(bench, 1, 1, (110, 120))
    push(ahead, 1, 2, (120, 130))
    for bench in (ahead, behind):
        bench.gone.add(b"0-0")
        assert bench.hello(0, LIFE, restarts=1).number == 1
    assert push(behind, 1, 2, (120, 130)).kind is Kind.DONE
    assert ends(behind) == [0, 10, 100, 130]
    assert (begin_at(ahead), begin_at(behind)) == (3, 2), "it waits for the trainer that has come back"
    for bench in (ahead, behind):
        assert bench.ask(Kind.SKIP, number=3, life=LIFE).kind is Kind.DONE
        again = Bench()
        for message in bench.recorded:
            again.service.replay(message)
        again.sequence = 1000
        for each in (bench, again):
            assert begin_at(each) == each.steps.step == 3
            before = counted(each)
            assert push(each, 0, 3, (10, 20), life=LIFE).kind is Kind.DONE
            assert counted(each) == before, "it is awaited, and awaits the other one"
            assert push(each, 1, 3, (130, 140)).kind is Kind.DONE
            assert counted(each) == before + 10
            assert ends(each) == [0, 20, 100, 140]


def test_a_step_that_all_skip_is_over() -> None:
    """They begin where the furthest server is; on this one a step waits for all of them."""
    bench = Bench().opened()
    push(bench, 0, 0, (0, 10))
    push(bench, 1, 0, (100, 110))
    for rank in (0, 1):
        bench.ask(Kind.SKIP, rank, number=3)
    assert bench.steps.step == 3
    assert bench.ask(Kind.SKIP, 0, number=2).number == 3, "it was skipped before"
    for rank in (0, 1):
        assert push(bench, rank, 3, (100 * rank + 10, 100 * rank + 20)).kind is Kind.DONE
    assert counted(bench) == 20


def test_a_push_waits_for_its_turn() -> None:
    """A trainer whose batch needs nothing of this server is not held up by it."""
    bench = Bench().opened()
    push(bench, 0, 0, (0, 10))
    early = push(bench, 0, 1, (10, 20))
    assert early.kind is Kind.WAIT
    assert early.text == "trainer 1"
    assert push(bench, 0, 3, (20, 30)).code is Code.BAD_STEP
    push(bench, 1, 0, (100, 110))
    assert bench.late[early.sequence].kind is Kind.DONE
    push(bench, 1, 1, (110, 120))
    assert counted(bench) == 20
    assert ends(bench) == [0, 20, 100, 120]


def test_pushes_that_waited_for_their_turn_complete_a_step() -> None:
    """The first of them is answered too, at once."""
    bench = Bench(3).opened()
    bench.hello(2)
    for rank in (0, 1):
        bench.push(rank, 0)
    parts = (Part(0, Field.VALUES, torch.ones(2), lr=1.0), *WANT)
    early = [bench.ask(Kind.PUSH, rank, number=1, parts=parts) for rank in (0, 1)]
    assert [each.kind for each in early] == [Kind.WAIT] * 2
    bench.ask(Kind.FINISH, 2)
    assert [bench.late[each.sequence].kind for each in early] == [Kind.DATA] * 2
    assert counted(bench) == 2


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
