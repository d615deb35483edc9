"""What a server answers, message by message: no socket, no clock."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest
import torch

from trainers.ps.server.members import Members
from trainers.ps.server.publisher import Publisher
from trainers.ps.server.saving import SaveRunner
from trainers.ps.server.service import Service
from trainers.ps.server.steps import AsyncSteps, SyncSteps
from trainers.ps.server.store import Store
from trainers.ps.tables.rules import SGD, Adagrad, Adam, AnyRule, Fixed
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Entry, EntryKind, RowOptions, TableKind, TableSpec
from trainers.ps.wire import LOADED, NO_TRAINER, Code, Field, Kind, Message, Part, bytes_part

pytestmark = pytest.mark.slow

GRACE, JOIN = 5.0, 60.0
JOB = "a job"
SPECS = {
    0: TableSpec(kind=TableKind.DENSE, name="w", size=2, rule=SGD()),
    1: TableSpec(kind=TableKind.SPARSE, name="e", size=1, rule=SGD()),
    2: TableSpec(kind=TableKind.DENSE, name="frozen", size=1, rule=Fixed()),
}
INITIAL = (
    Part(0, Field.VALUES, torch.zeros(2)),
    Part(1, Field.KEYS, torch.tensor([1, 2])),
    Part(1, Field.ROWS, torch.zeros(2, 1)),
    Part(2, Field.VALUES, torch.ones(1)),
)
WANT = (Part(0, Field.WANT, torch.tensor([1])), Part(1, Field.KEYS, torch.tensor([1, 2])))


class Bench:
    """A service, its trainers, and what each of them was answered."""

    def __init__(
        self,
        trainers: int = 2,
        *,
        sync: bool = True,
        max_staleness: int | None = None,
        skip_bad: bool = False,
        reading: bool = False,
        published: str = "",
        publisher: Publisher | None = None,
        specs: Mapping[int, TableSpec] = SPECS,
    ) -> None:
        self.specs = specs
        self.now = 0.0
        self.gone: set[bytes] = set()
        self.store = Store(skip_bad=skip_bad)
        self.sync = sync
        self.steps = SyncSteps(self.store) if sync else AsyncSteps(self.store, max_staleness)
        self.recorded: list[Message] = []
        self.service = Service(
            Members(trainers, GRACE, JOIN, self.now),
            self.store,
            self.steps,
            job=JOB,
            sync=sync,
            may_return=not sync,
            saving=SaveRunner(0, 1, wake=lambda: None, reading=lambda: reading, published=published),
            publisher=publisher,
            record=self.recorded.append,
        )
        self.sequence = 0
        self.late: dict[int, Message] = {}  # answers by sequence, waiting ones included

    def reachable(self, route: bytes) -> bool:
        return route not in self.gone

    def send(self, message: Message) -> Message:
        """The answer to this very message; WAIT if there is none yet."""
        route = f"{message.rank}-{message.incarnation}".encode()
        for _, reply in self.service.handle(route, message, self.reachable):
            self.late[reply.sequence] = reply
        return self.late[message.sequence]

    def ask(
        self,
        kind: Kind,
        rank: int = 0,
        life: int = 0,
        number: int = 0,
        parts: tuple[Part, ...] = (),
        code: Code = Code.NONE,
    ) -> Message:
        self.sequence += 1
        return self.send(Message(kind, rank, life, self.sequence, number, code, parts))

    def hello(self, rank: int, life: int = 0, restarts: int = 0, job: str = JOB) -> Message:
        return self.ask(Kind.HELLO, rank, life, restarts, parts=self.hello_parts(job))

    def hello_parts(self, job: str = JOB) -> tuple[Part, ...]:
        specs = tuple(bytes_part(Field.SPEC, spec.encode(), number) for number, spec in self.specs.items())
        return (bytes_part(Field.TEXT, job.encode()), *specs)

    def opened(self, initial: tuple[Part, ...] = INITIAL) -> Bench:
        for rank in (0, 1):
            self.hello(rank)
        self.ask(Kind.ASSIGN, parts=initial)
        self.ask(Kind.READY)
        return self

    def push(self, rank: int, step: int, value: float = 1.0, life: int = 0) -> Message:
        return self.ask(
            Kind.PUSH, rank, life, step, (Part(0, Field.VALUES, torch.full((2,), value), lr=1.0),)
        )

    def values(self) -> list[float]:
        reply = self.ask(Kind.PULL, number=self.steps.step if self.sync else 0, parts=WANT)
        assert reply.kind is Kind.DATA, reply.text
        return [*reply.parts[0].data.tolist(), *reply.parts[1].data[:, 0].tolist()]

    def pass_time(self, seconds: float) -> None:
        """Look at the connections every half second, as the server does."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for _, reply in self.service.tick(self.reachable, self.now):
                self.late[reply.sequence] = reply


