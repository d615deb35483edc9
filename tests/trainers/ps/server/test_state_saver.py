"""A server that comes back from its folder, with the trainers that it had or with others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

import pytest
import torch
import zmq

from tests.support.cluster import reserved_endpoints
from tests.trainers.ps.saved.tables import MemoryTable, save
from tests.trainers.ps.server.test_service import Bench
from trainers.ps.client import Client
from trainers.ps.configs import PsConfigs
from trainers.ps.durable.journal import DurabilityError, FolderError
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.server.state import StateSaver
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import (
    Entry,
    EntryKind,
    RowOptions,
    ShrinkPolicy,
    TableKind,
    TableSpec,
    describe_kept_job,
)
from trainers.ps.wire import Code, Field, Kind, Message, Part, bytes_part

pytestmark = pytest.mark.slow


class Kept(Bench):
    """A bench whose server keeps what it acknowledges in a folder."""

    def __init__(
        self,
        folder: Path,
        trainers: int,
        *,
        sync: bool = False,
        start: str = "first",
        durability: str = "log",
        servers: int = 1,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(trainers, sync=sync, max_staleness=max_staleness)
        configs = PsConfigs(durability=durability, log_fsync="no")
        job = describe_kept_job(sync, servers, 0, f"durability {durability}")
        self.saver = StateSaver(folder, configs, job=job, server=0, wake=lambda: None)
        self.saver.recover(
            self.service, self.service._members, self.store, self.steps, trainers=trainers, start=start
        )

    def send(self, message: Message) -> Message:
        """As on a server: what changes anything is in the log when it is answered."""
        before = len(self.recorded)
        answer = super().send(message)
        for record in self.recorded[before:]:
            self.saver.record(record)
        return answer

    def snapshot(self) -> None:
        """Until one more is there."""
        members = self.service._members
        self.saver.update(members, self.store, self.steps, may_cut=True)
        task = self.saver._durable._task
        assert task is not None
        task.wait()
        self.saver._end_snapshot()

    def kill(self) -> None:
        """What a killed process leaves: nothing is synced, nothing removed."""
        self.saver._durable.close()

    def done(self, life: int = 0) -> float:
        want = (Part(0, Field.WANT, torch.tensor([1])),)
        number = self.steps.step if self.sync else 0
        return cast(float, self.ask(Kind.PULL, life=life, number=number, parts=want).parts[0].data[0].item())


def trained(folder: Path, **how: object) -> None:
    """Two trainers, three steps each; a fourth of trainer 1 alone, which in sync training waits."""
    bench = Kept(folder, 2, **how)  # type: ignore[arg-type]
    bench.opened()
    for step in range(3):
        for rank in (0, 1):
            bench.push(rank, step)
    bench.push(1, 3)
    if how.get("durability") == "snapshot":
        bench.snapshot()
    bench.kill()


@pytest.mark.parametrize("lossy", [True, False])
def test_a_trainer_does_not_wait_for_its_pushes_that_a_snapshot_lacks(tmp_path: Path, lossy: bool) -> None:
    """With max_staleness, trainers would otherwise wait for each other and for themselves."""
    durability = "snapshot" if lossy else "log"
    bench = Kept(tmp_path, 2, durability=durability)
    bench.opened()
    bench.snapshot()
    for step in range(4):
        for rank in (0, 1):
            bench.push(rank, step)
    bench.kill()
    again = Kept(tmp_path, 2, durability=durability, max_staleness=0)
    pulls = [again.ask(Kind.PULL, rank, number=4).sequence for rank in (0, 1)]
    again.pass_time(1)
    assert [again.late[pull].kind for pull in pulls] == [Kind.DATA] * 2


def joined(bench: Kept, count: int, life: int = 5) -> list[int]:
    return [bench.hello(rank, life).number for rank in range(count)]


@pytest.mark.parametrize("durability", ["log", "snapshot"])
def test_a_server_that_is_back_recognizes_connections_before_their_first_message(
    tmp_path: Path, durability: str
) -> None:
    """A trainer that waits repeats its request after up to 10 s, and must not count as lost meanwhile."""
    trained(tmp_path, durability=durability)
    members = list(Kept(tmp_path, 2, durability=durability).service._members)
    client = Client(["127.0.0.1:1"], 1, PsConfigs())
    try:
        route = client._sockets[0].getsockopt(zmq.ROUTING_ID)
    finally:
        client.close()
    incarnation = members[1].incarnation
    assert members[1].route == route.replace(b"%x" % client._incarnation, b"%x" % incarnation)
    assert members[0].route != members[1].route


@pytest.mark.parametrize("durability", ["log", "snapshot"])
@pytest.mark.parametrize(("count", "step"), [(1, 7), (3, 2)])
def test_another_number_of_trainers_has_the_tables_and_shares_the_steps(
    tmp_path: Path, durability: str, count: int, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path, durability=durability)
    back = Kept(tmp_path, count, start="second", durability=durability)
    said = f"the job had 2 trainers and now has {count}. They start at step {step}"
    assert said in capsys.readouterr().err
    assert joined(back, count) == [step] * count
    assert back.done(5) == -7
    back.push(0, step, life=5)
    if durability == "snapshot":
        back.snapshot()
    back.kill()
    again = Kept(tmp_path, count, start="second", durability=durability)
    assert again.done(5) == -8, "a restart of the server alone knows its trainers"
    assert again.hello(0, 5).number == step + 1
    again.kill()


def test_in_sync_training_the_unfinished_step_is_dropped_for_good(tmp_path: Path) -> None:
    trained(tmp_path, sync=True)
    for start in ("second", "third"):
        back = Kept(tmp_path, 3, sync=True, start=start)
        assert joined(back, 3) == [2, 2, 2]
        assert back.done(5) == -3
        back.kill()
    for rank in range(3):
        back = Kept(tmp_path, 3, sync=True, start="third")
        assert back.push(rank, 2, 6.0, life=5).kind is Kind.DONE
        back.kill()
    back = Kept(tmp_path, 3, sync=True, start="third")
    assert back.done(5) == -9
    back.kill()


def test_a_crash_anywhere_in_the_change_comes_back_before_it_or_after_it(tmp_path: Path) -> None:
    trained(tmp_path / "live", sync=True)
    (log,) = (tmp_path / "live" / "server-0").glob("journal-*")
    before = log.stat().st_size
    Kept(tmp_path / "live", 1, sync=True, start="second").kill()
    after = log.stat().st_size
    assert after > before
    for size in range(before, after + 1):
        folder = tmp_path / str(size)
        shutil.copytree(tmp_path / "live", folder)
        with (folder / "server-0" / log.name).open("r+b") as file:
            file.truncate(size)
        if size < after:  # the old side: the former trainers, and their step that waits
            shutil.copytree(folder, tmp_path / f"{size}-former")
            former = Kept(tmp_path / f"{size}-former", 2, sync=True)
            assert former.push(0, 3).kind is Kind.DONE
            assert former.done() == -4
            former.kill()
        back = Kept(folder, 1, sync=True, start="second")
        assert joined(back, 1) == [6]
        assert back.done(5) == -3
        back.kill()


def test_a_crash_before_the_first_snapshot_of_the_change_comes_back_before_it(tmp_path: Path) -> None:
    trained(tmp_path, durability="snapshot")
    for _ in range(2):
        back = Kept(tmp_path, 3, start="second", durability="snapshot")
        assert joined(back, 3) == [2, 2, 2]
        back.kill()
    former = Kept(tmp_path, 2, durability="snapshot")
    assert former.push(0, 3).kind is Kind.DONE
    former.kill()


def test_changes_follow_each_other(tmp_path: Path) -> None:
    trained(tmp_path)
    pushed, done = 7, 7
    for number, count in enumerate((3, 1, 4, 4, 2)):
        back = Kept(tmp_path, count, start=str(number))
        step = done // count
        assert joined(back, count, life=number + 10) == [step] * count
        for rank in range(count):
            back.push(rank, step, life=number + 10)
        if count == 1:
            back.snapshot()
        pushed += count
        done = (step + 1) * count
        assert back.done(number + 10) == -pushed
        back.kill()


@pytest.mark.parametrize(
    "other", [{"sync": True}, {"durability": "snapshot"}, {"servers": 2}], ids=lambda each: next(iter(each))
)
def test_another_job_is_refused_whatever_its_number_of_trainers(
    tmp_path: Path, other: dict[str, object]
) -> None:
    trained(tmp_path)
    for trainers in (2, 3):
        with pytest.raises(DurabilityError, match="Choose another durability_dir"):
            Kept(tmp_path, trainers, **other)  # type: ignore[arg-type]
    Kept(tmp_path, 3).kill()


def test_another_model_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    back = Kept(tmp_path, 1, start="second")
    back.specs = {0: back.specs[0]}
    assert back.hello(0, 5).code is Code.MISMATCH
    back.kill()


def test_another_start_with_as_many_trainers_forgets_who_they_were(tmp_path: Path) -> None:
    trained(tmp_path)
    back = Kept(tmp_path, 2, start="second")
    assert back.push(1, 4).code is Code.UNKNOWN_CLIENT
    assert joined(back, 2) == [3, 4]
    assert back.push(1, 4).code is Code.UNKNOWN_CLIENT
    assert back.done(5) == -7
    back.kill()


def test_a_folder_that_cannot_be_removed_when_the_job_is_over_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing needs it any more: its trainers have ended well."""
    kept = Kept(tmp_path, 1)
    shutil.rmtree(tmp_path / "server-0")
    kept.saver.close(over=True)
    assert f"Remove {tmp_path}/server-0" in capsys.readouterr().err


