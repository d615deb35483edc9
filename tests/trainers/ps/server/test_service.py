"""What a server answers, message by message: no socket, no clock."""

from __future__ import annotations

import random

import pytest
import torch

from trainers.ps.net.wire import Code, Field, Kind, Message, Part, bytes_part
from trainers.ps.server.members import Members
from trainers.ps.server.service import Service
from trainers.ps.tables.rules import SGD, Fixed
from trainers.ps.tables.spec import TableKind, TableSpec

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
WANT = (Part(0, Field.WANT, torch.empty(0)), Part(1, Field.KEYS, torch.tensor([1, 2])))


class Bench:
    """A service, its trainers, and what each of them was answered."""

    def __init__(self, trainers: int = 2, *, sync: bool = True) -> None:
        self.now = 0.0
        self.gone: set[bytes] = set()
        self.service = Service(Members(trainers, GRACE, JOIN, self.now), sync=sync, job=JOB)
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
        self, kind: Kind, rank: int = 0, life: int = 0, number: int = 0, parts: tuple[Part, ...] = ()
    ) -> Message:
        self.sequence += 1
        return self.send(
            Message(
                kind=kind, rank=rank, incarnation=life, sequence=self.sequence, number=number, parts=parts
            )
        )

    def hello(self, rank: int, life: int = 0, restarts: int = 0, job: str = JOB) -> Message:
        specs = tuple(bytes_part(Field.SPEC, spec.encode(), number) for number, spec in SPECS.items())
        return self.ask(
            Kind.HELLO, rank, life, restarts, parts=(bytes_part(Field.TEXT, job.encode()), *specs)
        )

    def opened(self) -> Bench:
        for rank in (0, 1):
            self.hello(rank)
        self.ask(Kind.ASSIGN, parts=INITIAL)
        self.ask(Kind.READY)
        return self

    def push(self, rank: int, step: int, value: float = 1.0, life: int = 0) -> Message:
        return self.ask(
            Kind.PUSH, rank, life, step, (Part(0, Field.VALUES, torch.full((2,), value), lr=1.0),)
        )

    def values(self) -> list[float]:
        reply = self.ask(Kind.PULL, parts=WANT)
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
    assert "trainer 1 is lost: its connection has been gone for over 5 s" in bench.late[wait.sequence].text


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
    assert "trainer 1 is lost: it has not joined for over 60 s" in bench.late[wait.sequence].text


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
    assert "gone for over 60 s" in bench.late[first.sequence].text


def test_a_restarted_trainer_goes_on_where_the_tables_are() -> None:
    bench = Bench(sync=False).opened()
    bench.push(0, 0, 1.0)
    bench.gone.add(b"0-0")
    again = bench.hello(0, life=1, restarts=1)
    assert again.kind is Kind.DONE
    assert again.code is Code.NONE  # ready: no initial values wanted
    bench.ask(Kind.ASSIGN, life=1, parts=(Part(0, Field.VALUES, torch.full((2,), 9.0)),))
    assert bench.push(0, 0, 1.0, life=1).kind is Kind.DONE
    assert bench.push(0, 0, 1.0, life=0).code is Code.UNKNOWN_CLIENT  # the former self
    reply = bench.ask(Kind.PULL, rank=1, parts=WANT)
    assert reply.parts[0].data.tolist() == [-2, -2]


def test_a_restarted_trainer_of_a_sync_job_does_not_push_a_step_twice() -> None:
    bench = Bench().opened()
    bench.push(0, 0)
    bench.gone.add(b"0-0")
    assert bench.hello(0, life=1, restarts=1).number == 1
    bench.push(1, 0)
    assert bench.hello(1, life=0).number == 1


def test_two_trainers_of_one_rank_are_refused_and_a_restart_waits_for_the_connection() -> None:
    bench = Bench().opened()
    assert "already a trainer 1" in bench.hello(1, life=7).text
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
    assert "'another job', this server 'a job'" in bench.hello(1, job="another job").text
    assert "this job has 2 trainers" in bench.hello(2).text


WRONG_PUSHES: list[tuple[Code, tuple[Part, ...]]] = [
    (Code.UNKNOWN_TABLE, (Part(9, Field.VALUES, torch.ones(2)),)),
    (Code.BAD_SHAPE, (Part(0, Field.VALUES, torch.ones(3)),)),
    (Code.BAD_KEYS, (Part(1, Field.VALUES, torch.ones(2)),)),
    (Code.BAD_KEYS, (Part(1, Field.KEYS, torch.tensor([1, 5])), Part(1, Field.ROWS, torch.ones(2, 1)))),
    (Code.BAD_KEYS, (Part(1, Field.KEYS, torch.tensor([2, 1])), Part(1, Field.ROWS, torch.ones(2, 1)))),
    (Code.BAD_SHAPE, (Part(1, Field.KEYS, torch.tensor([1])), Part(1, Field.ROWS, torch.ones(1, 4)))),
    (Code.BAD_SHAPE, (Part(1, Field.KEYS, torch.tensor([1])), Part(1, Field.ROWS, torch.ones(2, 1)))),
    (Code.BAD_MESSAGE, (Part(1, Field.KEYS, torch.tensor([1])),)),
    (Code.BAD_MESSAGE, (Part(1, Field.ROWS, torch.ones(1, 1)),)),
    (Code.BAD_MESSAGE, (Part(1, Field.KEYS, torch.tensor([1])), Part(0, Field.ROWS, torch.ones(1, 1)))),
    (Code.BAD_MESSAGE, (Part(0, Field.VALUES, torch.ones(2)), Part(0, Field.VALUES, torch.ones(2)))),
    (Code.BAD_MESSAGE, (Part(2, Field.VALUES, torch.ones(1)),)),
    (Code.BAD_MESSAGE, (Part(0, Field.WANT, torch.empty(0)),)),
]


@pytest.mark.parametrize(("code", "wrong"), WRONG_PUSHES)
def test_a_push_that_is_wrong_anywhere_changes_nothing(code: Code, wrong: tuple[Part, ...]) -> None:
    bench = Bench(sync=False).opened()
    good = Part(0, Field.VALUES, torch.ones(2), lr=1.0) if wrong[0].table else None
    reply = bench.ask(Kind.PUSH, parts=(good, *wrong) if good else wrong)
    assert reply.code is code, reply.text
    assert bench.values() == [0, 0, 0, 0]


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
        pushed = message.kind is Kind.PUSH and reply.kind is Kind.DONE
        assert pushed or bench.values() == before
    assert bench.hello(1, life=0).kind is Kind.DONE


def _random_part(rng: random.Random) -> Part:
    table = rng.choice([0, 1, 2, 3, 2**32 - 1])
    count = rng.randrange(4)
    match rng.choice(list(Field)):
        case Field.KEYS:
            return Part(
                table,
                Field.KEYS,
                torch.tensor([rng.randrange(-3, 4) for _ in range(count)], dtype=torch.int64),
            )
        case Field.ROWS:
            return Part(table, Field.ROWS, torch.ones(count, rng.randrange(1, 3)), lr=0.1)
        case Field.VALUES | Field.WANT as field:
            return Part(table, field, torch.ones(count), lr=0.1)
        case field:
            return bytes_part(field, rng.randbytes(count * 8), table)
