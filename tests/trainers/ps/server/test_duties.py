"""What a real server does when no message arrives. The test says what time it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from tests.support.cluster import reserved_endpoints
from trainers.ps.configs import PsConfigs
from trainers.ps.server.saving import SaveRequest
from trainers.ps.server.server import Server, ServerPlan, TableClock
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.spec import Bound, RowOptions, TableKind, TableSpec
from trainers.ps.wire import MAX_FRAME_BYTES, Code, Field, Kind, Message, Part, bytes_part, decode

pytestmark = pytest.mark.slow

TTL = 100.0
PLAIN = TableSpec(kind=TableKind.SPARSE, name="e", size=1, rule=SGD())
EXPIRING = TableSpec(
    kind=TableKind.SPARSE, name="e", size=1, rule=SGD(), rows=RowOptions(bound=Bound(ttl_s=TTL))
)


class Attended:
    """A server without its loop, one of whose trainers has joined and has no connection."""

    def __init__(self, endpoint: str, spec: TableSpec) -> None:
        configs = PsConfigs(trainer_timeout_s=20.0)
        plan = ServerPlan(endpoints=[endpoint], index=0, trainers=2, sync=False, configs=configs)
        self.reports = 0
        self.server = Server(plan, self.tell)
        self.now, self.wall = time.monotonic(), time.time()
        self.sequence = 0
        self.job = plan.job

    def tell(self, *report: object) -> bool:
        self.reports += 1
        return True

    def join(self, spec: TableSpec) -> None:
        for rank in (0, 1):
            words = bytes_part(Field.TEXT, self.job.encode())
            self.ask(Kind.HELLO, words, bytes_part(Field.SPEC, spec.encode()), rank=rank)
        self.ask(Kind.READY)

    def ask(self, kind: Kind, *parts: Part, rank: int = 0) -> Message:
        self.sequence += 1
        request = Message(kind=kind, rank=rank, sequence=self.sequence, parts=parts)
        replies = self.server._service.handle(b"%d" % rank, request, self.server._reachable)
        return next(reply for _, reply in replies if reply.sequence == self.sequence)

    def push(self, *keys: int) -> None:
        rows = Part(0, Field.ROWS, torch.ones(len(keys), 1), lr=1.0)
        assert self.ask(Kind.PUSH, Part(0, Field.KEYS, torch.tensor(keys)), rows).kind is Kind.DONE

    def rows(self, *keys: int) -> list[str]:
        return [row["state"] for row in self.server._store.look("e", np.array(keys))["rows"]]

    def wait(self, seconds: float, set_by: float = 0.0) -> None:
        """No message arrives for so long, and the machine's clock is set."""
        self.wall += set_by
        until = self.now + seconds
        while self.now < until:
            self.now, self.wall = self.now + 0.5, self.wall + 0.5
            self.server._attend(self.now, self.wall)


@pytest.fixture
def expiring() -> Iterator[Attended]:
    yield from attended(EXPIRING)


@pytest.fixture
def plain() -> Iterator[Attended]:
    yield from attended(PLAIN)


def attended(spec: TableSpec) -> Iterator[Attended]:
    with reserved_endpoints(1) as (endpoint,):
        made = Attended(endpoint, spec)
        made.join(spec)
        yield made
        made.server._saving.close()
        made.server._close()


def test_rows_leave_when_their_time_is_over_though_nobody_asks(expiring: Attended) -> None:
    """With the default durability."""
    expiring.wait(1)
    expiring.push(1, 2)
    expiring.wait(TTL / 2)
    expiring.push(2, 3)
    assert expiring.rows(1, 2, 3) == ["row", "row", "row"]
    expiring.wait(TTL / 2 + 2)
    assert expiring.rows(1, 2, 3)[1:] == ["row", "row"]
    assert expiring.rows(1) != ["row"]
    expiring.wait(TTL)
    assert "row" not in expiring.rows(1, 2, 3)


