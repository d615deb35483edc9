"""Jobs of real processes that go on with another number of trainers over the same durability_dir."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fleetrun.envs.contract import Role
from tests.support.cluster import Job
from tests.support.forking import Forker
from tests.support.snapshots import complete
from tests.trainers.ps.test_recovery import counting, counts_of, held, restart, wait_until
from trainers.ps.durable.journal import FILE_HEAD, BadRecordError, journal_files, read_file_head, read_record
from trainers.ps.wire import Kind, decode

pytestmark = pytest.mark.slow

HELD, STEPS = 10, 40
KILLS = int(os.environ.get("KILLS", "5")) // 2


def kill_all(job: Job) -> None:
    for process in job.processes:
        process.kill()
    for process in job.processes:
        assert process.wait() == -signal.SIGKILL, process.output


def begin(forker: Forker, folder: Path, trainers: int, command: list[str]) -> None:
    """Train up to the step to hold at, and kill everybody there."""
    folder.mkdir()
    with forker.job(folder, trainers=trainers, servers=2) as job:
        held(job, command)
        kill_all(job)


def kill_servers(job: Job, command: list[str], rng: random.Random) -> None:
    """Anywhere on their way to being servers of another number of trainers, and behind it."""
    for rank in range(2):
        job.start(command, Role.SERVER, rank)
    for number in range(KILLS):
        server = rng.choice(job.servers)
        if number % 2:
            server.wait_for("running server")
        else:
            time.sleep(rng.uniform(0, 0.15))
        server.kill()
        restart(job, server, command)


MODES: dict[str, dict[str, int]] = {"sync": {}, "async": {"overlap": False}, "geo": {"k_steps": 1}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("former", "trainers"), [(2, 3), (3, 2), (3, 1)])
def test_another_number_of_trainers_goes_on(
    forker: Forker, tmp_path: Path, mode: str, former: int, trainers: int
) -> None:
    folder = tmp_path / "job"
    command = counting(
        folder,
        STEPS,
        "log",
        sync=mode == "sync",
        hold=HELD,
        hold_ranks=list(range(former)),
        asynchronous=MODES[mode],
    )
    begin(forker, folder, former, command)
    (folder / "go").touch()
    resumed = HELD * former // trainers
    with forker.job(folder, trainers=trainers, servers=2) as job:
        kill_servers(job, command, random.Random(former * trainers))
        for rank in range(trainers):
            job.start(command, Role.TRAINER, rank)
        job.expect_success()
        more = STEPS - resumed
        for trainer in job.trainers:
            assert f"resumed at {resumed}\n" in trainer.output
            before = HELD if trainer.member.rank < former else 0
            if mode == "async":
                own, shared = before + more, HELD * former + more * trainers
            else:  # the mean over trainers: only one of them adds to a row of its own
                own, shared = before / former + more / trainers, HELD + more
            assert counts_of(trainer) == pytest.approx([own] * 4 + [shared] * 4, rel=1e-5)
    assert list((folder / "kept").iterdir()) == [], "the job is over: nothing needs to be kept"


def pushes_in(folder: Path, step: int) -> int:
    """How many pushes of this step are in the servers' logs."""
    found = 0
    for _, path in [file for server in (folder / "kept").iterdir() for file in journal_files(server)]:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # of before a snapshot
            number, salt = read_file_head(file.read(FILE_HEAD))
            at = FILE_HEAD
            with contextlib.suppress(BadRecordError):  # at the end
                while True:
                    record = read_record(file, at, path.stat().st_size - at, number, salt)
                    message = decode(record.frames)
                    found += message.kind is Kind.PUSH and message.number == step
                    at, number = record.end, number + 1
    return found


