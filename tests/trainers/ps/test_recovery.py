"""Servers and trainers that are killed and come back: what is promised by each durability."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fleetrun.envs.contract import Role
from tests.support.cluster import Job, Process
from tests.support.forking import Forker
from tests.support.scripts.step_limit import give
from tests.support.snapshots import complete
from trainers.ps import read_values

KILLS = int(os.environ.get("KILLS", "5"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 60 + 5 * KILLS))]


def wait_until(condition: Callable[[], object], job: Job, bound: float = 60.0) -> None:
    """Nobody may end meanwhile."""
    deadline = time.monotonic() + bound
    while not condition():
        for process in job.processes:
            assert process.popen.poll() in (None, 0), f"{process.log.name} ended:\n{process.output}"
        assert time.monotonic() < deadline, "\n".join(
            f"{process.log.name}\n{process.output[-800:]}" for process in job.processes
        )
        time.sleep(0.002)


def restart(job: Job, process: Process, command: list[str]) -> Process:
    """As the launcher does when a process was killed."""
    assert process.wait() == -signal.SIGKILL, process.output
    job.processes.remove(process)
    count = process.member.restart_count + 1
    return job.start(command, process.member.role, process.member.rank, restart_count=count)


def steps_said(process: Process, word: str) -> int:
    """The highest step that it printed; -1 for none."""
    said = re.findall(rf"^{word} (\d+)\n", process.output, re.MULTILINE)
    return max(map(int, said), default=-1)


def in_training(process: Process, word: str) -> bool:
    if process.member.role is Role.SERVER:
        return "running server" in process.output
    return steps_said(process, word) >= 0


def kill_one_by_one(
    job: Job,
    command: list[str],
    step_limit: Path,
    steps: int,
    kills: int,
    *,
    seed: int,
    word: str,
    roles: tuple[Role, ...],
) -> None:
    """Each time the trainers have continued since the last kill, a process of `roles` is killed. Their limit
    keeps them from being through before, however slow this process is.
    """
    rng = random.Random(seed)
    for number in range(kills):
        # Before they may continue: else they could be at their limit by then, and never get further.
        reached = {process.member.rank: steps_said(process, word) for process in job.trainers}
        give(step_limit, steps * (number + 1) // (kills + 1))
        further = rng.randrange(1, 4)

        def all_went_on(reached: dict[int, int] = reached, further: int = further) -> bool:
            return all(
                steps_said(process, word) >= reached[process.member.rank] + further
                for process in job.trainers
            )

        wait_until(all_went_on, job)
        time.sleep(rng.uniform(0, 0.02))  # anywhere within a step
        victim = rng.choice([process for process in job.processes if process.member.role in roles])
        wait_until(lambda victim=victim: in_training(victim, word), job)
        victim.kill()
        restart(job, victim, command)
    give(step_limit, steps)


def train(forker: Forker, folder: Path, steps: int, kills: int, seed: int) -> None:
    """Two servers and two trainers in step, with durability "log"."""
    command = ["-m", "tests.support.scripts.ps_recovery", str(folder), "sync", "log", str(steps), "10"]
    folder.mkdir()
    with forker.job(folder, trainers=2, servers=2) as job:
        job.start_all(command)
        roles = (Role.SERVER, Role.TRAINER)
        kill_one_by_one(
            job, command, folder / "step_limit", steps, kills, seed=seed, word="step", roles=roles
        )
        job.expect_success(250 + kills)
    assert list((folder / "kept").iterdir()) == [], "the job is over: nothing needs to be kept"


@pytest.mark.parametrize("kills", [pytest.param(2, id="few"), pytest.param(KILLS, id="many")])
def test_sync_training_with_kills_is_bit_for_bit_training_without(
    forker: Forker, tmp_path: Path, kills: int
) -> None:
    steps = 20 + 10 * kills
    train(forker, tmp_path / "quiet", steps, 0, 0)
    train(forker, tmp_path / "killed", steps, kills, int(os.environ.get("SEED", "1")))
    quiet, killed = (read_values(tmp_path / name / "saved") for name in ("quiet", "killed"))
    assert quiet.dense.keys() == killed.dense.keys()
    assert quiet.sparse.keys() == killed.sparse.keys()
    assert 0 < len(quiet.sparse["slots.0.weight"].keys) <= 300 < len(quiet.sparse["slots.2.weight"].keys)
    assert all(torch.equal(quiet.dense[name], killed.dense[name]) for name in quiet.dense)
    for name, table in quiet.sparse.items():
        assert torch.equal(table.keys, killed.sparse[name].keys)
        assert torch.equal(table.values, killed.sparse[name].values)
    for rank in (0, 1):
        left, right = (torch.load(tmp_path / name / f"model.{rank}.pt") for name in ("quiet", "killed"))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def counting(folder: Path, steps: int, durability: str, **options: object) -> list[str]:
    """A command that counts. `ps` among the options adds to the job's ps_configs."""
    ps = {"durability": durability, "durability_dir": f"{folder}/kept", "snapshot_interval_s": 0.4}
    given = options.pop("ps", {})
    assert isinstance(given, dict)
    text = json.dumps({"folder": str(folder), "steps": steps, "ps": ps | given, **options})
    return ["-m", "tests.support.scripts.ps_counting", text]