def test_candidates_and_their_days_come_back(tmp_path: Path) -> None:
    """From the log, and from a snapshot and the log."""
    rows = RowOptions(entry=Entry(EntryKind.COUNT, 3.0))
    spec = TableSpec(kind=TableKind.SPARSE, name="rare", size=1, rule=SGD(), rows=rows)

    def candidates(kept: Kept) -> list[list[float]]:
        table = kept.store.tables[0]
        assert isinstance(table, SparseTable)
        return torch.stack([each.double() for each in table.candidates().columns], 1).tolist()

    def pull(kept: Kept, *keys: int) -> None:
        assert kept.ask(Kind.PULL, parts=(Part(0, Field.KEYS, torch.tensor(keys)),)).kind is Kind.DATA

    def pass_day(kept: Kept) -> None:
        policy = ShrinkPolicy(delete_after_unseen_days=1)
        day = Part(0, Field.VALUES, torch.from_numpy(policy.numbers()))
        assert kept.ask(Kind.SHRINK, parts=(day,)).kind is Kind.DONE

    for snapshot in (False, True):
        folder = tmp_path / str(snapshot)
        kept = Kept(folder, 2)
        kept.specs = {0: spec}
        kept.opened(())
        pull(kept, 1, 2)
        pass_day(kept)
        pull(kept, 2, 3)
        if snapshot:
            kept.snapshot()
        pass_day(kept)
        pull(kept, 4)
        assert candidates(kept) == [[3, 1, 1], [2, 2, 1], [4, 1, 0]]
        kept.kill()
        back = Kept(folder, 2)
        assert sorted(candidates(back)) == [[2, 2, 1], [3, 1, 1], [4, 1, 0]]
        back.specs = {0: spec}
        back.sequence = 100
        pass_day(back)
        assert candidates(back) == [[4, 1, 1]]
        back.kill()


