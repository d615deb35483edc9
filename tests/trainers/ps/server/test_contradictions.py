"""A server whose state contradicts itself stops with one sentence. Each test breaks what it must notice."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cluster import reserved_endpoints
from tests.support.waiting import eventually
from tests.trainers.ps.server.test_duties import EXPIRING, PLAIN, Attended
from trainers.errors import BrokenError
from trainers.ps.configs import PsConfigs
from trainers.ps.durable import journal
from trainers.ps.durable.journal import DurabilityError, FolderError, JournalSync
from trainers.ps.server import state
from trainers.ps.server.checks import DivergedError
from trainers.ps.server.server import LivenessChecks, Server, ServerPlan
from trainers.ps.server.service import Service
from trainers.ps.server.store import Store
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.run import SparseRun
from trainers.ps.tables.spec import Bound, RowOptions, TableKind, TableSpec
from trainers.ps.wire import Field, Kind, Message, Part, bytes_part

pytestmark = pytest.mark.slow

BOUNDED = TableSpec(
    kind=TableKind.SPARSE, name="e", size=1, rule=SGD(), rows=RowOptions(bound=Bound(rows=100))
)


@pytest.fixture
def attended(request: pytest.FixtureRequest) -> Iterator[Attended]:
    with reserved_endpoints(1) as (endpoint,):
        made = Attended(endpoint, request.param)
        made.join(request.param)
        yield made
        made.server._saving.close()
        made.server._close()


def of(spec: TableSpec) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("attended", [spec], indirect=True)


@of(BOUNDED)
def test_a_budget_whose_total_is_not_the_sum_of_its_rows(attended: Attended) -> None:
    for start in range(0, 1000, 50):
        attended.push(*range(start, start + 50))
        attended.wait(1)
    attended.server._store.budgets[0].uses.cells[0] += 1
    with pytest.raises(BrokenError, match=r"has rows of cost \d+, but counts \d+. This server stops"):
        attended.wait(1)


@of(EXPIRING)
def test_duties_that_do_not_run(attended: Attended, monkeypatch: pytest.MonkeyPatch) -> None:
    """As once without durability, where rows with a time to live stayed."""
    attended.wait(3600)
    monkeypatch.setattr(Service, "idle", True)
    attended.wait(4)
    with pytest.raises(BrokenError, match="were not checked for 6 s"):
        attended.wait(6)


@of(PLAIN)
def test_a_server_without_duties_may_wait_for_ever(
    attended: Attended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LivenessChecks, "due", lambda self, now: None)
    attended.wait(3600)


@of(PLAIN)
def test_a_push_that_makes_no_row(attended: Attended, monkeypatch: pytest.MonkeyPatch) -> None:
    attended.push(1)
    attended.wait(1)
    attended.push(1, 2)
    monkeypatch.setattr(SparseRun, "_insert", lambda self, starts, keys, missing, counts: counts.fill(0))
    attended.push(3)
    attended.wait(1)
    with pytest.raises(BrokenError, match=r"Id 5 of table 'e' has no row after a push, so this server stops"):
        attended.push(4, 5)


@of(PLAIN)
def test_a_row_that_diverges_ends_the_job(attended: Attended) -> None:
    """The gradients are finite, so no push was refused."""
    attended.wait(1)
    rows = Part(0, Field.ROWS, torch.full((1, 1), 1e30), lr=1e30)
    with pytest.raises(DivergedError, match=r"id 7 of table 'e' has the row .*inf.*Lower the learning"):
        attended.ask(Kind.PUSH, Part(0, Field.KEYS, torch.tensor([7])), rows)
    assert not DivergedError.restart_helps


class Kept:
    """A server with a write-ahead log, and one trainer."""

    def __init__(self, folder: Path, endpoint: str, spec: TableSpec) -> None:
        configs = PsConfigs(durability="log", durability_dir=str(folder), log_fsync="no")
        plan = ServerPlan(
            endpoints=[endpoint], index=0, trainers=1, sync=False, configs=configs, durable_dir=folder
        )
        self.server = Server(plan)
        self.sequence = 0
        words = bytes_part(Field.TEXT, plan.job.encode())
        self.ask(Kind.HELLO, words, bytes_part(Field.SPEC, spec.encode()))
        self.ask(Kind.READY)

    def ask(self, kind: Kind, *parts: Part) -> None:
        self.sequence += 1
        request = Message(kind=kind, rank=0, incarnation=os.getpid(), sequence=self.sequence, parts=parts)
        (_, reply), *_ = self.server._service.handle(b"0", request, lambda route: True)
        assert reply.kind is Kind.DONE, reply

    def push(self, keys: range) -> None:
        rows = Part(0, Field.ROWS, torch.ones(len(keys), 1), lr=1.0)
        self.ask(Kind.PUSH, Part(0, Field.KEYS, torch.tensor(keys)), rows)

    def kill(self) -> None:
        assert self.server._state_saver is not None
        self.server._state_saver._durable.close()
        self.server._saving.close()
        self.server._close()


@pytest.mark.parametrize("spec", [PLAIN, BOUNDED], ids=["plain", "bounded"])
def test_recovery_that_differs_from_the_former_server(
    tmp_path: Path, spec: TableSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_SUMMARY_EVERY", 5)
    with reserved_endpoints(1) as (endpoint,):
        kept = Kept(tmp_path, endpoint, spec)
        for start in range(0, 600, 30):
            kept.push(range(start, start + 30))
        kept.kill()
        again = Kept(tmp_path, endpoint, spec)
        assert 60 <= len(again.server._store.tables[0]) <= 600
        again.kill()
        real = Store.apply
        monkeypatch.setattr(Store, "apply", lambda self, gradients: real(self, gradients[1:]))
        with pytest.raises(FolderError, match=r"after \d+ records .* the tables have step 3, 0 updates"):
            Kept(tmp_path, endpoint, spec).kill()


# ---- The write-ahead log.


@pytest.fixture
def syncing(tmp_path: Path) -> Iterator[JournalSync]:
    made = JournalSync("everysec", "here")
    descriptor = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    made.switch_to(descriptor)
    yield made
    made.close()
    os.close(descriptor)


def test_too_many_open_files_delay_a_sync_and_do_not_end_it(
    syncing: JournalSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor, the thread once ended in silence, and nothing was durable any more."""
    monkeypatch.setattr(journal, "_EVERY_S", 0.01)
    synced: list[int] = []
    real = os.dup

    def dup(descriptor: int) -> int:
        if descriptor != syncing._descriptor:  # a server of another test that still ends
            return real(descriptor)
        synced.append(descriptor)
        if len(synced) < 5:
            raise OSError(24, "Too many open files")
        return real(descriptor)

    monkeypatch.setattr(os, "dup", dup)
    syncing.written()
    eventually(lambda: syncing._since is None and syncing._syncing is None)
    assert len(synced) == 5
    syncing.check()


def test_a_thread_that_has_ended(syncing: JournalSync, monkeypatch: pytest.MonkeyPatch) -> None:
    syncing.check()
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: 1 / 0)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    syncing.written()
    assert syncing._thread is not None
    syncing._thread.join()
    with pytest.raises(DurabilityError, match="the thread for it has ended"):
        syncing.check()


def test_writes_wait_for_a_disk_that_is_late(
    syncing: JournalSync, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A power failure would lose more than about the last second."""
    monkeypatch.setattr(journal, "_LATE_S", 0.05)
    stalled = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: stalled.wait())
    syncing.written()
    eventually(lambda: syncing._late)
    writer = threading.Thread(target=syncing.check)
    writer.start()
    eventually(lambda: "here waits for its disk" in capsys.readouterr().err)
    assert writer.is_alive()
    stalled.set()
    writer.join()
    syncing.check()