def counts_of(trainer: Process) -> list[float]:
    """What the rows of this trainer, then the rows of all, ended with."""
    (line,) = [line for line in trainer.output.splitlines() if line.startswith("values ")]
    return [float(word) for word in line.split()[1:]]


def expect_exact(job: Job, steps: int) -> None:
    for trainer in job.trainers:
        assert counts_of(trainer) == [steps] * 4 + [steps * len(job.trainers)] * 4


@pytest.mark.parametrize(
    ("roles", "options"),
    [
        ((Role.SERVER,), {"prefetch": True}),
        ((Role.SERVER, Role.TRAINER), {"asynchronous": {"overlap": False}, "ps": {"max_rows": 4}}),
    ],
)
def test_async_with_a_log_counts_every_push_exactly_once(
    forker: Forker, tmp_path: Path, roles: tuple[Role, ...], options: dict[str, dict[str, object]]
) -> None:
    """Also where most rows are on a disk at any time."""
    if "ps" in options:
        options["ps"]["disk_dir"] = str(tmp_path)
    kills = max(2, KILLS // 3)
    steps = 40 + 40 * kills
    command = counting(tmp_path, steps, "log", pause_ms=8, limited=True, many=True, **options)
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(command)
        kill_one_by_one(
            job, command, tmp_path / "step_limit", steps, kills, seed=5, word="pushed", roles=roles
        )
        job.expect_success(250 + kills)
        expect_exact(job, steps)


def held(job: Job, command: list[str]) -> None:
    """Start everybody; until all trainers have stopped at the step to hold at, with all pushes on servers."""
    job.start_all(command)
    for trainer in job.trainers:
        trainer.wait_for("held")


def test_async_with_snapshots_goes_on_from_one(forker: Forker, tmp_path: Path) -> None:
    command = counting(tmp_path, 20, "snapshot", hold=10)
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, command)
        kept = tmp_path / "kept" / "server-0"
        first = complete(kept)
        wait_until(lambda: complete(kept) - first, job)  # begun before all was pushed, perhaps
        second = complete(kept)
        wait_until(lambda: complete(kept) - first - second, job)
        job.servers[0].kill()
        restart(job, job.servers[0], command)
        (tmp_path / "go").touch()
        job.expect_success()
        assert "recovered 1 tables" in job.servers[0].output
        expect_exact(job, 20)


def test_without_durability_the_trainers_learn_that_the_tables_are_gone(
    forker: Forker, tmp_path: Path
) -> None:
    command = counting(tmp_path, 20, "none", hold=10)
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, command)
        job.servers[0].kill()
        restart(job, job.servers[0], command)
        (tmp_path / "go").touch()
        for trainer in job.trainers:
            assert trainer.wait() == 1
            assert "ServerError: server 0 at 127.0.0.1:" in trainer.output
            assert "this server restarted without its tables" in trainer.output


@pytest.mark.parametrize("sync", [True, False])
def test_a_whole_job_that_was_killed_goes_on_in_its_folder(
    forker: Forker, tmp_path: Path, sync: bool
) -> None:
    command = counting(tmp_path, 20, "log", sync=sync, hold=10, asynchronous={"overlap": False})
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        held(job, command)
        for process in job.processes:
            process.kill()
        for process in job.processes:
            process.wait()
    (tmp_path / "go").touch()
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(command)
        job.expect_success()
        for trainer in job.trainers:
            assert "resumed at 10\n" in trainer.output
        if sync:  # the mean over trainers: only one of them adds to a row of its own
            assert all(counts_of(trainer) == [10.0] * 4 + [20.0] * 4 for trainer in job.trainers)
        else:
            expect_exact(job, 20)
    assert list((tmp_path / "kept").iterdir()) == []


def test_the_folder_of_another_job_is_refused_by_name(forker: Forker, tmp_path: Path) -> None:
    command = counting(tmp_path, 20, "log", hold=10)
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, command)
        for process in job.processes:
            process.kill()
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        server = job.start(counting(tmp_path, 20, "log", sync=True), Role.SERVER, 0)
        assert server.wait() == 1
        assert f"{tmp_path}/kept/server-0 belongs to server 0 of the job" in server.output
        assert "Choose another durability_dir" in server.output