class Loaded:
    """A real server without its loop that begins with a save, unless its log has more."""

    def __init__(self, endpoint: str, durable: Path, load_from: Path | None) -> None:
        self.plan = ServerPlan(
            endpoints=[endpoint],
            index=0,
            trainers=1,
            sync=False,
            configs=PsConfigs(durability="log", log_fsync="no"),
            start="first",
            load_from=None if load_from is None else str(load_from),
            durable_dir=durable,
        )
        self.server = Server(self.plan)

    def ask(self, kind: Kind, sequence: int, *parts: Part) -> Message:
        request = Message(kind=kind, sequence=sequence, parts=parts)
        ((_, reply),) = self.server._service.handle(b"0", request, lambda route: True)
        return reply

    def trained(self) -> None:
        """One push, and no snapshot: there is no room for one."""
        words = bytes_part(Field.TEXT, self.plan.job.encode())
        spec = bytes_part(Field.SPEC, PLAIN.encode())
        if self.ask(Kind.HELLO, 1, words, spec).code is Code.NOT_READY:
            self.ask(Kind.READY, 2)
        rows = Part(0, Field.ROWS, torch.ones(2, 4), lr=1.0)
        assert self.ask(Kind.PUSH, 3, Part(0, Field.KEYS, torch.tensor([1, 2])), rows).kind is Kind.DONE

    def values(self) -> torch.Tensor:
        return self.ask(Kind.PULL, 4, Part(0, Field.PEEK, torch.tensor([1, 2]))).parts[0].data

    def kill(self) -> None:
        assert self.server._state_saver is not None
        self.server._state_saver._durable.close()
        self.server._saving.close()
        self.server._close()


