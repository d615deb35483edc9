"""Published versions by whole jobs: each is exactly what the servers had at its step."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fleetrun.envs.contract import Role
from tests.support.cluster import Job
from tests.support.forking import Forker
from tests.support.scripts.ps_counting import NEW, ROOM, SHARED
from tests.support.scripts.step_limit import give
from tests.trainers.ps.test_recovery import (
    counting,
    expect_exact,
    held,
    kill_one_by_one,
    wait_until,
)
from trainers.ps import Uniform, read_values
from trainers.ps.saves.manifest import current_manifest
from trainers.ps.saves.read import ModelValues, OpenFolder, SparseValues, open_saves
from trainers.ps.tables.spec import RowOptions, RowType
from trainers.ps.trainer.stand_ins import initial_rows
from trainers.storage.errors import LoadError

KILLS = int(os.environ.get("KILLS", "5"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 60 + 5 * KILLS))]


def command(folder: Path, mode: str, durability: str, steps: int, **more: object) -> list[str]:
    words = [str(folder), mode, durability, str(steps), "10", json.dumps(more)]
    return ["-m", "tests.support.scripts.ps_recovery", *words]


class Follower:
    """Reads the versions that it finds, as a server of models would: their values by id, and the chains."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self.values: dict[str, ModelValues] = {}
        self.chains: list[OpenFolder] = []

    @contextmanager
    def following(self) -> Iterator[None]:
        thread = threading.Thread(target=self._follow)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def end_with_an_increment(self, job: Job, step_limit: Path, steps: int) -> None:
        """Let the trainers finish `steps`. Wait for a version twice, so that the last one is no base."""
        for left in (4, 2):
            number = self._number()
            give(step_limit, steps - left)
            wait_until(lambda number=number: self._number() > number, job)
        give(step_limit, steps)

    def _number(self) -> int:
        return self.chains[-1].saves[-1].number if self.chains else 0

    def expect_one_stream(self, logs: Path) -> None:
        """Versions in order, and not only bases, in spite of all kills."""
        last = open_saves(self._folder)
        numbers = [chain.saves[-1].number for chain in (*self.chains, last)]
        assert numbers == sorted(numbers)
        assert {chain.stream for chain in self.chains} <= {last.stream}
        bases = sum(log.read_text().count("as a full version") for log in logs.glob("*.log"))
        assert 0 < bases < numbers[-1]

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                opened = open_saves(self._folder)
                if not self.chains or opened.saves != self.chains[-1].saves:
                    self.values[opened.saves[-1].id] = read_values(opened)
                    self.chains.append(opened)
            except LoadError:  # nothing there yet, or removed meanwhile
                pass
            time.sleep(0.01)


def assert_same(one: ModelValues, other: ModelValues, step: int) -> None:
    """But for rows with their first values: whether a pull for the next step has made them is chance."""
    assert one.dense.keys() == other.dense.keys()
    assert one.sparse.keys() == other.sparse.keys()
    for name, values in one.dense.items():
        assert torch.equal(values, other.dense[name]), (step, name)
    for name, rows in one.sparse.items():
        mine, theirs = (trained(each, int(name.split(".")[1])) for each in (rows, other.sparse[name]))
        assert torch.equal(mine.keys, theirs.keys), (step, name)
        assert torch.equal(mine.values, theirs.values), (step, name)


def trained(rows: SparseValues, slot: int) -> SparseValues:
    if slot % 2:
        return rows
    first = initial_rows(RowOptions(init=Uniform(-0.5, 0.5, seed=slot)), rows.keys, rows.values.shape[1])
    changed = (rows.values != first).any(1)
    return SparseValues(rows.keys[changed], rows.values[changed])


def test_every_version_is_what_the_servers_had_at_its_step_through_kills(
    forker: Forker, tmp_path: Path
) -> None:
    steps = 20 + 10 * KILLS
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for folder in (quiet, killed):
        folder.mkdir()
    with forker.job(quiet, trainers=2, servers=2) as job:
        (quiet / "step_limit").write_text(str(steps))
        job.start_all(command(quiet, "sync", "none", steps, every=True))
        job.expect_success()
    published = killed / "published"
    follower = Follower(published)
    words = command(
        killed, "sync", "log", steps, publish=str(published), publish_interval_s=0.05, snapshot_interval_s=2.0
    )
    with forker.job(killed, trainers=2, servers=2) as job, follower.following():
        job.start_all(words)
        roles = (Role.SERVER, Role.TRAINER)
        seed = int(os.environ.get("SEED", "1"))
        limit = killed / "step_limit"
        kill_one_by_one(job, words, limit, steps - 6, KILLS, seed=seed, word="step", roles=roles)
        follower.end_with_an_increment(job, limit, steps)
        job.expect_success(250 + KILLS)
    follower.expect_one_stream(killed)
    for chain in follower.chains:
        last = chain.saves[-1]
        if last.step < steps:
            wanted = read_values(quiet / "at" / str(last.step))
            assert_same(wanted, follower.values[last.id], last.step)
    assert_same(read_values(published), read_values(killed / "saved"), steps)
    assert current_manifest(published).saves[-1].step == steps