def test_a_step_is_applied_when_all_have_pushed_it() -> None:
    bench = Bench().opened()
    bench.push(0, 0, 1.0)
    early = bench.ask(Kind.PULL, 0, number=1, parts=WANT)
    assert early.kind is Kind.WAIT
    assert early.text == "trainer 1"
    assert bench.values()[:2] == [0, 0]
    bench.push(1, 0, 3.0)
    assert bench.values()[:2] == [-2, -2]
    answered = bench.late[early.sequence]
    assert answered.kind is Kind.DATA
    assert answered.number == 1


@pytest.mark.parametrize("sync", [True, False])
def test_a_repeated_push_counts_once(sync: bool) -> None:
    bench = Bench(sync=sync).opened()
    push = Message(
        kind=Kind.PUSH, sequence=100, number=0, parts=(Part(0, Field.VALUES, torch.ones(2), lr=1.0),)
    )
    for _ in range(3):
        assert bench.send(push).kind is Kind.DONE
    bench.sequence = 100
    if sync:
        bench.push(1, 0, 1.0)
        bench.send(push)  # after the step was applied, too
    assert bench.values()[:2] == [-1, -1]


def test_async_pushes_are_applied_on_arrival() -> None:
    bench = Bench(sync=False).opened()
    bench.push(0, 0, 1.0)
    assert bench.values()[:2] == [-1, -1]
    bench.push(1, 5, 3.0)
    assert bench.values()[:2] == [-4, -4]


def test_who_waits_twice_is_told_each_time_and_answered_once() -> None:
    bench = Bench().opened()
    pull = Message(kind=Kind.PULL, sequence=50, number=1, parts=WANT)
    bench.push(0, 0)
    assert bench.send(pull).kind is Kind.WAIT
    assert bench.send(pull).kind is Kind.WAIT
    bench.push(1, 0)
    assert bench.late[50].kind is Kind.DATA


def test_a_lost_trainer_ends_the_wait_of_the_others_with_its_name() -> None:
    bench = Bench().opened()
    bench.push(0, 0)
    wait = bench.ask(Kind.PULL, number=1, parts=WANT)
    bench.pass_time(100)
    assert bench.late[wait.sequence].kind is Kind.WAIT  # slow is not lost
    bench.gone.add(b"1-0")
    bench.pass_time(GRACE)
    assert bench.late[wait.sequence].kind is Kind.WAIT
    bench.pass_time(1)
    assert bench.late[wait.sequence].code is Code.TRAINER_LOST
    assert "trainer 1 is lost" in bench.late[wait.sequence].text
    assert "5 s" in bench.late[wait.sequence].text


def test_a_short_interruption_is_no_loss() -> None:
    bench = Bench().opened()
    bench.push(0, 0)
    wait = bench.ask(Kind.PULL, number=1, parts=WANT)
    for _ in range(5):
        bench.gone.add(b"1-0")
        bench.pass_time(GRACE - 1)
        bench.gone.clear()
        bench.pass_time(1)
    bench.push(1, 0)
    assert bench.late[wait.sequence].kind is Kind.DATA


def test_a_trainer_that_never_joins_is_reported() -> None:
    bench = Bench()
    bench.hello(0)
    bench.ask(Kind.ASSIGN, parts=INITIAL)
    bench.ask(Kind.READY)
    bench.push(0, 0)
    wait = bench.ask(Kind.PULL, number=1, parts=WANT)
    bench.pass_time(JOIN + 1)
    assert "trainer 1 is lost" in bench.late[wait.sequence].text
    assert "60 s" in bench.late[wait.sequence].text


def test_who_has_finished_no_longer_counts() -> None:
    bench = Bench().opened()
    bench.push(0, 0, 2.0)
    done = bench.ask(Kind.FINISH, rank=1)
    assert done.kind is Kind.WAIT
    assert bench.values()[:2] == [-2, -2]  # the step closed without trainer 1
    bench.push(0, 1, 2.0)
    assert bench.values()[:2] == [-4, -4]
    bench.ask(Kind.FINISH, rank=0)
    assert bench.late[done.sequence].kind is Kind.DONE
    assert not bench.service.over
    for rank in (0, 1):
        bench.ask(Kind.LEAVE, rank)
    assert bench.service.over


def test_a_sync_job_finishes_without_a_trainer_that_is_lost_after_its_last_step() -> None:
    bench = Bench().opened()
    for rank in (0, 1):
        bench.push(rank, 0)
    bench.gone.add(b"1-0")
    done = bench.ask(Kind.FINISH)
    bench.pass_time(GRACE + 1)
    assert bench.late[done.sequence].kind is Kind.DONE


def test_nobody_finishes_whose_last_push_waits_for_a_lost_trainer() -> None:
    bench = Bench().opened()
    assert bench.push(0, 0).kind is Kind.DONE  # nothing was asked for: it is answered at once
    bench.gone.add(b"1-0")
    done = bench.ask(Kind.FINISH)
    assert done.kind is Kind.WAIT
    bench.pass_time(GRACE + 1)
    assert bench.late[done.sequence].code is Code.TRAINER_LOST


