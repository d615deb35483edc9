"""Log files: who may read them, how old ones go, how long ones stay short. On real file systems."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError, UsageError
from fleetrun.pod import logs
from fleetrun.pod.logs import Trimmer
from fleetrun.pod.spec import log_path
from tests.support.disks import no_file_longer_than
from tests.support.waiting import eventually

KEEP = 64 * 1024


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


# ---- making and opening


def test_a_log_is_for_its_owner_and_appended_to(tmp_path):
    path = tmp_path / "a.log"
    for text in (b"one\n", b"two\n"):
        fd = logs.open_log(path)
        os.write(fd, text)
        os.close(fd)
    assert path.read_bytes() == b"one\ntwo\n"
    assert mode_of(path) == 0o600


def test_a_log_is_not_written_through_a_link(tmp_path):
    """Somebody else's link in a shared folder would send the output where he wants it."""
    target = tmp_path / "target"
    target.touch()
    (tmp_path / "a.log").symlink_to(target)
    with pytest.raises(LaunchError, match="cannot open the log file"):
        logs.open_log(tmp_path / "a.log")
    assert target.read_bytes() == b""


def test_a_log_in_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(LaunchError, match="No such file or directory"):
        logs.open_log(tmp_path / "none" / "a.log")


@pytest.mark.parametrize("before", ["", "a line\n", "an unfinished line"])
def test_a_mark_is_a_line(tmp_path, before):
    path = tmp_path / "a.log"
    path.write_text(before)
    logs.mark(path, "restart 1 of trainer 0")
    *earlier, mark = path.read_text().splitlines()
    assert "\n".join(earlier) == before.rstrip("\n")
    assert mark.startswith("--- fleetrun: restart 1 of trainer 0, ")
    assert path.read_text().endswith(" ---\n")


def test_a_full_disk_does_not_stop_a_restart(tmp_path):
    (tmp_path / "log").touch()
    with no_file_longer_than(0):
        logs.mark(tmp_path / "log", "restart 1 of trainer 0")
    assert (tmp_path / "log").read_text() == ""


def test_folders_are_made_with_their_parents(tmp_path):
    logs.make_log_dir(tmp_path / "a" / "b")
    logs.make_log_dir(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_log_dir_that_is_a_file(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory") as caught:
        logs.make_log_dir(tmp_path / name)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("place", ["/proc/fleetrun", "/sys/fleetrun"])
def test_a_log_dir_that_cannot_be_made(place):
    with pytest.raises(UsageError, match="cannot be made"):
        logs.make_log_dir(Path(place))


def test_a_log_dir_that_cannot_be_written_to():
    with pytest.raises(UsageError, match="cannot be written to"):
        logs.make_log_dir(Path("/proc"))


def test_room_on_the_disk(tmp_path):
    assert not logs.is_full(tmp_path)
    assert not logs.is_full(tmp_path / "none")


def test_names():
    path = log_path(Path("/log"), "ads", "evjsyn", Role.SERVER, 3)
    assert path == Path("/log/ads.evjsyn.ps.3.log")


# ---- overwriting


def logs_of(folder, *names):
    for name in names:
        (folder / name).touch()


def test_only_the_logs_of_this_job_go(tmp_path):
    gone = ["job.abcdef.trainer.0.log", "job.abcdef.trainer.17.log", "job.zzzzzz.ps.0.log"]
    stay = [
        "job2.abcdef.trainer.0.log",
        "job.abcdef.other.0.log",
        "job.abcdef.trainer.0.txt",
        "job.trainer.0.log",
    ]
    logs_of(tmp_path, *gone, *stay)
    logs.remove_earlier(tmp_path, "job")
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(stay)


@pytest.mark.parametrize("job", ["j*b", "j?b", "[j]ob"])
def test_a_jobs_name_is_no_pattern(tmp_path, job):
    logs_of(tmp_path, f"{job}.abcdef.ps.0.log", "job.abcdef.ps.0.log")
    logs.remove_earlier(tmp_path, job)
    assert [each.name for each in tmp_path.iterdir()] == ["job.abcdef.ps.0.log"]


def test_what_a_process_still_writes_stays(tmp_path):
    """Another job of the same name, or a daemon of an earlier one."""
    path = tmp_path / "job.abcdef.trainer.0.log"
    output = logs.open_log(path)
    child = subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE, stdout=output)
    os.close(output)
    logs.remove_earlier(tmp_path, "job")
    assert path.exists()
    child.communicate(b"\n")
    logs.remove_earlier(tmp_path, "job")
    assert not path.exists()


# ---- latest


def test_latest_shows_the_newest_pod(tmp_path):
    for pod in ("aaaaaa", "bbbbbb"):
        log = tmp_path / f"job.{pod}.trainer.0.log"
        log.write_text(pod)
        logs.point_latest(tmp_path, pod, [("trainer.0", log)])
        assert (tmp_path / "latest" / "trainer.0.log").read_text() == pod
    assert sorted(each.name for each in tmp_path.glob(".latest*")) == [".latest.bbbbbb"], (
        "the old one is taken away"
    )


def test_a_moved_folder_keeps_its_latest(tmp_path):
    (tmp_path / "log").mkdir()
    log = tmp_path / "log" / "job.aaaaaa.ps.0.log"
    log.write_text("x")
    logs.point_latest(tmp_path / "log", "aaaaaa", [("ps.0", log)])
    (tmp_path / "log").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "latest" / "ps.0.log").read_text() == "x"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_something_else_of_that_name(tmp_path, kind):
    latest = tmp_path / "latest"
    if kind == "folder":
        latest.mkdir()
        (latest / "mine").touch()
    else:
        latest.touch()
    log = tmp_path / "job.aaaaaa.ps.0.log"
    log.touch()
    logs.point_latest(tmp_path, "aaaaaa", [("ps.0", log)])
    assert kind == "file" or (latest / "mine").exists()


