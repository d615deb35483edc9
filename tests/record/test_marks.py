"""When logs had which size: noted when the kernel tells, at most once a second, and never without a cause."""

import os
from pathlib import Path

import pytest

from fleetrun.pod.loop import Timer
from fleetrun.record.journal import REST, Marks, marks_path
from fleetrun.record.log_lines import MarksReader


class Timers:
    """A loop whose time passes when it is told to."""

    def __init__(self):
        self.now = 1000.0
        self.waiting = []

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
        if self.deaf:
            raise OSError
        self.asked += 1

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


def test_the_first_write_is_noted_at_once_and_the_next_a_second_later(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.1")
    marked.marks.told()
    assert marked.lines == ["# trainer.0 trainer.1", "rest 1", "1000.00 1:5"]
    marked.write("trainer.1")
    marked.write("trainer.0")
    marked.marks.told()
    assert len(marked.lines) == 3, "within the second"
    marked.loop.next()
    assert marked.lines[3:] == ["1001.00 0:5 1:10"]
    marked.loop.next()
    assert (marked.loop.pending, len(marked.lines)) == ([], 4), "and then it sleeps"


def test_who_else_writes_there_delays_no_note_for_long(marked):
    marked.marks.start(marked.logs)
    rests = []
    for _ in range(12):
        marked.marks.told()
        (rest,) = marked.loop.pending
        rests.append(rest)
        marked.loop.next()
    assert rests[0] < 0.1
    assert rests == sorted(rests)
    assert rests[-1] == pytest.approx(REST), "nor wakes us without end"


def test_where_the_kernel_does_not_tell_it_looks_each_second(marked):
    marked.deaf = True
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.loop.next()
    assert marked.lines[2:] == ["1001.00 0:5"]
    assert marked.loop.pending == [pytest.approx(REST)]


def test_the_end_of_a_process_is_noted_at_once(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.write("trainer.1")
    marked.marks.heard({"event": "exited", "container": "trainer.1"})
    marked.marks.heard({"event": "exited", "container": "nobody"})
    marked.marks.heard({"event": "started", "container": "trainer.0"})
    assert marked.lines[2:] == ["1000.00 1:5"]


def test_the_last_lines_are_noted_at_the_end(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.marks.close()
    marked.marks.close()
    marked.marks.told()
    assert marked.lines[2:] == ["1000.00 0:5"]


def test_what_is_cut_off_the_head_is_noted(marked):
    marked.marks.start(marked.logs)
    marked.write("trainer.0", b"x" * 9000)
    marked.marks.told()
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
    marked.marks.told()
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
    marked.marks.told()
    marked.marks.close()


def test_the_rest_grows_with_the_file(tmp_path):
    marked = Marked(tmp_path)
    marked.marks.start(marked.logs)
    marked.write("trainer.0")
    marked.marks.told()
    marked.marks._file.written = 20 << 20
    marked.write("trainer.0")
    marked.loop.next()
    assert marked.lines[2:] == ["1000.00 0:5", "1001.00 0:10", "rest 4"]
    assert marked.loop.pending == [4.0]
    marked.marks.close()


def test_a_reader_sees_what_was_noted(marked):
    marked.marks.start(marked.logs)
    for _ in range(3):
        marked.write("trainer.0")
        marked.marks.told()
        marked.loop.next()
    reader = MarksReader(marked.path)
    reader.read()
    assert reader.tracks["trainer.0"].sizes == [5, 10, 15]
    assert reader.tracks["trainer.0"].times[0] == 1000.0