def test_an_async_job_finishes_without_a_lost_trainer() -> None:
    bench = Bench(sync=False).opened()
    done = bench.ask(Kind.FINISH)
    bench.gone.add(b"1-0")
    bench.pass_time(GRACE + 1)
    assert bench.late[done.sequence].kind is Kind.DONE
    assert not bench.service.over  # it may be restarted


def test_an_async_barrier_gives_a_restarted_trainer_time_to_come_back() -> None:
    bench = Bench(sync=False).opened()
    first = bench.ask(Kind.BARRIER, 0, number=1)
    bench.gone.add(b"1-0")
    bench.pass_time(JOIN)
    assert bench.late[first.sequence].kind is Kind.WAIT
    bench.pass_time(1)
    assert "60 s" in bench.late[first.sequence].text


def test_a_restarted_trainer_goes_on_where_the_tables_are() -> None:
    bench = Bench(sync=False).opened()
    bench.push(0, 0, 1.0)
    bench.gone.add(b"0-0")
    again = bench.hello(0, life=1, restarts=1)
    assert again.kind is Kind.DONE
    assert again.code is Code.NONE  # ready: no initial values wanted
    bench.ask(Kind.ASSIGN, life=1, parts=(Part(0, Field.VALUES, torch.full((2,), 9.0)),))
    assert again.number == 1
    assert bench.push(0, 1, 1.0, life=1).kind is Kind.DONE
    assert bench.push(0, 0, 1.0, life=0).code is Code.UNKNOWN_CLIENT  # the former self
    reply = bench.ask(Kind.PULL, rank=1, parts=WANT)
    assert reply.parts[0].data.tolist() == [-2, -2]


def test_values_that_are_loaded_in_training_count_once_and_keep_the_state() -> None:
    """Also where the message comes twice, and where the log is replayed."""
    specs = {
        0: TableSpec(kind=TableKind.DENSE, name="w", size=2, rule=SGD(momentum=0.5)),
        1: TableSpec(kind=TableKind.SPARSE, name="e", size=1, rule=Adagrad()),
    }
    rows = (Part(1, Field.KEYS, torch.tensor([1])), Part(1, Field.ROWS, torch.ones(1, 1), lr=1.0))
    push = (Part(0, Field.VALUES, torch.ones(2), lr=1.0), *rows)
    bench = Bench(1, sync=False, specs=specs)
    bench.hello(0)
    assert bench.ask(Kind.ASSIGN, number=LOADED, parts=INITIAL[:3]).code is Code.NOT_READY
    bench.ask(Kind.ASSIGN, parts=INITIAL[:3])
    bench.ask(Kind.READY)
    bench.ask(Kind.PUSH, parts=push)
    loading = Message(
        kind=Kind.ASSIGN,
        sequence=70,
        number=LOADED,
        parts=(Part(0, Field.VALUES, torch.full((2,), 9.0)), *rows),
    )
    assert bench.send(loading).kind is Kind.DONE
    bench.sequence = 70
    assert bench.values() == [9, 9, 1, 0]
    bench.ask(Kind.PUSH, number=1, parts=push)
    assert bench.send(loading).kind is Kind.DONE
    found = bench.values()
    assert found[:2] == [7.5, 7.5], "the momentum of the first push is still there"
    assert found[2] == pytest.approx(1 - 1 / 2**0.5)
    again = Bench(1, sync=False, specs=specs)
    for message in bench.recorded:
        again.service.replay(message)
    again.sequence = 100
    assert again.values() == found
    assert again.send(loading).kind is Kind.DONE
    assert again.values() == found


def test_a_step_that_a_former_self_pushed_does_not_count_again() -> None:
    """Another server had one step less, so the trainer does that step again for both."""
    bench = Bench(sync=False).opened()
    for step in (0, 1):
        bench.push(0, step)
    bench.gone.add(b"0-0")
    assert bench.hello(0, life=1, restarts=1).number == 2
    for step in (1, 2):
        assert bench.push(0, step, life=1).kind is Kind.DONE
    assert bench.ask(Kind.PULL, rank=1, parts=WANT).parts[0].data.tolist() == [-3, -3]


def test_a_restarted_trainer_of_a_sync_job_does_not_push_a_step_twice() -> None:
    bench = Bench().opened()
    bench.push(0, 0)
    bench.gone.add(b"0-0")
    assert bench.hello(0, life=1, restarts=1).number == 1
    bench.push(1, 0)
    assert bench.hello(1, life=0).number == 1


def test_two_trainers_of_one_rank_are_refused_and_a_restart_waits_for_the_connection() -> None:
    bench = Bench().opened()
    assert "already has a trainer 1" in bench.hello(1, life=7).text
    wait = bench.hello(1, life=8, restarts=1)
    assert wait.kind is Kind.WAIT
    bench.gone.add(b"1-0")
    bench.pass_time(1)
    assert bench.late[wait.sequence].kind is Kind.DONE


