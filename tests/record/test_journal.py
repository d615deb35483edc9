"""The journal on good and bad disks: whole lines, or none."""

import fcntl
import json
import math
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetrun.pod.logs import remove_earlier
from fleetrun.pod.loop import Timer
from fleetrun.record.history import read
from fleetrun.record.journal import REST, Journal, Marks, journal_path, marks_path
from fleetrun.record.log_lines import MarksReader


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process can become longer, as on a disk that is full: writes are cut off, then fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(journal_path(tmp_path, "job", "abcdef"), wall=lambda: 1000.0004)
    yield made
    made.close()


def test_an_event_is_a_line_that_its_owner_alone_can_read(journal: Journal):
    journal.write("started", container="trainer.0", pid=7)
    journal.write("over", code=0)
    assert journal.path.name == "job.abcdef.events.jsonl"
    assert [json.loads(line) for line in lines(journal.path)] == [
        {"time": 1000.0, "event": "started", "container": "trainer.0", "pid": 7},
        {"time": 1000.0, "event": "over", "code": 0},
    ]
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600


def test_a_listener_gets_what_is_written_from_then_on(journal: Journal):
    journal.write("launch")
    heard: list[dict[str, object]] = []
    journal.subscribe(heard.append)
    journal.write("over", code=3)
    assert heard == [{"time": 1000.0, "event": "over", "code": 3}]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        ({"loss": [-math.inf, 1.5]}, {"loss": ["-inf", 1.5]}),
        ("训练", "训练"),
        ("a\nb\u2028c", "a\nb\u2028c"),
        ("\udc80", "\udc80"),
        (Path("/log"), "/log"),
        (None, None),
    ],
)
def test_every_line_is_json(journal: Journal, value: object, written: object):
    journal.write("progress", value=value)
    (line,) = lines(journal.path)
    assert json.loads(line, parse_constant=pytest.fail)["value"] == written


def test_a_line_that_was_torn_off_spoils_no_other(journal: Journal):
    journal.write("launch", text="x" * 100)
    with room_for(journal.path.stat().st_size + 30):
        journal.write("started", text="lost")
        journal.write("exited", text="lost too")
    journal.write("over", code=1)
    history = read(journal.path)
    assert [event["event"] for event in history.events] == ["launch", "lost", "over"]
    assert history.events[1]["events"] == 2
    assert history.damaged == 1


def test_what_is_lost_is_heard_all_the_same(journal: Journal):
    heard: list[dict[str, object]] = []
    journal.subscribe(heard.append)
    with room_for(0):
        journal.write("started")
    assert [event["event"] for event in heard] == ["started"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "no folder", "device"])
def test_what_is_no_file_of_its_own_is_not_written(tmp_path: Path, kind: str):
    path = journal_path(tmp_path, "job", "abcdef")
    elsewhere = tmp_path / "elsewhere"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path = tmp_path / "none" / path.name
    journal = Journal(path)
    journal.write("launch")
    journal.close()
    assert not elsewhere.exists()


def test_overwriting_takes_the_records_of_launches_that_are_gone(tmp_path: Path):
    gone, runs, another = (
        Journal(journal_path(tmp_path, job, pod))
        for job, pod in (("job", "aaaaaa"), ("job", "bbbbbb"), ("other", "cccccc"))
    )
    gone.close()
    another.close()
    (tmp_path / "job.aaaaaa.marks").touch()
    remove_earlier(tmp_path, "job")
    assert sorted(tmp_path.iterdir()) == [runs.path, another.path]
    runs.close()


def test_a_closed_journal_writes_nothing(journal: Journal):
    journal.write("launch")
    journal.close()
    journal.close()
    journal.write("over")
    assert len(lines(journal.path)) == 1


def test_it_holds_the_lock_as_soon_as_a_reader_lets_go(tmp_path: Path):
    path = journal_path(tmp_path, "job", "abcdef")
    path.touch()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        journal = Journal(path)
        journal.write("launch")
    journal.write("ready")
    assert read(path).running is True
    journal.close()
    assert read(path).running is False


# ---- When logs had which size: noted when the kernel tells, at most once a second, and never without a
# cause.


class Timers:
    """A loop whose time passes when it is told to."""

    def __init__(self):
        self.now = 1000.0
        self.waiting = []

    def clock(self):
        return self.now

    def after(self, seconds, handler):
        timer = Timer(handler)
        self.waiting.append((self.now + seconds, timer))
        return timer

    @property
    def pending(self):
        return [when - self.now for when, timer in self.waiting if timer.pending]

    def next(self):
        """To the next deadline."""
        when, timer = min((each for each in self.waiting if each[1].pending), key=lambda each: each[0])
        self.now = when
        timer.fire()


class Marked:
    """Marks of two logs in a folder whose writes the test tells."""

    def __init__(self, folder):
        self.logs = {name: folder / f"{name}.log" for name in ("trainer.0", "trainer.1")}
        for path in self.logs.values():
            path.touch()
        self.path = marks_path(folder, "job", "abcdef")
        self.loop = Timers()
        self.asked = 0
        self.deaf = False
        self.marks = Marks(self.path, self.loop, wall=lambda: self.loop.now, ask=self.ask)

    def ask(self, folder):
        self.asked += not self.deaf
        return not self.deaf

    def write(self, name, data=b"line\n"):
        with self.logs[name].open("ab") as file:
            file.write(data)

    @property
    def lines(self):
        return self.path.read_text().splitlines() if self.path.exists() else []


