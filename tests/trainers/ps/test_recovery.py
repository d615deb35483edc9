"""Servers and trainers that are killed and come back: what is promised by each durability."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fleetrun.envs.contract import Role
from tests.support.cluster import Job, Process
from tests.support.forking import Forker
from trainers.ps import read_values

KILLS = int(os.environ.get("KILLS", "8"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 + 5 * KILLS)]


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
    job: Job, command: list[str], kills: int, seed: int, word: str, roles: tuple[Role, ...]
) -> None:
    """Each time the trainers have gone on since the last kill, somebody of `roles` dies."""
    rng = random.Random(seed)
    for _ in range(kills):
        reached = {process.member.rank: steps_said(process, word) for process in job.trainers}
        further = rng.randrange(1, 4)

        def all_went_on(reached: dict[int, int] = reached, further: int = further) -> bool:
            return all(
                steps_said(process, word) >= reached[process.member.rank] + further
                for process in job.trainers
            )

        wait_until(all_went_on, job)
        time.sleep(rng.uniform(0, 0.02))  # anywhere within a step
        victim = rng.choice([process for process in job.processes if process.member.role in roles])
        assert in_training(victim, word)
        assert victim.popen.poll() is None, "the training was over before the kills: give it more steps"
        victim.kill()
        restart(job, victim, command)


def train(forker: Forker, folder: Path, steps: int, kills: int, seed: int) -> None:
    """Two servers and two trainers in step, with durability "log"."""
    command = ["-m", "tests.support.scripts.ps_recovery", str(folder), "sync", "log", str(steps), "10"]
    folder.mkdir()
    with forker.job(folder, trainers=2, servers=2) as job:
        job.start_all(command)
        kill_one_by_one(job, command, kills, seed, "step", (Role.SERVER, Role.TRAINER))
        job.expect_success(100 + kills)
    assert list((folder / "kept").iterdir()) == [], "the job is over: nothing needs to be kept"


def test_sync_training_with_kills_is_bit_for_bit_training_without(forker: Forker, tmp_path: Path) -> None:
    steps = 20 + 10 * KILLS
    train(forker, tmp_path / "quiet", steps, 0, 0)
    train(forker, tmp_path / "killed", steps, KILLS, int(os.environ.get("SEED", "1")))
    quiet, killed = (read_values(tmp_path / name / "saved") for name in ("quiet", "killed"))
    assert quiet.dense.keys() == killed.dense.keys()
    assert quiet.sparse.keys() == killed.sparse.keys()
    assert all(torch.equal(quiet.dense[name], killed.dense[name]) for name in quiet.dense)
    for name, table in quiet.sparse.items():
        assert torch.equal(table.keys, killed.sparse[name].keys)
        assert torch.equal(table.values, killed.sparse[name].values)
    for rank in (0, 1):
        left, right = (torch.load(tmp_path / name / f"model.{rank}.pt") for name in ("quiet", "killed"))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def counting(folder: Path, steps: int, durability: str, **wishes: object) -> list[str]:
    """A command that counts. `ps` among the wishes adds to the job's ps_configs."""
    ps = {"durability": durability, "durability_dir": f"{folder}/kept", "snapshot_interval_s": 0.4}
    given = wishes.pop("ps", {})
    assert isinstance(given, dict)
    text = json.dumps({"folder": str(folder), "steps": steps, "ps": ps | given, **wishes})
    return ["-m", "tests.support.scripts.ps_counting", text]


def counts_of(trainer: Process) -> list[float]:
    """What the rows of this trainer, then the rows of all, ended with."""
    (line,) = [line for line in trainer.output.splitlines() if line.startswith("values ")]
    return [float(word) for word in line.split()[1:]]


def expect_exact(job: Job, steps: int) -> None:
    for trainer in job.trainers:
        assert counts_of(trainer) == [steps] * 4 + [steps * len(job.trainers)] * 4


@pytest.mark.parametrize(
    ("roles", "wishes"),
    [
        ((Role.SERVER,), {"prefetch": True}),
        ((Role.SERVER, Role.TRAINER), {"asynchronous": {"overlap": False}}),
    ],
)
def test_async_with_a_log_counts_every_push_exactly_once(
    forker: Forker, tmp_path: Path, roles: tuple[Role, ...], wishes: dict[str, object]
) -> None:
    kills = max(2, KILLS // 3)
    steps = 40 + 40 * kills
    command = counting(tmp_path, steps, "log", pause_ms=8, **wishes)
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(command)
        kill_one_by_one(job, command, kills, 5, "pushed", roles)
        job.expect_success(100 + kills)
        expect_exact(job, steps)


def held(job: Job, command: list[str]) -> None:
    """Start everybody; until both trainers have stopped at the step to hold at."""
    job.start_all(command)
    for trainer in job.trainers:
        trainer.wait_for("held")


def snapshots(folder: Path) -> set[str]:
    """Names of complete snapshots of server 0."""
    return {path.parent.name for path in folder.glob("kept/server-0/snapshot-*/manifest.json")}


def test_async_with_snapshots_goes_on_from_one(forker: Forker, tmp_path: Path) -> None:
    command = counting(tmp_path, 20, "snapshot", hold=10)
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, command)
        first = snapshots(tmp_path)
        wait_until(lambda: snapshots(tmp_path) - first, job)  # begun before all that was pushed, perhaps
        second = snapshots(tmp_path)
        wait_until(lambda: snapshots(tmp_path) - first - second, job)
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
            assert "this server was restarted and its tables are gone" in trainer.output


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


def test_a_full_disk_refuses_pushes_and_loses_none_that_counted(forker: Forker, tmp_path: Path) -> None:
    wishes = {"ps": {"snapshot_interval_s": 300.0}, "asynchronous": {"overlap": False}}
    small = counting(tmp_path, 2000, "log", file_bytes=60_000, **wishes)
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        job.start_all(small)
        acknowledged = []
        for trainer in job.trainers:
            assert trainer.wait() == 1
            assert "refused PUSH (FAILED)" in trainer.output
            assert f"{tmp_path}/kept/server-0/journal-" in trainer.output
            assert "make room on that disk" in trainer.output
            acknowledged.append(steps_said(trainer, "pushed") + 1)
        assert sum(acknowledged) > 100, "the disk was full before anything was said"
        for server in job.servers:
            assert server.popen.poll() is None, server.output
            server.kill()
            server.wait()
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        job.start_all(counting(tmp_path, 2000, "log", pause_ms=0, **wishes))
        job.expect_success()
        for trainer, steps in zip(job.trainers, acknowledged, strict=True):
            assert f"resumed at {steps}\n" in trainer.output
        expect_exact(job, 2000)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 kB."""
    folder = tmp_path / "kept"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def test_a_server_without_room_for_a_snapshot_goes_on(
    forker: Forker, tmp_path: Path, tiny_disk: Path
) -> None:
    """Until the log is full too; and when there is room again it makes a snapshot and takes pushes."""
    command = counting(tmp_path, 60, "log", hold=3, ps={"snapshot_interval_s": 0.1})
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, command)
        filler = tiny_disk / "filler"
        with pytest.raises(OSError, match="No space"):
            fill(filler)
        (server,) = job.servers
        server.wait_for("a snapshot failed, the next one is tried in 0.1 s")
        there = server.output.count("a snapshot failed")
        wait_until(lambda: server.output.count("a snapshot failed") > there, job)
        filler.unlink()
        before = snapshots(tmp_path)
        wait_until(lambda: snapshots(tmp_path) - before, job)
        (tmp_path / "go").touch()
        job.expect_success()
        expect_exact(job, 60)