def test_who_has_left_waits_for_the_next_job_on_the_endpoint() -> None:
    bench = Bench().opened()
    bench.ask(Kind.LEAVE)
    assert bench.hello(0, life=1).kind is Kind.WAIT


def test_a_barrier_waits_for_everyone_and_lets_a_restarted_trainer_pass_old_ones() -> None:
    bench = Bench(sync=False).opened()
    first = bench.ask(Kind.BARRIER, 0, number=1)
    assert first.kind is Kind.WAIT
    assert bench.ask(Kind.BARRIER, 1, number=1).kind is Kind.DONE
    assert bench.late[first.sequence].kind is Kind.DONE
    bench.gone.add(b"1-0")
    bench.hello(1, life=1, restarts=1)
    assert bench.ask(Kind.BARRIER, 1, life=1, number=1).kind is Kind.DONE


def test_the_others_open_when_trainer_0_is_ready() -> None:
    bench = Bench()
    for rank in (0, 1):
        assert bench.hello(rank).code is Code.NOT_READY
    wait = bench.ask(Kind.OPEN, rank=1)
    assert wait.text == "the initial values of trainer 0"
    assert bench.ask(Kind.PULL, rank=1, parts=WANT).code is Code.NOT_READY
    bench.ask(Kind.ASSIGN, parts=INITIAL)
    bench.ask(Kind.READY)
    assert bench.late[wait.sequence].kind is Kind.DONE


def test_another_model_or_job_is_refused_with_both_descriptions() -> None:
    bench = Bench().opened()
    other = TableSpec(kind=TableKind.DENSE, name="w", size=3, rule=SGD())
    parts = (bytes_part(Field.TEXT, JOB.encode()), bytes_part(Field.SPEC, other.encode(), 0))
    refused = bench.ask(Kind.HELLO, 1, parts=parts)
    assert refused.code is Code.MISMATCH
    assert "size=3" in refused.text
    assert "size=2" in refused.text
    assert "'another job', but this server runs 'a job'" in bench.hello(1, job="another job").text
    assert "this job has 2 trainers" in bench.hello(2).text


def test_the_answer_to_a_push_brings_the_values_of_the_next_step() -> None:
    bench = Bench().opened()
    push = (Part(0, Field.VALUES, torch.ones(2), lr=1.0), *WANT)
    wait = bench.ask(Kind.PUSH, 0, number=0, parts=push)
    assert wait.text == "trainer 1"
    bench.ask(Kind.PUSH, 1, number=0, parts=push)
    for reply in (bench.late[wait.sequence], bench.late[bench.sequence]):
        assert reply.kind is Kind.DATA
        assert reply.number == 1
        assert [part.data.tolist() for part in reply.parts] == [[-1, -1], [[0], [0]]]


def test_a_step_done_again_sees_what_it_saw_and_counts_once() -> None:
    """A trainer died between two servers; this one had its push, and has applied the step since."""
    bench = Bench().opened()
    rows = (Part(1, Field.KEYS, torch.tensor([2, 7])), Part(1, Field.ROWS, torch.ones(2, 1), lr=1.0))
    for rank in (0, 1):
        bench.ask(Kind.PUSH, rank, number=0, parts=(Part(0, Field.VALUES, torch.ones(2), lr=1.0), *rows))
    bench.gone.add(b"1-0")
    assert bench.hello(1, life=1, restarts=1).number == 1
    asks = (Part(0, Field.WANT, torch.tensor([1])), Part(1, Field.KEYS, torch.tensor([7, 1, 2])))
    again = bench.ask(Kind.PULL, 1, 1, number=0, parts=asks)
    assert [part.data.flatten().tolist() for part in again.parts] == [[0, 0], [0, 0, 0]]
    now = bench.ask(Kind.PULL, 1, 1, number=1, parts=asks)
    assert [part.data.flatten().tolist() for part in now.parts] == [[-1, -1], [-1, 0, -1]]
    assert bench.push(1, 0, life=1).kind is Kind.DONE
    assert bench.values() == [-1, -1, 0, -1]


def test_nobody_reads_while_a_trainer_is_too_far_behind() -> None:
    bench = Bench(sync=False, max_staleness=1).opened()
    for step in (0, 1):
        bench.push(0, step)
    ahead = bench.ask(Kind.PULL, 0, number=2, parts=WANT)
    assert ahead.text == "trainer 1"
    assert bench.ask(Kind.PULL, 1, number=0, parts=WANT).kind is Kind.DATA
    bench.push(1, 0)
    assert bench.late[ahead.sequence].kind is Kind.DATA