@pytest.fixture
def marked(tmp_path):
    made = Marked(tmp_path)
    yield made
    made.marks.close()


def test_nothing_is_written_and_nothing_waits_while_nothing_happens(marked):
    marked.marks.start(marked.logs)
    assert (marked.lines, marked.loop.pending, marked.asked) == ([], [], 1)


def test_the_first_write_is_noted_at_once_and_the_next_a_moment_later(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.1")
    marked.marks.handle_write()
    assert marked.lines == ["# trainer.0 trainer.1", "rest 0.01", "1000.00 1:5"]
    marked.write("trainer.1")
    marked.write("trainer.0")
    marked.marks.handle_write()
    assert len(marked.lines) == 3, "within the moment"
    marked.loop.next()
    assert marked.lines[3:] == ["1000.01 0:5 1:10"]
    marked.loop.next()
    assert (marked.loop.pending, len(marked.lines)) == ([], 4), "and then it sleeps"


def test_logs_that_grow_without_end_are_noted_less_often_and_later_again_at_once(marked):
    marked.marks.start(marked.logs)
    began = marked.loop.now
    marked.write("trainer.0")
    marked.marks.handle_write()
    while marked.loop.now < began + 100:
        marked.write("trainer.0")
        marked.loop.next()
    count = sum(not line.startswith(("#", "rest")) for line in marked.lines)
    assert 100 < count < 100 + 100 * 11
    assert "rest 1" in marked.lines
    marked.loop.next()
    marked.loop.now += 60
    marked.write("trainer.1")
    marked.marks.handle_write()
    assert marked.lines[-1] == f"{marked.loop.now:.2f} 1:5"
    assert [line for line in marked.lines if line.startswith("rest")][-1] == "rest 0.01"


def test_who_else_writes_there_does_not_wake_us_without_end(marked):
    marked.marks.start(marked.logs)
    began, looks = marked.loop.now, 0
    while marked.loop.now < began + 100:
        marked.marks.handle_write()
        marked.loop.next()
        looks += 1
    assert looks < 200 + 21 * 100


def test_where_the_kernel_does_not_tell_it_looks_each_second(marked):
    marked.deaf = True
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.loop.next()
    assert marked.lines[1:] == ["rest 1", "1001.00 0:5"]
    while marked.loop.pending != [pytest.approx(REST)]:
        marked.loop.next()
    assert len(marked.lines) == 3


def test_the_end_of_a_process_is_noted_at_once(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.write("trainer.1")
    marked.marks.handle({"event": "exited", "container": "trainer.1"})
    marked.marks.handle({"event": "exited", "container": "nobody"})
    marked.marks.handle({"event": "started", "container": "trainer.0"})
    assert marked.lines[2:] == ["1000.00 1:5"]


def test_the_last_lines_are_noted_at_the_end(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.marks.close()
    marked.marks.close()
    marked.marks.handle_write()
    assert marked.lines[2:] == ["1000.00 0:5"]


def test_what_is_cut_off_the_head_is_noted(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.0", b"x" * 9000)
    marked.marks.handle_write()
    data = marked.logs["trainer.0"].read_bytes()
    marked.logs["trainer.0"].write_bytes(data[4096:])
    marked.marks.cut(marked.logs["trainer.0"], 4096)
    marked.marks.cut(Path("/another.log"), 4096)
    marked.loop.next()
    assert marked.lines[2:] == ["1000.00 0:9000", "1000.00 0-4096"]


def test_a_log_that_was_deleted_is_passed_over(marked):
    marked.marks.start(marked.logs)
    marked.logs["trainer.0"].unlink()
    marked.write("trainer.1")
    marked.marks.handle_write()
    assert marked.lines[2:] == ["1000.00 1:5"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "gone"])
def test_a_bad_place_for_the_notes_harms_nothing(marked, kind):
    if kind == "fifo":
        os.mkfifo(marked.path)
    elif kind == "folder":
        marked.path.mkdir()
    else:
        marked.marks = Marks(marked.path.parent / "none" / "x.marks", marked.loop)
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.marks.handle_write()
    marked.marks.close()


def test_the_rest_grows_with_the_file(tmp_path):
    marked = Marked(tmp_path)
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.marks.handle_write()
    marked.marks._file.written = 20 << 20
    while "rest 4" not in marked.lines:
        marked.write("trainer.0")
        marked.loop.next()
    assert marked.lines[2:4] == ["1000.00 0:5", "1000.01 0:10"]
    assert marked.lines[-2] == "rest 4"
    marked.marks.close()


def test_a_reader_sees_what_was_noted(marked):
    marked.marks.start(marked.logs)
    for _ in range(3):
        marked.write("trainer.0")
        marked.marks.handle_write()
        marked.loop.next()
    reader = MarksReader(marked.path)
    reader.read()
    assert reader.tracks["trainer.0"].sizes == [5, 10, 15]
    assert reader.tracks["trainer.0"].times[0] == 1000.0