# ---- bounded


@pytest.fixture(params=["disk", "/dev/shm"])
def folder(request, tmp_path):
    """A place on the disk, where blocks can be taken out, and one in memory, where holes can be punched."""
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir=request.param) as made:
            yield Path(made)


def on_disk(path):
    return path.stat().st_blocks * 512


def test_a_short_log_is_left_alone(folder):
    path = folder / "a.log"
    path.write_bytes(b"x" * 2 * KEEP)
    assert Trimmer(path, KEEP).trim() == 0
    assert path.read_bytes() == b"x" * 2 * KEEP


def test_of_a_long_log_the_newest_stays(folder):
    path = folder / "a.log"
    lines = b"".join(b"%07d\n" % number for number in range(100_000))
    path.write_bytes(lines)
    trimmer = Trimmer(path, KEEP)
    shorter = trimmer.trim()
    if not trimmer.supported:
        pytest.skip("this file system cannot take blocks out of a file")
    data = path.read_bytes()
    kept = data[trimmer.start :]
    assert len(data) == len(lines) - shorter
    assert lines.endswith(kept)
    assert KEEP <= len(kept) <= KEEP + 4096
    assert on_disk(path) <= KEEP + 2 * 4096
    assert trimmer.trimmed == len(lines) - len(kept)
    assert trimmer.trim() == 0, "nothing more to take"


@pytest.mark.slow
def test_again_and_again(folder):
    path = folder / "a.log"
    trimmer = Trimmer(path, KEEP)
    written = 0
    for _ in range(20):
        with path.open("ab") as file:
            for _ in range(10_000):
                written += file.write(b"%07d\n" % (written // 8))
        trimmer.trim()
        if not trimmer.supported:
            pytest.skip("this file system cannot take blocks out of a file")
        assert path.read_bytes().endswith(b"%07d\n" % (written // 8 - 1))
        assert on_disk(path) <= 2 * KEEP + 2 * 4096


WRITER = "import sys\nfor number in range(200_000):\n    print(f'{number:07}', flush=number % 100 == 0)"


@pytest.mark.slow
def test_while_a_process_writes_no_newest_line_is_lost(folder):
    """What is left is a run of numbered lines without a gap, up to the last."""
    path = folder / "a.log"
    output = logs.open_log(path)
    child = subprocess.Popen([sys.executable, "-c", WRITER], stdout=output)
    os.close(output)
    trimmer = Trimmer(path, KEEP)

    def trimmed_until_the_end():
        trimmer.trim()
        return child.poll() is not None

    eventually(trimmed_until_the_end, within=60)
    if not trimmer.supported:
        pytest.skip("this file system cannot take blocks out of a file")
    assert trimmer.trimmed > 0
    numbers = [int(line) for line in path.read_bytes()[trimmer.start :].split(b"\n")[1:-1]]
    assert numbers == list(range(numbers[0], 200_000))
    assert len(numbers) * 8 >= KEEP - 4096


def test_a_log_that_was_emptied_starts_over(folder):
    path = folder / "a.log"
    trimmer = Trimmer(path, KEEP)
    path.write_bytes(b"x" * 10 * KEEP)
    trimmer.trim()
    path.open("w").close()
    trimmer.trim()
    assert trimmer.start == 0


def test_a_log_that_was_deleted(folder):
    assert Trimmer(folder / "none", KEEP).trim() == 0


RAMFS = """
mount -t ramfs none "$1" || exit 77
exec "$2" -c '
import sys
from pathlib import Path
from fleetrun.pod.logs import Trimmer
path = Path(sys.argv[1], "a.log")
path.write_bytes(b"x" * 1_000_000)
trimmer = Trimmer(path, 1000)
assert trimmer.trim() == 0 and not trimmer.supported and path.stat().st_size == 1_000_000
' "$1"
"""


def test_where_the_file_system_cannot_the_log_is_whole_and_it_is_known(tmp_path):
    command = ["unshare", "-m", "sh", "-c", RAMFS, "sh", tmp_path, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip("this user may not mount anything")
    assert done.returncode == 0, done.stderr
