"""Readers that are slow, deaf or gone, and places where no log can be written."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Fleetrun
from tests.support.traces import wait_until

ONCE = ("--max_restart", "0")


def test_a_slow_reader_gets_every_line_though_the_job_is_over(fleetrun: Fleetrun):
    read, write = os.pipe()
    script = fleetrun.script("""
sys.stdout.writelines(f"line {number}\\n" for number in range(100_000))
tell("ready", os.getpid())
""")
    launch = fleetrun.start(script, stdout=write)
    os.close(write)
    (trainer,) = launch.until_ready(1)
    wait_until(lambda: not Path(f"/proc/{trainer}").exists())
    with os.fdopen(read) as reader:
        assert reader.read() == "".join(f"line {number}\n" for number in range(100_000))
    assert launch.wait() == 0


def test_a_reader_that_leaves_does_not_end_the_job(fleetrun: Fleetrun):
    """As with `| head -1`."""
    read, write = os.pipe()
    script = fleetrun.script("""
print("first", flush=True)
wait_for_go()
sys.stdout.writelines(f"line {number}\\n" for number in range(100_000))
""")
    launch = fleetrun.start("--nproc_per_node", "2", script, stdout=write)
    os.close(write)
    with os.fdopen(read) as reader:
        assert reader.readline() == "first\n"
    launch.go()
    assert launch.wait() == 0, launch
    assert fleetrun.log("trainer.0").endswith("line 99999\n")


def test_a_reader_of_both_outputs_that_leaves(fleetrun: Fleetrun):
    read, write = os.pipe()
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nprint('on')\nsys.exit(3)")
    launch = fleetrun.start(*ONCE, script, stdout=write, stderr=write)
    os.close(write)
    launch.until_ready(1)
    os.close(read)
    launch.go()
    assert launch.wait() == 3


def test_a_reader_that_never_reads_stops_neither_the_job_nor_the_watch_over_it(fleetrun: Fleetrun):
    read, write = os.pipe()
    script = fleetrun.script("""
leave_on_term()
if RANK == 0:
    for _ in range(100):
        os.write(1, b"x" * 99_999 + b"\\n")
    stay()
tell("ready", os.getpid())
wait_for_go()
os._exit(3)
""")
    launch = fleetrun.start(*ONCE, "--nproc_per_node", "2", script, stdout=write)
    os.close(write)
    launch.until_ready(2)
    launch.go()
    launch.until_told("trainer.0 got SIGTERM")
    launch.send(signal.SIGTERM)  # it still waits for its reader
    assert launch.wait() == 3
    os.close(read)
    assert Path(fleetrun.logs("*.trainer.0.log")[0]).stat().st_size == 10_000_000


def test_a_stderr_that_nobody_reads_stops_nothing(fleetrun: Fleetrun):
    read, write = os.pipe()
    os.set_blocking(write, False)
    while True:  # fill it
        try:
            os.write(write, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    script = fleetrun.script("leave_on_term()\nif ATTEMPT < 2: sys.exit(3)\nstay()")
    launch = fleetrun.start("--log_level", "debug", script, stderr=write)
    os.close(write)
    launch.until_ready(1)
    launch.send(signal.SIGTERM)
    launch.until_told("got SIGTERM")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    os.close(read)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(fleetrun: Fleetrun, closed: str):
    script = fleetrun.script("print('on'); tell('here'); sys.exit(3)")
    launch = fleetrun.run(*ONCE, script, prefix=("sh", "-c", f'exec "$@" {closed}', "sh"))
    assert launch.code == 3
    assert launch.told("here")
    assert fleetrun.log("trainer.0") == "on\n"


def test_a_log_directory_that_is_a_file(fleetrun: Fleetrun):
    (fleetrun.folder / "taken").write_text("mine")
    launch = fleetrun.run("--log_dir", "taken", fleetrun.script("tell('here')"))
    assert launch.code == 2
    assert "fleetrun: error: --log_dir taken" in launch.err
    assert not launch.told("here")
    assert (fleetrun.folder / "taken").read_text() == "mine"


def test_a_log_directory_that_cannot_be_written_to(as_nobody: Fleetrun):
    (as_nobody.folder / "log").mkdir(mode=0o755)
    for where in ("log", "log/new"):
        launch = as_nobody.run("--log_dir", where, as_nobody.script("tell('here')"))
        assert launch.code == 2, launch
        assert f"--log_dir {where}" in launch.err
        assert "ermission denied" in launch.err
        assert not launch.told("here")


def test_a_read_only_working_directory(as_nobody: Fleetrun):
    """A container may have one; where no --log_dir was named the job runs."""
    script = as_nobody.script("print('on'); tell('here')")
    as_nobody.folder.chmod(0o555)
    launch = as_nobody.run(*ONCE, script)
    assert launch.code == 0, launch
    named = re.search(r"the logs are in (\S+);", launch.said)
    assert named is not None, launch
    folder = Path(named[1])
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        (log,) = folder.glob("*.trainer.0.log")
        assert log.read_text() == "on\n"
    finally:
        shutil.rmtree(folder)


def test_it_works_without_root(as_nobody: Fleetrun):
    """No cgroup can be made then; daemons are found nevertheless."""
    script = as_nobody.script("""
helper("ignore(signal.SIGTERM)\\nstay()", start_new_session=True)
stay()
""")
    launch = as_nobody.start("--nproc_per_node", "2", script)
    launch.until_ready(4)
    launch.send(signal.SIGKILL)
    launch.wait()
    launch.gone()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(where)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a file system here")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def test_on_a_full_disk_the_job_goes_on_and_that_is_said(fleetrun: Fleetrun, small_disk: Path):
    (small_disk / "filler").write_bytes(b"x" * 64 * 1024)
    launch = fleetrun.run("--log_dir", str(small_disk), fleetrun.script("tell('here')"))
    assert launch.code == 0, launch
    assert f"disk of {small_disk}" in launch.err
    assert launch.told("here")


def test_a_disk_that_fills_up_is_named_in_the_report(fleetrun: Fleetrun, small_disk: Path):
    script = fleetrun.script("for _ in range(10_000): print('x' * 100, flush=True)")
    launch = fleetrun.run(*ONCE, "--log_dir", str(small_disk), "--follow", "none", script)
    assert launch.code == 1
    assert f"disk of {small_disk}" in launch.said.partition("Hint: ")[2], launch


def test_a_disk_without_room_for_another_file(fleetrun: Fleetrun, small_disk: Path):
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", str(small_disk)], check=True)
    launch = fleetrun.run(
        "--log_dir", str(small_disk), "--nproc_per_node", "8", fleetrun.script("tell('here')")
    )
    assert launch.code == 125, launch
    assert "log file" in launch.err
    assert "inodes" in launch.err
    assert not launch.told("here")


def test_a_read_only_disk(fleetrun: Fleetrun, small_disk: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    launch = fleetrun.run("--log_dir", str(small_disk), fleetrun.script("tell('here')"))
    assert launch.code == 2, launch
    assert "Read-only file system" in launch.err
    assert not launch.told("here")