def test_a_push_that_may_be_lost_holds_nobody_up_until_its_trainer_asks_again() -> None:
    """A server that recovers from a snapshot has lost the last steps of its trainers."""
    bench = Bench(sync=False, max_staleness=1).opened()
    bench.steps.lose_pushes([0, 1])
    assert bench.ask(Kind.PULL, 0, number=5, parts=WANT).kind is Kind.DATA, "trainer 1 waits elsewhere"
    bench.push(1, 2)
    assert bench.ask(Kind.PULL, 0, number=5, parts=WANT).kind is Kind.WAIT, "trainer 1 has made 3 steps"
    bench.push(1, 3)
    assert bench.late[bench.sequence - 1].kind is Kind.DATA


def test_pushes_that_arrive_out_of_order_count_all() -> None:
    """The first was lost on its way; its retry comes after the second."""
    bench = Bench(sync=False).opened()
    parts = (Part(0, Field.VALUES, torch.ones(2), lr=1.0),)
    first, second = (
        Message(kind=Kind.PUSH, sequence=101 + step, number=step, parts=parts) for step in (0, 1)
    )
    for push in (second, first, first, second):
        assert bench.send(push).kind is Kind.DONE
    bench.sequence = 200
    assert bench.values()[:2] == [-2, -2]


def test_rows_that_are_not_finite_can_be_skipped_and_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(sync=False, skip_bad=True).opened()
    rows = torch.tensor([[float("nan")], [1.0]])
    parts = (Part(1, Field.KEYS, torch.tensor([1, 2])), Part(1, Field.ROWS, rows, lr=1.0))
    assert bench.ask(Kind.PUSH, parts=parts).kind is Kind.DONE
    assert bench.values() == [0, 0, 0, -1]
    assert bench.store.skipped == 1
    for _ in range(11):
        bench.ask(Kind.PUSH, parts=parts)
    assert [line.rpartition("skipped ")[2].split()[0] for line in capsys.readouterr().err.splitlines()] == [
        "1",
        "10",
    ]


def test_a_pull_counts_once_for_an_entry_filter_and_a_step_does_not() -> None:
    counted = RowOptions(entry=Entry(EntryKind.COUNT, 3.0))
    spec = TableSpec(kind=TableKind.SPARSE, name="rare", size=1, rule=SGD(), rows=counted)
    bench = Bench(sync=True, specs={0: spec}).opened(initial=())
    key = torch.tensor([5])
    ask = (Part(0, Field.KEYS, key),)
    pull = Message(kind=Kind.PULL, sequence=900, number=0, parts=ask)
    for _ in range(5):
        bench.send(pull)
    push = (*ask, Part(0, Field.ROWS, torch.ones(1, 1), lr=1.0))
    for rank in (0, 1):
        bench.ask(Kind.PUSH, rank, number=0, parts=push)
    table = bench.store.tables[0]
    assert isinstance(table, SparseTable)
    assert table.candidates().counts.tolist() == [1]
    bench.sequence = 1000
    for _ in range(2):
        bench.ask(Kind.PULL, number=1, parts=ask)
    assert len(table) == 1


def test_what_is_refused_is_not_recorded() -> None:
    bench = Bench()
    for rank in (0, 1):
        bench.hello(rank)
    joined = len(bench.recorded)
    assert bench.ask(Kind.ASSIGN, parts=(Part(0, Field.VALUES, torch.zeros(3)),)).code is Code.BAD_SHAPE
    bench.ask(Kind.ASSIGN, parts=INITIAL)
    bench.ask(Kind.READY)
    stats = (
        Part(1, Field.KEYS, torch.tensor([1])),
        Part(1, Field.ROWS, torch.ones(1, 1)),
        Part(1, Field.STATS, torch.ones(1, 2)),
    )
    assert bench.ask(Kind.PUSH, parts=stats).kind is Kind.REFUSED  # the table keeps no statistics
    assert [message.kind for message in bench.recorded[joined:]] == [Kind.ASSIGN, Kind.READY]


@pytest.mark.parametrize(
    "order", ["", "{}", "[" * 5000, "x" * 10_000, '{"where": "", "id": "a", "mode": 9, "after": null}',
              '{"where": "nosuch://x", "id": "save-1", "mode": 0, "after": null}',
              '{"where": "\\u0000", "id": "save-1", "mode": 0, "after": null}',
              '{"where": "/x", "id": "../a", "mode": 0, "after": null}']
)  # fmt: skip
def test_an_order_that_makes_no_sense_is_refused(order: str) -> None:
    bench = Bench(sync=False).opened()
    reply = bench.ask(Kind.SAVE, parts=(bytes_part(Field.TEXT, order.encode()),))
    while reply.kind is Kind.WAIT:
        bench.pass_time(0.5)
        reply = bench.late[reply.sequence]
    assert reply.kind is Kind.REFUSED
    assert bench.values() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "rule", [Adam(beta1=1.0), Adam(beta2=2.0), Adagrad(lr_decay=-1.0), SGD(momentum=-0.1), Adam(eps=-1.0)]
)
def test_a_rule_that_would_divide_by_zero_is_refused(rule: AnyRule) -> None:
    spec = TableSpec(kind=TableKind.DENSE, name="w", size=2, rule=rule)
    assert Bench(specs={0: spec}).hello(0).code is Code.BAD_MESSAGE


