"""Published versions by whole jobs: each is exactly what the servers had at its step."""

from __future__ import annotations

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
from tests.support.forking import Forker
from tests.trainers.ps.test_recovery import kill_one_by_one
from trainers.ps import Uniform, read_values
from trainers.ps.saves.manifest import current_manifest
from trainers.ps.saves.read import ModelValues, OpenFolder, SparseValues, open_saves
from trainers.ps.tables.spec import RowOptions
from trainers.ps.trainer.stand_ins import initial_rows
from trainers.storage.errors import LoadError

KILLS = int(os.environ.get("KILLS", "5"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 60 + 5 * KILLS))]


def command(folder: Path, mode: str, durability: str, steps: int, **more: object) -> list[str]:
    words = [str(folder), mode, durability, str(steps), "10", json.dumps(more)]
    return ["-m", "tests.support.scripts.ps_recovery", *words]


class Follower:
    """Reads the versions that it finds, as one who serves would: their values by step, and the chains."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self.values: dict[int, list[ModelValues]] = {}
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

    def _follow(self) -> None:
        while not self._over.is_set():
            try:
                opened = open_saves(self._folder)
                if not self.chains or opened.saves != self.chains[-1].saves:
                    found = read_values(opened)
                    self.chains.append(opened)
                    self.values.setdefault(opened.saves[-1].step, []).append(found)
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
        kill_one_by_one(job, words, killed / "step_limit", steps, KILLS, seed=seed, word="step", roles=roles)
        job.expect_success(250 + KILLS)
        said = job.servers[0].output
    numbers = [chain.saves[-1].number for chain in follower.chains]
    print(len(numbers), numbers[-1], [len(m.saves) for m in follower.chains], said)
    assert numbers == sorted(numbers)
    assert len({chain.stream for chain in follower.chains}) == 1
    for step, versions in follower.values.items():
        if step < steps:
            wanted = read_values(quiet / "at" / str(step))
            for each in versions:
                assert_same(wanted, each, step)
    last = read_values(published)
    assert_same(last, read_values(killed / "saved"), steps)
    assert current_manifest(published).saves[-1].step == steps
    assert any(len(chain.saves) > 1 for chain in follower.chains), "no increments"
