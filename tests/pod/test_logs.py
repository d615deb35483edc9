"""Log files: names, earlier runs, bounds, and how the console follows them."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError, UsageError
from fleetrun.pod import logs
from fleetrun.pod.guard import Signals
from fleetrun.pod.logs import Follower, Trimmer, Watch
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import log_path
from tests.support.disks import no_file_longer_than
from tests.support.waiting import eventually

# ---- Log files: who may read them, how old ones go, how long ones stay short. On real file systems.

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
    with pytest.raises(UsageError, match="cannot be created"):
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
        pytest.skip("this file system cannot remove blocks from a file")
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
            pytest.skip("this file system cannot remove blocks from a file")
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
        pytest.skip("this file system cannot remove blocks from a file")
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


# ---- Following files that real processes write: whole lines, all of them, however they come.

PIECE = 256 * 1024


class Followed:
    """A follower of a file, and what it emitted."""

    def __init__(self, path):
        self.path = path
        self.emitted = []
        self.follower = Follower(path, self.emitted.append)

    def write(self, data):
        with self.path.open("ab") as file:
            file.write(data)

    def pump_all(self):
        while self.follower.pump():
            pass

    @property
    def text(self):
        return b"".join(self.emitted)


@pytest.fixture
def followed(tmp_path):
    made = Followed(tmp_path / "trainer.0.log")
    yield made
    made.follower.close()


# ---- one file


def test_lines_are_handed_on_whole(followed):
    followed.write(b"one\ntwo\nth")
    followed.pump_all()
    assert followed.emitted == [b"one\ntwo\n"]
    followed.write(b"ree\n")
    followed.pump_all()
    assert followed.emitted == [b"one\ntwo\n", b"three\n"]


def test_what_stands_after_the_last_newline_comes_at_the_end(followed):
    followed.write(b"one\ntwo")
    followed.pump_all()
    followed.follower.finish()
    followed.follower.finish()
    assert followed.emitted == [b"one\n", b"two\n"]


def test_a_character_that_is_cut_is_put_together(followed):
    text = "训练失败\n".encode()
    for byte in text:
        followed.write(bytes([byte]))
        followed.pump_all()
    assert followed.emitted == [text]


def test_any_bytes(followed):
    data = bytes(range(256)) + b"\n"
    followed.write(data)
    followed.pump_all()
    assert followed.text == data


@pytest.mark.parametrize("size", [64 * 1024 - 1, 64 * 1024 + 1, PIECE, 3 * PIECE + 7])
def test_a_line_may_be_long(followed, size):
    """Longer than 64 KiB it comes in pieces; no byte of it is lost."""
    followed.write(b"before\n" + b"x" * size + b"\nafter\n")
    followed.pump_all()
    followed.follower.finish()
    assert followed.text.replace(b"\n", b"") == b"before" + b"x" * size + b"after"
    assert followed.text.startswith(b"before\nx")
    assert followed.text.endswith(b"x\nafter\n")
    assert followed.text.count(b"\n") == 3 or size > 64 * 1024


def test_a_long_line_without_its_end_is_shown_before_it_ends(followed):
    followed.write(b"x" * 100_000)
    followed.pump_all()
    assert followed.text == b"x" * 100_000 + b"\n"


def test_a_full_piece_tells_that_there_is_more(followed):
    followed.write(b"0123456\n" * (PIECE // 8) + b"rest\n")
    assert followed.follower.pump() is True
    assert followed.follower.pump() is False
    assert followed.text.endswith(b"0123456\nrest\n")


def test_a_file_that_is_emptied_is_read_from_its_new_start(followed):
    followed.write(b"long line before\n")
    followed.pump_all()
    followed.path.open("w").close()
    for text in (b"new\n", b"newer\n", b"newest of all\n"):
        followed.write(text)
        followed.pump_all()
    assert followed.emitted == [b"long line before\n", b"new\n", b"newer\n", b"newest of all\n"]


def test_a_file_may_come_later(followed):
    assert followed.follower.pump() is False
    followed.write(b"now\n")
    followed.pump_all()
    assert followed.text == b"now\n"


def test_a_pipe_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log")
    assert not Follower(tmp_path / "log", print).pump()
    assert not Trimmer(tmp_path / "log", 4096).trim()


def test_a_head_that_was_taken_off_moves_the_place(followed):
    followed.write(b"a" * 4095 + b"\nb\n")
    followed.pump_all()
    followed.path.write_bytes(b"b\nc\n")
    followed.follower.shortened(4096, 0)
    followed.pump_all()
    assert followed.emitted[1:] == [b"c\n"]


def test_lines_that_were_taken_off_unread_are_not_mixed_with_later_ones(followed):
    followed.write(b"begun")
    followed.pump_all()
    followed.path.write_bytes(b"\0" * 10 + b"later\n")
    followed.follower.shortened(0, 10)
    followed.pump_all()
    assert followed.text == b"... 10 bytes were rotated away before they could be read\nlater\n"
    followed.write(b"on\n")
    followed.pump_all()
    assert followed.text.endswith(b"\nlater\non\n"), "told once"


# ---- many files, as they are written


class Watched:
    """A loop with a watch, woken by SIGIO as in the launcher; it stops when `enough` says so."""

    def __init__(self, folder, **options):
        self.folder = folder
        self.has_room = True
        self.loop = Loop()
        self.signals = Signals({signal.SIGIO})
        self.watch = Watch(self.loop, folder, lambda: self.has_room, **options)
        self.loop.add(self.signals.fileno(), self._signalled)
        self.text = {}
        self.woken = 0
        self._enough = lambda: False

    def follow(self, name):
        self.text[name] = b""
        path = self.folder / name
        path.touch()
        self.watch.follow(path, lambda lines: self._emitted(name, lines))

    def until(self, enough):
        self._enough = enough

        def too_long():
            raise AssertionError(
                f"not within 100 s; { ({name: len(text) for name, text in self.text.items()}) }"
            )

        bound = self.loop.after(100.0, too_long)
        if not enough():
            self.loop.run()
        bound.cancel()

    def close(self):
        self.signals.close()
        self.loop.close()

    def _signalled(self):
        self.signals.read()
        self.woken += 1
        self.watch.handle_write()

    def _emitted(self, name, lines):
        assert lines.endswith(b"\n")
        self.text[name] += lines
        if self._enough():
            self.loop.stop()


@pytest.fixture
def watched(tmp_path):
    made = []

    def make(**options):
        made.append(Watched(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def writer(path, code):
    with path.open("ab") as output:
        return subprocess.Popen([sys.executable, "-c", code], stdout=output, stdin=subprocess.PIPE)


def test_a_write_wakes_the_watch(watched):
    seen = watched()
    seen.follow("a.log")
    seen.watch.start()
    child = writer(seen.folder / "a.log", "import sys; sys.stdin.read(1); print('late')")
    seen.loop.after(0, lambda: (child.stdin.write(b"x"), child.stdin.flush()))
    seen.until(lambda: seen.text["a.log"] == b"late\n")
    assert seen.woken >= 1
    child.communicate()


def test_what_was_there_before_comes_too(watched):
    seen = watched()
    seen.follow("a.log")
    (seen.folder / "a.log").write_bytes(b"early\n")
    seen.watch.start()
    assert seen.text["a.log"] == b"early\n"


@pytest.mark.slow
def test_of_a_flood_nothing_is_lost_and_nothing_comes_twice(watched):
    """100,000 numbered lines in each of two files, as fast as they can be written."""
    seen = watched()
    for name in ("a.log", "b.log"):
        seen.follow(name)
    seen.watch.start()
    children = [writer(seen.folder / name, "for i in range(100_000): print(i)") for name in seen.text]
    last = b"\n99999\n"
    seen.until(lambda: all(text.endswith(last) for text in seen.text.values()))
    expected = "".join(f"{i}\n" for i in range(100_000)).encode()
    assert all(text == expected for text in seen.text.values())
    assert seen.woken < 10_000, "a wake-up per line"
    for child in children:
        child.communicate()


@pytest.mark.slow
def test_without_room_nothing_is_read_until_there_is(watched):
    seen = watched()
    seen.follow("a.log")
    seen.watch.start()
    seen.has_room = False
    child = writer(seen.folder / "a.log", "for i in range(50_000): print(i)")
    child.communicate()
    seen.loop.after(0.0, seen.loop.stop)
    seen.loop.run()
    assert seen.text["a.log"] == b""
    seen.has_room = True
    seen.loop.after(0.0, seen.watch.go_on)
    seen.until(lambda: seen.text["a.log"].endswith(b"\n49999\n"))
    assert seen.text["a.log"].count(b"\n") == 50_000


def test_at_the_end_all_that_is_left_is_handed_on(watched):
    seen = watched()
    seen.follow("a.log")
    seen.follow("b.log")
    seen.watch.start()
    (seen.folder / "a.log").write_bytes(b"x\n" * 500_000 + b"no newline")
    (seen.folder / "b.log").write_bytes(b"b\n")
    flushes = []

    def flush():
        flushes.append(len(seen.text["a.log"]))
        seen.has_room = True

    seen.has_room = False
    seen.watch.drain(flush)
    assert seen.text == {"a.log": b"x\n" * 500_000 + b"no newline\n", "b.log": b"b\n"}
    assert flushes == [PIECE]


def test_catching_up_reads_what_there_is_so_far(watched):
    seen = watched()
    seen.follow("a.log")
    seen.watch.start()
    (seen.folder / "a.log").write_bytes(b"x\n" * 500_000 + b"half")
    seen.watch.catch_up()
    assert seen.text["a.log"] == b"x\n" * 500_000


def test_where_the_kernel_does_not_tell_a_timer_looks(watched):
    seen = watched(ask=lambda directory: False)
    seen.follow("a.log")
    seen.watch.start()
    seen.loop.after(0, lambda: (seen.folder / "a.log").write_bytes(b"late\n"))
    seen.until(lambda: seen.text["a.log"] == b"late\n")
    assert seen.woken == 0


def test_no_write_falls_between_asking_and_looking(watched):
    """It asks first: a write just after the look would otherwise be told to nobody."""
    seen = watched(ask=lambda directory: (seen.folder / "a.log").write_bytes(b"just now\n"))
    seen.follow("a.log")
    seen.watch.start()
    assert seen.text["a.log"] == b"just now\n"


def test_nothing_to_watch_asks_for_nothing(watched):
    asked = []
    seen = watched(ask=asked.append)
    seen.watch.start()
    assert asked == []


@pytest.mark.slow
def test_a_log_is_followed_and_bounded_at_once(watched):
    """Read as fast as it is trimmed: all lines come, and the file stays small."""
    seen = watched()
    path = seen.folder / "a.log"
    seen.follow("a.log")
    seen.watch.bound(path, 64 * 1024)
    seen.watch.start()
    code = "import sys\nfor i in range(20_000):\n    print(f'{i:050}')\n    i % 1000 or sys.stdout.flush()"
    child = writer(path, code)
    seen.until(lambda: seen.text["a.log"].endswith(b"19999\n"))
    child.communicate()
    lines = seen.text["a.log"].split()
    numbers = [int(line) for line in lines if len(line) == 50]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 19_999
    assert seen.watch.unbounded == []
    Trimmer(path, 64 * 1024).trim()
    assert path.stat().st_blocks * 512 <= 3 * 64 * 1024


def test_what_is_taken_off_the_head_is_told(watched):
    cuts = []
    seen = watched(cut=lambda path, by: cuts.append((path.name, by)))
    path = seen.folder / "a.log"
    path.write_bytes(b"x" * 300_000)
    seen.watch.bound(path, 64 * 1024)
    seen.watch.start()
    assert sum(by for _, by in cuts) == 300_000 - path.stat().st_size
    assert {name for name, _ in cuts} <= {"a.log"}


@pytest.mark.slow
def test_a_log_is_bounded_though_nobody_reads_the_console(watched):
    seen = watched()
    path = seen.folder / "a.log"
    seen.follow("a.log")
    seen.watch.bound(path, 64 * 1024)
    seen.watch.start()
    seen.has_room = False
    child = writer(path, "for i in range(40_000): print(f'{i:050}')")
    trimmed = seen.watch._trimmers[path]
    seen.loop.after(0.0, lambda: look_until(seen, child, trimmed))
    seen.loop.run()
    child.communicate()
    assert trimmed.trimmed > 1 << 20
    assert seen.text["a.log"] == b""


def look_until(seen, child, trimmer):
    """Stop the loop once the writer has ended and its output has been cut."""
    if child.poll() is not None and trimmer.trimmed > 1 << 20:
        seen.loop.stop()
    else:
        seen.loop.after(0.01, lambda: look_until(seen, child, trimmer))
