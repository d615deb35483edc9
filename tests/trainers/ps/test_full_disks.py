"""Servers that find no room for what they keep."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forking import Forker
from tests.support.snapshots import complete
from tests.trainers.ps.test_recovery import counting, expect_exact, held, steps_said, wait_until

pytestmark = pytest.mark.slow


def test_a_full_disk_refuses_pushes_and_loses_none_that_counted(forker: Forker, tmp_path: Path) -> None:
    options = {"ps": {"snapshot_interval_s": 300.0}, "asynchronous": {"overlap": False}}
    small = counting(tmp_path, 2000, "log", file_bytes=60_000, **options)
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        job.start_all(small)
        acknowledged = []
        for trainer in job.trainers:
            assert trainer.wait() == 1
            assert "refused PUSH (FAILED)" in trainer.output
            assert f"{tmp_path}/kept/server-0/journal-" in trainer.output
            assert "Free some space" in trainer.output
            acknowledged.append(steps_said(trainer, "pushed") + 1)
        assert sum(acknowledged) > 100, "the disk was full before anything was said"
        for server in job.servers:
            assert server.popen.poll() is None, server.output
            server.kill()
            server.wait()
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        job.start_all(counting(tmp_path, 2000, "log", pause_ms=0, **options))
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
    """Take what room there is left, if any."""
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)


def test_a_server_without_room_for_a_snapshot_goes_on(
    forker: Forker, tmp_path: Path, tiny_disk: Path
) -> None:
    """Until the log is full too; and when there is room again it makes a snapshot and takes pushes. Whatever
    a snapshot leaves behind that was being written is taken from the next one.
    """
    command = counting(tmp_path, 60, "log", hold=3, ps={"snapshot_interval_s": 0.1})
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        held(job, command)
        filler = tiny_disk / "filler"
        (server,) = job.servers

        def failed(times: int) -> bool:
            fill(filler)
            return server.output.count("A snapshot failed") >= times

        wait_until(lambda: failed(1), job)
        assert "No space" in server.output
        wait_until(lambda: failed(3), job)
        filler.unlink()
        before = complete(tmp_path / "kept" / "server-0")
        wait_until(lambda: complete(tmp_path / "kept" / "server-0") - before, job)
        (tmp_path / "go").touch()
        job.expect_success()
        expect_exact(job, 60)