PLAIN = TableSpec(kind=TableKind.SPARSE, name="e", size=4, rule=SGD())


def test_a_log_is_not_applied_to_another_save_than_the_one_it_began_with(tmp_path: Path) -> None:
    """The first snapshot failed, the job saved where it had loaded from, and then the server was killed."""
    model, other = tmp_path / "model", tmp_path / "other"
    save(model, [[MemoryTable(PLAIN).put([1, 2], 1)]])
    save(other, [[MemoryTable(PLAIN).put([1, 2], 2)]])
    with reserved_endpoints(1) as (endpoint,):
        values = []
        for name, origin in (("loaded", model), ("empty", None)):
            first = Loaded(endpoint, tmp_path / name, origin)
            first.trained()
            values.append(first.values())
            first.kill()
        for name, origin, wanted in (("loaded", model, values[0]), ("empty", None, values[1])):
            again = Loaded(endpoint, tmp_path / name, origin)
            assert torch.equal(again.values(), wanted)
            again.kill()
        save(model, [[MemoryTable(PLAIN).put([1, 2], 3)]])
        changed = (("loaded", model), ("loaded", other), ("loaded", None), ("empty", model))
        for number, (name, origin) in enumerate(changed):
            copy = tmp_path / str(number)
            shutil.copytree(tmp_path / name, copy)
            with pytest.raises(FolderError, match="tables started with"):
                Loaded(endpoint, copy, origin)


def test_once_there_is_a_snapshot_the_save_that_a_job_began_with_is_not_needed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(model, [[MemoryTable(PLAIN).put([1, 2], 1)]])
    with reserved_endpoints(1) as (endpoint,):
        first = Loaded(endpoint, tmp_path / "log", model)
        first.trained()
        saver = first.server._state_saver
        assert saver is not None
        first.server._save_state()
        assert saver._durable._task is not None
        saver._durable._task.wait()
        first.server._save_state()
        words = bytes_part(Field.TEXT, first.plan.job.encode())
        first.ask(Kind.HELLO, 9, words, bytes_part(Field.SPEC, PLAIN.encode()))  # so in the log there is one
        wanted = first.values()
        first.kill()
        shutil.rmtree(model)
        again = Loaded(endpoint, tmp_path / "log", model)
        assert torch.equal(again.values(), wanted)
        again.kill()