def test_a_step_that_one_trainer_had_not_pushed_is_done_by_others(forker: Forker, tmp_path: Path) -> None:
    """Of three trainers one holds before it pushes step 10; on both servers the others' pushes wait."""
    folder = tmp_path / "job"
    options = {"snapshot_interval_s": 300.0}
    # The first snapshot takes its place in the log at once, but on a busy machine perhaps after all pushes.
    holding = {"hold": HELD, "hold_ranks": [2], "after_snapshots": 2}
    command = counting(folder, STEPS, "log", sync=True, ps=options, **holding)
    folder.mkdir()

    with forker.job(folder, trainers=3, servers=2) as job:
        job.start_all(command)
        job.trainers[2].wait_for("held")
        wait_until(lambda: pushes_in(folder, HELD) == 4, job)
        kill_all(job)
    (folder / "go").touch()
    with forker.job(folder, trainers=1, servers=2) as job:
        job.start_all(command)
        job.expect_success()
        (trainer,) = job.trainers
        assert "resumed at 30\n" in trainer.output
        more = STEPS - 30
        assert counts_of(trainer) == pytest.approx([HELD / 3 + more] * 4 + [HELD + more] * 4, rel=1e-5)


def test_snapshots_go_on_with_fewer_trainers(forker: Forker, tmp_path: Path) -> None:
    """Both servers have all pushes in their snapshots."""
    folder = tmp_path / "job"
    command = counting(folder, STEPS, "snapshot", hold=HELD, asynchronous={"overlap": False})
    folder.mkdir()

    def snapshots() -> list[set[str]]:
        return [complete(folder / "kept" / f"server-{server}") for server in (0, 1)]

    with forker.job(folder, trainers=2, servers=2) as job:
        held(job, command)
        for _ in range(2):  # the second begins after all pushes
            seen = snapshots()
            wait_until(lambda seen=seen: all(map(set.__sub__, snapshots(), seen)), job)
        kill_all(job)
    (folder / "go").touch()
    with forker.job(folder, trainers=1, servers=2) as job:
        job.start_all(command)
        job.expect_success()
        (trainer,) = job.trainers
        assert f"resumed at {2 * HELD}\n" in trainer.output
        more = STEPS - 2 * HELD
        assert counts_of(trainer) == [HELD + more] * 4 + [2 * HELD + more] * 4


def test_a_trainer_of_the_former_job_that_comes_back_is_refused(forker: Forker, tmp_path: Path) -> None:
    """Its machine was cut off: it still has its connection, and a push for the same endpoint."""
    former = counting(tmp_path, STEPS, "log", hold=HELD, asynchronous={"overlap": False})
    kept = {"durability_dir": f"{tmp_path}/kept"}
    later = tmp_path / "later"
    later.mkdir()
    new = counting(later, 2 * HELD + 5, "log", hold=2 * HELD, ps=kept, asynchronous={"overlap": False})
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, former)
        cut_off = job.trainers[1]
        cut_off.stop()
        job.processes.remove(cut_off)
        kill_all(job)
        job.processes.clear()
        job.cluster = replace(job.cluster, trainers=job.cluster.trainers[:1])
        job.start_all(new)
        (trainer,) = job.trainers
        trainer.wait_for("held")
        (tmp_path / "go").touch()
        cut_off.go_on()
        assert cut_off.wait() == 1
        assert "UNKNOWN_CLIENT" in cut_off.output
        (later / "go").touch()
        job.expect_success()
        assert f"resumed at {2 * HELD}\n" in trainer.output
        assert counts_of(trainer) == [HELD + 5] * 4 + [2 * HELD + 5] * 4


def test_a_trainer_of_another_start_with_as_many_trainers_does_not_get_in(
    forker: Forker, tmp_path: Path
) -> None:
    command = counting(tmp_path, STEPS, "log", hold=HELD, asynchronous={"overlap": False})
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, command)
        mine = job.cluster
        job.cluster = replace(mine, trainers=(mine.trainers[0], mine.master))
        stranger = job.start(command, Role.TRAINER, 1, restart_count=3)
        assert stranger.wait() == 1
        assert "refused HELLO (MISMATCH)" in stranger.output
        job.processes.remove(stranger)
        (tmp_path / "go").touch()
        job.expect_success()
        assert all(counts_of(each) == [STEPS] * 4 + [2 * STEPS] * 4 for each in job.trainers)
