"""Other trainers take the places of those that were there: what is left of the former ones, and what they may
still say.
"""

from __future__ import annotations

import pytest
import torch

from tests.trainers.ps.server.test_service import JOB, Bench
from trainers.ps.server.state import apply_new_trainers, new_trainers_record
from trainers.ps.wire import Code, Field, Kind, Message, Part


def others(bench: Bench, count: int, start: str = "another") -> None:
    """Take the places of the bench's trainers."""
    apply_new_trainers(new_trainers_record(count, start), bench.service._members, bench.steps)


def joined(bench: Bench, count: int, life: int = 7) -> list[int]:
    """The steps at which so many new trainers begin."""
    return [bench.hello(rank, life).number for rank in range(count)]


def dense(bench: Bench, life: int = 7) -> list[float]:
    number = bench.steps.step if bench.sync else 0
    reply = bench.ask(Kind.PULL, life=life, number=number, parts=(Part(0, Field.WANT, torch.tensor([1])),))
    assert reply.kind is Kind.DATA, reply.text
    return reply.parts[0].data.tolist()


@pytest.mark.parametrize(("count", "step"), [(1, 7), (3, 2), (4, 1), (7, 1), (8, 0)])
def test_what_all_have_done_is_shared_and_rounded_down(count: int, step: int) -> None:
    bench = Bench(sync=False).opened()
    for number in range(5):
        bench.push(0, number)
    for number in range(2):
        bench.push(1, number)
    others(bench, count)
    assert joined(bench, count) == [step] * count
    assert dense(bench) == [-7, -7], "what was pushed stays"
    assert not bench.service.over
    bench.push(0, step - 1, life=7)  # of the past, for this server
    bench.push(0, step, life=7)
    assert dense(bench) == [-8, -8]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_step_that_some_had_not_pushed_is_dropped(count: int) -> None:
    bench = Bench().opened()
    for number in range(4):
        bench.push(0, number, 1.0)
        bench.push(1, number, 3.0)
    bench.push(1, 4, 100.0)
    others(bench, count)
    step = 8 // count
    assert joined(bench, count) == [step] * count
    assert bench.steps.step == step
    for rank in range(count):
        assert dense(bench) == [-8, -8]
        bench.push(rank, step, 5.0, life=7)
    assert dense(bench) == [-13, -13], "the mean of the new trainers"
    assert bench.steps.step == step + 1


def test_values_before_the_last_step_are_not_shown_to_others() -> None:
    bench = Bench().opened()
    for rank in (0, 1):
        bench.push(rank, 0)
    others(bench, 1)
    assert joined(bench, 1) == [2]
    again = bench.ask(Kind.PULL, life=7, number=1, parts=(Part(0, Field.WANT, torch.tensor([1])),))
    assert again.parts[0].data.tolist() == [-1, -1]


def test_who_had_finished_or_left_counts_with_what_it_did() -> None:
    bench = Bench().opened()
    for rank in (0, 1):
        bench.push(rank, 0)
    bench.ask(Kind.FINISH, 1)
    for number in (1, 2):
        bench.push(0, number)
    for rank in (0, 1):
        bench.ask(Kind.LEAVE, rank)
    assert bench.service.over
    others(bench, 4)
    assert not bench.service.over
    assert joined(bench, 4) == [1] * 4  # three steps of one and one of the other
    assert bench.ask(Kind.BARRIER, 3, 7, number=1).kind is Kind.WAIT


def test_servers_that_were_a_step_apart_count_each_batch_once() -> None:
    """Three trainers were killed when one server had applied step 2 and the other had not. The one trainer
    that comes begins with the batches that the second server lacks; the first knows them.
    """
    ahead, behind = Bench(3).opened(), Bench(3).opened()
    for bench in (ahead, behind):
        bench.hello(2)
        for number in range(2):
            for rank in range(3):
                bench.push(rank, number, 1.0)
    for rank in range(3):
        ahead.push(rank, 2, 1.0)
    behind.push(0, 2, 1.0)
    for bench in (ahead, behind):
        others(bench, 1)
    begun = min(joined(ahead, 1) + joined(behind, 1))
    assert begun == 6
    for number in range(begun, 10):
        for bench in (ahead, behind):
            assert bench.push(0, number, 1.0, life=7).kind is Kind.DONE
    assert dense(ahead)[0] == -(3 + 1)  # three steps of three, then batch 9
    assert dense(behind)[0] == -(2 + 4)  # two steps of three, then batches 6 to 9
    assert ahead.steps.step == behind.steps.step == 10


@pytest.mark.parametrize("sync", [True, False])
def test_as_many_others_go_on_rank_by_rank(sync: bool) -> None:
    bench = Bench(sync=sync).opened()
    for rank in (0, 1):
        bench.push(rank, 0, 1.0)
    bench.push(1, 1, 3.0)
    others(bench, 2)
    assert joined(bench, 2) == [1, 2]
    assert bench.push(0, 1, 1.0, life=7).kind is Kind.DONE
    assert dense(bench)[0] == (-3 if sync else -6), "what rank 1 had pushed counts"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_whatever_the_former_trainers_still_say_is_refused(count: int) -> None:
    bench = Bench(sync=False).opened()
    bench.push(0, 0)
    others(bench, count)

    def refused(life: int) -> None:
        for kind in (Kind.PUSH, Kind.PULL, Kind.BARRIER, Kind.FINISH, Kind.LEAVE, Kind.SHRINK, Kind.READY):
            for rank in (0, 1):
                parts = (Part(0, Field.VALUES, torch.ones(2), lr=1.0),)
                answer = bench.ask(kind, rank, life, 5, parts)
                assert (answer.kind, answer.code) == (Kind.REFUSED, Code.UNKNOWN_CLIENT)
        assert bench.hello(1, life, job="another job").code is Code.MISMATCH

    refused(life=0)  # before a new one is there, and after
    joined(bench, count)
    refused(life=0)
    assert dense(bench) == [-1, -1]


def test_nobody_outside_says_who_the_trainers_are() -> None:
    bench = Bench(sync=False).opened()
    record = new_trainers_record(1, "mine")
    answer = bench.send(Message(kind=record.kind, sequence=900, number=1, parts=record.parts))
    assert (answer.kind, answer.code) == (Kind.REFUSED, Code.BAD_MESSAGE)
    assert len(bench.service._members) == 2
    assert bench.hello(0, job=JOB).kind is Kind.DONE