def test_a_row_is_made_by_the_push_that_trains_it_and_not_by_a_pull() -> None:
    bench = Bench(sync=False).opened()
    keys = torch.tensor([8, 9])
    for field in (Field.PEEK, Field.KEYS):
        bench.ask(Kind.PULL, parts=(Part(1, field, keys),))
        assert len(bench.store.tables[1]) == 2
    bench.ask(Kind.PUSH, parts=(Part(1, Field.KEYS, keys), Part(1, Field.ROWS, torch.ones(2, 1), 0.1)))
    assert len(bench.store.tables[1]) == 4


@pytest.mark.parametrize("sync", [True, False])
def test_what_was_recorded_makes_the_same_service_again(sync: bool) -> None:
    bench = Bench(sync=sync).opened()
    rng = random.Random(4)
    for step in range(6):
        for rank in rng.sample([0, 1], 2):
            bench.push(rank, step, rng.random())
    bench.push(1, 6, 1.0)
    bench.ask(Kind.BARRIER, 0, number=1)
    again = Bench(sync=sync)
    for message in bench.recorded:
        again.service.replay(message)
    assert again.recorded == []
    again.sequence = bench.sequence
    for both in (bench, again):
        if sync:
            both.push(0, 6, 0.5)
        assert both.ask(Kind.BARRIER, 1, number=1).kind is Kind.DONE
    assert again.values() == bench.values()


WRONG_PUSHES: list[tuple[Code, tuple[Part, ...]]] = [
    (Code.UNKNOWN_TABLE, (Part(9, Field.VALUES, torch.ones(2)),)),
    (Code.BAD_SHAPE, (Part(0, Field.VALUES, torch.ones(3)),)),
    (Code.BAD_SHAPE, (Part(1, Field.VALUES, torch.ones(2)),)),
    (Code.NOT_FINITE, (Part(0, Field.VALUES, torch.tensor([1.0, float("nan")])),)),
    (
        Code.NOT_FINITE,
        (Part(1, Field.KEYS, torch.tensor([1])), Part(1, Field.ROWS, torch.tensor([[float("inf")]]))),
    ),
    (
        Code.BAD_SHAPE,
        (
            Part(1, Field.KEYS, torch.tensor([1])),
            Part(1, Field.ROWS, torch.ones(1, 1)),
            Part(1, Field.STATS, torch.ones(2, 2)),
        ),
    ),
    (Code.BAD_SHAPE, (Part(0, Field.VALUES, torch.ones(5)),)),  # runs on over table 1, which is sparse
    (Code.BAD_MESSAGE, (Part(1, Field.PEEK, torch.tensor([1])),)),
    (Code.BAD_MESSAGE, (Part(1, Field.STATS, torch.ones(1, 2)),)),
    (Code.BAD_SHAPE, (Part(1, Field.KEYS, torch.tensor([1])), Part(1, Field.ROWS, torch.ones(1, 4)))),
    (Code.BAD_SHAPE, (Part(1, Field.KEYS, torch.tensor([1])), Part(1, Field.ROWS, torch.ones(2, 1)))),
    (Code.BAD_MESSAGE, (Part(1, Field.ROWS, torch.ones(1, 1)),)),
    (Code.BAD_MESSAGE, (Part(1, Field.KEYS, torch.tensor([1])), Part(0, Field.ROWS, torch.ones(1, 1)))),
    (Code.UNKNOWN_TABLE, (Part(7, Field.KEYS, torch.tensor([1])),)),
    (Code.BAD_MESSAGE, (Part(0, Field.VALUES, torch.ones(2)), Part(0, Field.VALUES, torch.ones(2)))),
    (Code.BAD_MESSAGE, (Part(2, Field.VALUES, torch.ones(1)),)),
    (
        Code.BAD_MESSAGE,  # statistics of values
        (Part(0, Field.VALUES, torch.ones(2)), Part(0, Field.STATS, torch.ones(2, 2))),
    ),
    (
        Code.BAD_MESSAGE,  # rows twice
        (
            Part(1, Field.KEYS, torch.tensor([1])),
            Part(1, Field.ROWS, torch.ones(1, 1)),
            Part(1, Field.ROWS, torch.ones(1, 1)),
        ),
    ),
]


@pytest.mark.parametrize(("code", "wrong"), WRONG_PUSHES)
def test_a_push_that_is_wrong_anywhere_changes_nothing(code: Code, wrong: tuple[Part, ...]) -> None:
    bench = Bench(sync=False).opened()
    good = Part(0, Field.VALUES, torch.ones(2), lr=1.0) if wrong[0].table else None
    reply = bench.ask(Kind.PUSH, parts=(good, *wrong) if good else wrong)
    assert reply.code is code, reply.text
    assert bench.values() == [0, 0, 0, 0]