def test_rows_that_leave_by_time_count_as_a_change_and_are_reported(expiring: Attended) -> None:
    """So that a published folder loses them too."""
    expiring.wait(1)
    expiring.push(1)
    expiring.wait(TTL / 2)
    reports, changes = expiring.reports, expiring.server._store.changes
    expiring.wait(TTL / 4)
    assert expiring.server._store.changes == changes
    expiring.wait(TTL / 2)
    assert expiring.server._store.changes == changes + 1
    assert expiring.reports > reports


@pytest.mark.parametrize("set_by", [7200.0, -7200.0, 3e8])
def test_a_clock_that_is_set_neither_removes_rows_nor_keeps_them(expiring: Attended, set_by: float) -> None:
    expiring.wait(1)
    expiring.push(1)
    expiring.wait(TTL / 2)
    expiring.push(2)
    expiring.wait(TTL / 4, set_by)
    assert expiring.rows(1, 2) == ["row", "row"]
    expiring.wait(TTL / 4 + 2)
    assert expiring.rows(1)[0] != "row"
    assert expiring.rows(2) == ["row"]
    expiring.wait(TTL / 2 + 2)
    assert expiring.rows(2)[0] != "row"
    (budget,) = expiring.server._store.budgets
    assert budget.time is not None
    assert abs(budget.time - expiring.wall) < 2, "a save has the machine's time"


def test_a_trainer_that_dies_while_it_saves_is_noticed(plain: Attended, tmp_path: Path) -> None:
    def save(rank: int, id: str) -> Message:
        text = SaveRequest(str(tmp_path), id, 0).encode()
        return plain.ask(Kind.SAVE, bytes_part(Field.TEXT, text), rank=rank)

    save(0, "save-1")
    task = plain.server._saving._task
    assert task is not None
    task.wait()
    plain.wait(1)
    assert plain.server._service.idle is False
    assert not plain.server._service._pending, "its answer was sent, and nothing arrives any more"
    requester = plain.server._saving.requester
    assert requester is not None
    assert requester[0] == 0
    plain.wait(15)
    assert plain.server._saving.requester is None
    assert save(1, "save-2").kind in (Kind.WAIT, Kind.DONE), "it is written"
    assert plain.server._saving.requester is not None


def test_a_server_with_nothing_to_do_waits_for_a_message(plain: Attended, expiring: Attended) -> None:
    """It does not spin where it has something to look after either."""
    for each in (plain, expiring):
        each.wait(60)
    assert plain.server._wait_ms(plain.now) is None
    assert expiring.server._wait_ms(expiring.now) == 500
    assert expiring.server._wait_ms(expiring.now + 0.4) in (100, 101)


def test_an_answer_too_large_for_a_message_is_refused_and_the_server_lives(plain: Attended) -> None:
    """Each part is small, and all of them together are not."""
    block = Part(0, Field.VALUES, torch.zeros(16_000))
    parts = (block,) * (MAX_FRAME_BYTES // block.data.nbytes + 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 100_000)
        dealer.connect(f"tcp://{plain.server._endpoint}")
        dealer.send_multipart([b"hello"])
        route, *_ = plain.server._socket.recv_multipart()
        plain.server._send([(route, Message(kind=Kind.DATA, sequence=7, parts=parts))])
        refused = decode(dealer.recv_multipart())
    assert (refused.kind, refused.code, refused.sequence) == (Kind.REFUSED, Code.BAD_MESSAGE, 7)
    assert "256 MB" in refused.text


def test_the_clock_of_tables_follows_the_machine_and_says_by_how_much() -> None:
    clock = TableClock(100.0, 5000.0)
    assert clock.read(101.0, 5001.0) == (5001.0, 0.0)
    assert clock.read(102.0, 5002.9) == (5002.0, 0.0), "the work of a time service"
    assert clock.read(103.0, 12203.0) == (12203.0, 7200.0)
    assert clock.read(104.0, 12204.5) == (12204.0, 0.0)
    assert clock.read(104.0, 204.0) == (204.0, -12000.0)
    assert clock.read(604.0, 204.0 + 500) == (704.0, 0.0), "a server that was suspended"