def test_async_versions_lose_and_double_nothing_and_end_with_everything(
    forker: Forker, tmp_path: Path
) -> None:
    """Rows of 16 bits, which have these counts exactly; a bounded table, most of whose rows are gone."""
    kills = max(2, KILLS // 3)
    steps, published = 80 + 80 * kills, tmp_path / "published"
    follower = Follower(published)
    words = counting(
        tmp_path,
        steps,
        "log",
        pause_ms=8,
        limited=True,
        many=True,
        ps={"publish": str(published), "publish_interval_s": 0.05, "publish_dtype": "float16"},
    )
    with forker.job(tmp_path, trainers=2, servers=2) as job, follower.following():
        job.start_all(words)
        roles = (Role.SERVER, Role.TRAINER)
        limit = tmp_path / "step_limit"
        kill_one_by_one(job, words, limit, steps - 6, kills, seed=7, word="pushed", roles=roles)
        follower.end_with_an_increment(job, limit, steps)
        job.expect_success(250 + kills)
        expect_exact(job, steps)
    follower.expect_one_stream(tmp_path)
    before: dict[int, float] = {}
    last = open_saves(published)
    for chain in (*follower.chains, last):
        values = read_values(chain) if chain is last else follower.values[chain.saves[-1].id]
        rows = values.sparse["tables.2.weight"]
        counts = dict(zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True))
        assert all(counts[key] >= count for key, count in before.items())
        before = counts
        assert len(values.sparse["tables.0.weight"].keys) <= ROOM + 2 * 2 * NEW
    mine = [10 * rank + key for rank in (0, 1) for key in range(4)]
    assert before == dict.fromkeys(mine, steps) | {SHARED + key: 2 * steps for key in range(4)}
    assert {spec.rows.dtype for spec in last.specs().values()} == {RowType.FLOAT16}


@pytest.mark.parametrize("dense", ["servers", "allreduce"])
def test_a_trainer_publishes_what_it_has_pushed(forker: Forker, tmp_path: Path, dense: str) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(["-m", "tests.support.scripts.ps_saving", "published", str(tmp_path), dense])
        job.expect_success()
        numbers = [
            int(word)
            for trainer in job.trainers
            for line in trainer.output.splitlines()
            if line.startswith("published")
            for word in line.split()[1:]
        ]
        assert len(set(numbers)) == 8
        assert "The version could not be published: " in job.trainers[0].output
        assert "published" in job.trainers[0].output.partition("unwritable:")[2]
    last = open_saves(tmp_path / "published").saves[-1]
    assert (last.step, last.number) == (9, max(numbers) + 2), "one by hand, and one at the end"
    found = read_values(tmp_path / "published")
    assert torch.equal(found.sparse["weight"].values, torch.full((40, 4), 9.0))
    assert found.dense["seen"].tolist() == [5.0, 5.0], "as it was sent, and kept"
    assert found.dense["bias"].tolist() == [9.0] * 3


def test_what_failed_is_published_later_although_nothing_has_changed_since(
    forker: Forker, tmp_path: Path
) -> None:
    published = tmp_path / "published"
    published.touch()
    words = counting(tmp_path, 20, "none", hold=10, ps={"publish": str(published), "publish_interval_s": 0.1})
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        held(job, words)
        job.servers[0].wait_for("Could not publish a version and will retry")
        published.unlink()

        def counts() -> dict[float, int]:
            with contextlib.suppress(LoadError):
                rows = read_values(published).sparse["tables.0.weight"].values[:, 0]
                return {float(count): int((rows == count).sum()) for count in rows.unique()}
            return {}

        wait_until(lambda: counts() == {10.0: 8, 20.0: 4}, job)
        (tmp_path / "go").touch()
        job.expect_success()
        assert counts() == {20.0: 8, 40.0: 4}


def test_what_cannot_be_published_is_said(forker: Forker, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with forker.job(tmp_path, trainers=1, servers=1) as job:
        job.start_all(command(tmp_path, "sync", "none", 0))
        job.expect_success()
    with forker.job(tmp_path, trainers=1, servers=1) as job:
        words = command(tmp_path, "sync", "none", 0, publish=str(saved))
        server = job.start(words, Role.SERVER, 0)
        assert server.wait() == 1
    assert f"OthersError: {saved} has tables of fleet.save_persistables()" in server.output
    assert "Set another ps_configs publish" in server.output