def pushed_at(bench: Bench, rank: int, step: int, dense: float, rows: float = 1.0) -> Message:
    """A push with these learning rates."""
    parts = (
        Part(0, Field.VALUES, torch.ones(2), lr=dense),
        Part(1, Field.KEYS, torch.tensor([1])),
        Part(1, Field.ROWS, torch.ones(1, 1), lr=rows),
    )
    return bench.ask(Kind.PUSH, rank, number=step, parts=parts)


@pytest.mark.parametrize("rates", [(0.1, 1.0), (0.2, 0.5)])
def test_another_learning_rate_in_a_step_is_refused(rates: tuple[float, float]) -> None:
    bench = Bench().opened()
    assert pushed_at(bench, 0, 0, 0.2).kind is Kind.DONE
    recorded = len(bench.recorded)
    refused = pushed_at(bench, 1, 0, *rates)
    assert refused.code is Code.MISMATCH
    name, mine, other = ("'w'", 0.1, 0.2) if rates[0] == 0.1 else ("'e'", 0.5, 1.0)
    for part in (
        "trainer 1",
        "step 0",
        name,
        f"rate {mine}",
        f"trainer 0 pushed it with {other}",
        "resume_step",
    ):
        assert part in refused.text
    assert len(bench.recorded) == recorded
    assert bench.steps.step == 0
    assert pushed_at(bench, 1, 0, 0.2).kind is Kind.DONE
    assert pushed_at(bench, 1, 1, 0.1).kind is Kind.DONE, "a schedule goes on"
    assert pushed_at(bench, 0, 1, 0.1).kind is Kind.DONE
    assert bench.values() == pytest.approx([-0.3, -0.3, -2, 0])


def test_the_last_digits_of_a_learning_rate_may_differ() -> None:
    """Of a cosine on two CPUs. The lowest rank's rate counts, whichever comes first."""
    bench = Bench().opened()
    for rank, rate in ((1, 0.1 + 1e-17), (0, 0.1)):
        assert pushed_at(bench, rank, 0, rate).kind is Kind.DONE
    for rank, rate in ((1, 3e-16), (0, 0.0)):
        assert pushed_at(bench, rank, 1, rate).kind is Kind.DONE
    assert bench.values()[0] == pytest.approx(-0.1)


def test_learning_rates_may_differ_in_async_training_and_in_an_older_log() -> None:
    bench = Bench(sync=False).opened()
    for rank, rate in ((0, 0.2), (1, 0.1)):
        assert pushed_at(bench, rank, 0, rate).kind is Kind.DONE
    replayed = Bench().opened()
    for message in (each for each in bench.recorded if each.kind is Kind.PUSH):
        replayed.service.replay(message)
    assert replayed.values()[0] == pytest.approx(-0.2)


BLOCKS = {
    number: TableSpec(kind=TableKind.DENSE, name=f"w{number}", size=size, rule=rule)
    for number, (size, rule) in enumerate([(2, SGD()), (1, Adagrad()), (3, SGD(momentum=0.5))])
}


def run(*values: float, first: int = 0) -> Part:
    return Part(first, Field.VALUES, torch.tensor(values), lr=1.0)


def blocks_after(*pushes: tuple[Part, ...], sync: bool = False, skip_bad: bool = False) -> list[list[float]]:
    """What one trainer's pushes make of BLOCKS."""
    bench = Bench(1, sync=sync, skip_bad=skip_bad, specs=BLOCKS)
    bench.hello(0)
    bench.ask(Kind.READY)
    for step, parts in enumerate(pushes):
        reply = bench.ask(Kind.PUSH, number=step, parts=parts)
        assert reply.kind is Kind.DONE, reply.text
    reply = bench.ask(Kind.PULL, number=bench.steps.step, parts=(Part(0, Field.WANT, torch.tensor([3])),))
    return [part.tolist() for part in reply.parts[0].data.split([2, 1, 3])]


@pytest.mark.parametrize("sync", [True, False])
def test_a_run_of_blocks_counts_as_its_blocks(sync: bool) -> None:
    together = (run(1, 2, 3, 4, 5, 6),)
    apart = (run(4, 5, 6, first=2), run(1, 2), run(3, first=1))
    assert blocks_after(together, apart, sync=sync) == blocks_after(apart, together, sync=sync)
    assert blocks_after(together, sync=sync) == [[-1, -2], [-1], [-4, -5, -6]]


def test_trainers_may_cut_their_runs_differently() -> None:
    bench = Bench(specs=BLOCKS)
    for rank in (0, 1):
        bench.hello(rank)
    bench.ask(Kind.READY)
    bench.ask(Kind.PUSH, 0, parts=(run(1, 1, 1, 1, 1, 1),))
    bench.ask(Kind.PUSH, 1, parts=(run(3, 3), run(3, 3, 3, 3, first=1)))
    reply = bench.ask(Kind.PULL, number=1, parts=(Part(0, Field.WANT, torch.tensor([3])),))
    assert reply.parts[0].data.tolist() == [-2, -2, -1, -2, -2, -2]
    bench.ask(Kind.PUSH, 0, number=1, parts=(run(2, 2),))
    bench.ask(Kind.PUSH, 1, number=1, parts=(run(2, 2, 0),))  # of the next block as well
    reply = bench.ask(Kind.PULL, number=2, parts=(Part(0, Field.WANT, torch.tensor([1])),))
    assert reply.parts[0].data.tolist() == [-4, -4]


def test_of_a_run_the_block_that_is_not_finite_is_named_or_left_out() -> None:
    nan = float("nan")
    bench = Bench(1, sync=False, specs=BLOCKS)
    bench.hello(0)
    bench.ask(Kind.READY)
    reply = bench.ask(Kind.PUSH, parts=(run(1, 1, nan, 1, 1, 1),))
    assert (reply.code, "'w1'" in reply.text) == (Code.NOT_FINITE, True)
    assert blocks_after((run(1, 1, nan, 1, 1, 1),), skip_bad=True) == [[-1, -1], [0], [-1, -1, -1]]


def test_runs_that_overlap_are_refused() -> None:
    bench = Bench(1, sync=False, specs=BLOCKS)
    bench.hello(0)
    bench.ask(Kind.READY)
    reply = bench.ask(Kind.PUSH, parts=(run(1, 1, 1), run(1, 1, 1, 1, first=1)))
    assert reply.code is Code.BAD_MESSAGE


def test_messages_at_random_leave_the_service_up() -> None:
    """Well-formed messages with random content: every one is answered, and pushes that are refused
    change nothing.
    """
    rng = random.Random(3)
    bench = Bench(sync=False).opened()
    kinds = [kind for kind in Kind if kind not in (Kind.FINISH, Kind.LEAVE)]
    for _ in range(3000):
        parts = tuple(_random_part(rng) for _ in range(rng.randrange(3)))
        bench.sequence += 1
        message = Message(
            kind=rng.choice(kinds),
            rank=rng.choice([0, 0, 1, 2, 4_000_000_000]),
            incarnation=rng.choice([0, 0, 1]),
            sequence=bench.sequence,
            number=rng.choice([0, 1, 2**63]),
            parts=parts,
        )
        before = bench.values()
        reply = bench.send(message)
        pushed = message.kind is Kind.PUSH and reply.kind in (Kind.DONE, Kind.DATA)
        assert pushed or bench.values() == before
    assert bench.hello(1, life=0).kind is Kind.DONE


def _random_part(rng: random.Random) -> Part:
    table = rng.choice([0, 1, 2, 3, 2**32 - 1])
    count = rng.randrange(4)
    match rng.choice(list(Field)):
        case Field.KEYS | Field.PEEK as field:
            return Part(
                table,
                field,
                torch.tensor([rng.randrange(-3, 4) for _ in range(count)], dtype=torch.int64),
            )
        case Field.ROWS:
            return Part(table, Field.ROWS, torch.ones(count, rng.randrange(1, 3)), lr=0.1)
        case Field.STATS:
            return Part(table, Field.STATS, torch.ones(count, rng.randrange(1, 3)))
        case Field.WANT:
            return Part(table, Field.WANT, torch.tensor([rng.randrange(-2, 4)] * count, dtype=torch.int64))
        case Field.VALUES as field:
            return Part(table, field, torch.ones(count), lr=0.1)
        case field:
            return bytes_part(field, rng.randbytes(count * 8), table)


def look(bench: Bench, table: str, *keys: int) -> Message:
    parts = (bytes_part(Field.TEXT, table.encode()), Part(0, Field.KEYS, torch.tensor(keys)))
    return bench.ask(Kind.LOOK, NO_TRAINER, 77, parts=parts)


def test_anyone_may_look_at_rows_and_nothing_changes() -> None:
    bench = Bench(sync=False)
    early = look(bench, "e", 1)
    assert (early.kind, early.code) == (Kind.REFUSED, Code.NOT_READY)
    bench.opened()
    before = len(bench.recorded)
    row = {"state": "row", "values": [0.0]}
    assert json.loads(look(bench, "e", 1, 3).text) == {"rows": [row, {"state": "no row"}]}
    assert json.loads(look(bench, "w", 1).text) == {"tables": ["e"]}, "w is dense"
    assert len(bench.recorded) == before
    assert json.loads(look(bench, "e", 3).text) == {"rows": [{"state": "no row"}]}
    assert look(bench, "e", *range(1001)).code is Code.BAD_MESSAGE
    assert bench.ask(Kind.LOOK, NO_TRAINER, 77, parts=WANT).code is Code.BAD_MESSAGE
