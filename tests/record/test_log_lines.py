"""Lines of logs with their times, merged."""

import errno
import math
import os
import random
import re

import pytest

from fleetrun.pod.linux import punch_hole
from fleetrun.record.journal import Marks
from fleetrun.record.log_lines import (
    AT_ONCE,
    LONGEST,
    PIECE,
    LogReader,
    MarksReader,
    Merged,
    Track,
    in_time_order,
)

# ---- The lines of a log, forwards and backwards: the same ones, with the same offsets.


@pytest.fixture
def log(tmp_path):
    return tmp_path / "trainer.0.log"


def forwards(path, start=0, last=True):
    reader = LogReader(path)
    reader.offset = start
    found = list(reader.lines(reader.state[0], last=last))
    reader.close()
    return found


def backwards(path, start=0, last=True):
    reader = LogReader(path)
    found = list(reader.backwards(reader.state[0], start, last=last))
    reader.close()
    return found[::-1]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [(1, b"")]),
        (b"one", [(3, b"one")]),
        (b"one\n", [(4, b"one")]),
        (b"one\ntwo", [(4, b"one"), (7, b"two")]),
        (b"\none\n\n\ntwo\n", [(1, b""), (5, b"one"), (6, b""), (7, b""), (11, b"two")]),
        (b"a\r\nb\r", [(3, b"a\r"), (5, b"b\r")]),
    ],
)
def test_lines_have_the_offset_behind_them(log, data, lines):
    log.write_bytes(data)
    assert forwards(log) == lines
    assert backwards(log) == lines


def test_what_is_unfinished_waits(log):
    log.write_bytes(b"one\ntw")
    assert forwards(log, last=False) == backwards(log, last=False) == [(4, b"one")]
    reader = LogReader(log)
    assert list(reader.lines(6)) == [(4, b"one")]
    log.write_bytes(b"one\ntwo\n")
    assert list(reader.lines(8)) == [(8, b"two")]
    reader.close()


@pytest.mark.parametrize("seed", range(8))
def test_both_ways_say_the_same_of_anything(log, seed):
    chosen = random.Random(seed)
    pieces = [b"x" * chosen.choice([0, 1, 7, 1000, PIECE - 1, PIECE, PIECE + 1]) for _ in range(12)]
    log.write_bytes(b"\n".join(pieces))
    for last in (True, False):
        found = forwards(log, last=last)
        assert found == backwards(log, last=last)
        assert [text for _, text in found] == (pieces if last and pieces[-1] else pieces[:-1])
        start = found[len(found) // 2][0]
        assert backwards(log, start, last=last) == [each for each in found if each[0] > start]


def test_a_line_without_end_is_broken(log):
    log.write_bytes(b"first\n" + b"x" * (3 * LONGEST) + b"\nlast\n")
    for found in (forwards(log), backwards(log)):
        assert found[0] == (6, b"first")
        assert found[-1][1] == b"last"
        assert sum(len(text) for _, text in found[1:-1]) == 3 * LONGEST
        assert max(len(text) for _, text in found) <= LONGEST + PIECE


@pytest.mark.parametrize(("offset", "begin"), [(0, 0), (1, 0), (3, 0), (4, 4), (5, 4), (7, 4), (8, 8)])
def test_seek_goes_to_the_beginning_of_a_line(log, offset, begin):
    log.write_bytes(b"one\ntwo\nthree\n")
    reader = LogReader(log)
    reader.seek(offset)
    assert reader.offset == begin
    reader.close()


def test_a_hole_at_the_head_is_no_line(log):
    with log.open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 20)
        file.write(b"one\n")
    reader = LogReader(log)
    reader.offset = reader.head
    assert [text for _, text in reader.lines(reader.state[0])][-1].lstrip(b"\0") == b"one"
    reader.close()


@pytest.mark.parametrize("kind", ["missing", "fifo", "folder"])
def test_what_is_no_file_has_no_lines(log, kind):
    if kind == "fifo":
        os.mkfifo(log)
    elif kind == "folder":
        log.mkdir()
    reader = LogReader(log)
    assert reader.state == (0, 0.0)
    assert reader.head == 0
    assert list(reader.lines(100, last=True)) == list(reader.backwards(100, 0, last=True)) == []
    assert reader.trouble is not None


def test_a_file_that_comes_later_is_read_then(log):
    reader = LogReader(log)
    assert reader.state[0] == 0
    log.write_bytes(b"one\n")
    assert list(reader.lines(reader.state[0])) == [(4, b"one")]
    assert reader.trouble is None
    reader.close()


# ---- Several logs as one: in the order of time, once each, while they are written and afterwards.


def everything(text):
    return True


class Job:
    """Two logs and their marks, written by hand."""

    def __init__(self, folder):
        self.logs = {name: folder / f"{name}.log" for name in ("trainer.0", "trainer.1")}
        self.marks = folder / "job.abcdef.marks"
        self.marks.write_text("# trainer.0 trainer.1\nrest 1\n")
        self.now = 100.0
        for path in self.logs.values():
            path.touch()
        self.merged = Merged(self.logs, self.marks, 100.0, lambda: self.now)

    def write(self, number, text, at=None):
        """With a note of the time, if there is one."""
        path = self.logs[f"trainer.{number}"]
        with path.open("a") as file:
            file.write(text)
        if at is not None:
            self.note(f"{at:.2f} {number}:{path.stat().st_size}")

    def note(self, line):
        with self.marks.open("a") as file:
            file.write(line + "\n")

    def so_far(self, wanted=everything, **options):
        return [line.text.decode() for line in self.merged.so_far(wanted, **options)]

    def news(self, wanted=everything, **options):
        return [line.text.decode() for line in in_time_order(list(self.merged.news(wanted, **options)))]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.merged.close()


@pytest.fixture
def six(job):
    job.write(0, "a0\n", at=101)
    job.write(1, "b0\n", at=102)
    job.write(1, "b1\n", at=110)
    job.write(0, "a1\n", at=120)
    job.write(0, "a2\n", at=130)
    job.write(1, "b2\n", at=140)
    return job


def test_lines_come_in_the_order_of_time(six):
    lines = list(six.merged.so_far(everything))
    assert [line.text for line in lines] == [b"a0", b"b0", b"b1", b"a1", b"a2", b"b2"]
    assert [line.moment for line in lines] == pytest.approx([101, 102, 110, 120, 130, 140])
    assert [line.number for line in lines] == [0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("most", "shown"),
    [(0, ""), (1, "b2"), (3, "a1 a2 b2"), (6, "a0 b0 b1 a1 a2 b2"), (99, "a0 b0 b1 a1 a2 b2")],
)
def test_the_last_lines_of_all(six, most, shown):
    assert six.so_far(most=most) == shown.split()


@pytest.mark.parametrize(
    ("since", "shown"), [(0, "a0 b0 b1 a1 a2 b2"), (102.5, "b1 a1 a2 b2"), (125, "a2 b2"), (200, "")]
)
def test_lines_since_a_moment(six, since, shown):
    assert six.so_far(since=since) == shown.split()


def test_the_last_lines_that_are_wanted(six):
    wanted = re.compile(rb"[01]").search
    assert six.so_far(lambda text: bool(wanted(text)), most=2) == ["b1", "a1"]
    assert six.so_far(lambda text: bool(wanted(text)), most=2, since=115) == ["a1"]


def test_a_line_of_a_burst_lies_between_two_looks(job):
    job.write(0, "a0\n", at=101.0)
    job.write(1, "b0\n", at=101.4)
    job.write(0, "a1\na2\na3\na4\n", at=102.0)
    assert job.so_far() == ["a0", "a1", "a2", "b0", "a3", "a4"]


def test_a_line_that_came_in_pieces_counts_when_it_begins(job):
    job.write(0, "a0", at=101.0)
    job.write(1, "b0\n", at=105.0)
    job.write(0, " and more\n", at=110.0)
    assert job.so_far() == ["a0 and more", "b0"]


def test_a_progress_bar_counts_when_it_ends(job):
    job.write(0, "10%\r", at=101.0)
    job.write(1, "b0\n", at=105.0)
    job.write(0, "100%\n", at=110.0)
    assert job.so_far() == ["b0", "10%\r100%"]


def test_without_marks_all_lines_are_there(job):
    job.marks.unlink()
    job.write(0, "a0\na1\n")
    job.write(1, "b0\n")
    assert sorted(job.so_far()) == ["a0", "a1", "b0"]


def test_what_stands_after_the_last_newline_is_a_line_when_nobody_writes(job):
    job.write(0, "a0\nhalf", at=101)
    assert job.so_far(whole=True) == ["a0", "half"]


@pytest.mark.parametrize("most", [None, 5])
def test_what_comes_follows_what_was_there_without_a_gap(job, most):
    job.write(0, "a0\nha", at=101)
    assert job.so_far(whole=False, most=most) == ["a0"]
    assert job.news() == []
    job.write(0, "lf\na1\n")
    job.write(1, "b0\n", at=101.4)
    job.now = 102.0
    assert job.news() == ["half", "b0", "a1"]
    assert job.news() == []
    job.write(1, "end")
    assert job.news() == []
    assert job.news(last=True) == ["end"]


def test_news_are_chosen_too(job):
    assert job.so_far(whole=False) == []
    job.write(0, "loss 1\nother\nloss 2\n")
    assert job.news(lambda text: b"loss" in text) == ["loss 1", "loss 2"]


def test_a_flood_is_told_piece_by_piece(job):
    assert job.so_far(whole=False) == []
    lines = [f"{number} " + "x" * 100_000 for number in range(50)]
    job.write(0, "\n".join(lines))
    assert job.merged.behind
    first = job.news(last=True)
    assert first == lines[: len(first)]
    assert 1 <= len(first) * 100_000 <= AT_ONCE
    found = [*first, *(line for _ in range(9) for line in job.news(last=True))]
    assert found == lines
    assert not job.merged.behind


def test_a_flood_that_cannot_be_read_is_not_waited_for_and_told_later(job, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    assert job.so_far(whole=False) == []
    job.write(0, "x" * (AT_ONCE + 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", broken)
        assert job.news() == []
        assert not job.merged.behind
        assert job.merged.troubles["trainer.0"].errno == errno.EIO
    assert job.news() != []
    assert job.merged.troubles == {}


def test_following_goes_on_after_the_head_was_cut_off(job):
    job.write(0, "a0\na1\na2\n", at=101)
    assert job.so_far(whole=False) == ["a0", "a1", "a2"]
    path = job.logs["trainer.0"]
    path.write_text("a2\n")
    job.note("102.00 0-6")
    job.write(0, "a3\n", at=103)
    assert job.news() == ["a3"]


def lost_and_lines(job, **options):
    return [
        line.lost or line.text.decode()
        for line in in_time_order(list(job.merged.news(everything, **options)))
    ]


def test_what_was_cut_off_before_it_was_read_is_counted(job):
    job.write(0, "a0\n", at=101)
    assert job.so_far(whole=False) == ["a0"]
    job.logs["trainer.0"].write_text("rn\na9\n")  # of a0, torn, a9
    job.note("102.00 0-5")
    job.write(1, "b0\n", at=103)
    assert lost_and_lines(job) == [len("to") + len("rn\n"), "a9", "b0"]
    job.write(0, "a10\n")
    assert lost_and_lines(job) == ["a10"], "once"


def test_several_cuts_between_two_looks_are_one_loss(job):
    assert job.so_far(whole=False) == []
    for _ in range(3):
        job.note("102.00 0-4096")
    job.write(0, "n\nend\n")
    assert lost_and_lines(job) == [3 * 4096 + 2, "end"]


@pytest.mark.parametrize("noted", [True, False])
def test_what_is_cut_off_while_it_is_read_is_counted_and_nothing_comes_twice(job, noted):
    """Between reading and telling, and its note comes then or later."""
    assert job.so_far(whole=False) == []
    path = job.logs["trainer.0"]
    job.write(0, "a0\na1\na2\n")
    reader = job.merged._readers[0]
    ahead = reader.ahead

    def cut(end):
        data = ahead(end)
        path.write_text("\na2\n")
        if noted:
            job.note("102.00 0-5")
        reader.ahead = ahead
        return data

    reader.ahead = cut
    assert lost_and_lines(job) == []
    if not noted:
        job.note("102.00 0-5")
    assert lost_and_lines(job) == [6, "a2"]


def test_a_cut_without_its_note_is_not_taken_for_an_emptied_file(job):
    job.write(0, "a0\na1\na2\n", at=101)
    assert job.so_far(whole=False) == ["a0", "a1", "a2"]
    job.logs["trainer.0"].write_text("a2\n")
    assert job.news() == []
    job.note("102.00 0-6")
    assert job.news() == [], "a2 has been read"
    job.write(0, "a3\n")
    assert job.news() == ["a3"]


def test_at_the_end_nothing_is_waited_for(job):
    job.write(0, "a0\na11\na222\n", at=101)
    assert job.so_far(whole=False) == ["a0", "a11", "a222"]
    job.logs["trainer.0"].write_text("b\n")
    assert job.news(last=True) == ["b"]


def test_where_files_cannot_become_shorter_the_hole_is_passed(job):
    path = job.logs["trainer.0"]
    block = 1 << 16
    assert job.so_far(whole=False) == []
    job.write(0, "x" * (4 * block) + "\nend\n")
    fd = os.open(path, os.O_RDWR)
    try:
        punch_hole(fd, 2 * block)
    except OSError as error:
        pytest.skip(f"the file system here: {error}")
    finally:
        os.close(fd)
    assert lost_and_lines(job) == [4 * block + 1, "end"]


def test_a_head_that_was_cut_off_a_moment_ago_is_waited_for(job):
    job.write(0, "a0\na11\na222\n", at=101)
    assert job.so_far(whole=False) == ["a0", "a11", "a222"]
    job.logs["trainer.0"].write_text("a222\na33333333333\n")
    assert job.news() == [], "its note is not there yet"
    job.note("102.00 0-7")
    assert job.news() == ["a33333333333"]


def test_a_line_that_was_broken_is_gone_on_with(job):
    job.write(0, "x" * 1_100_000)
    first = job.so_far(whole=False)
    job.write(0, "end\nnext\n")
    rest = job.news() or job.news()
    assert "".join(first + rest[:-1]) == "x" * 1_100_000 + "end"
    assert rest[-1] == "next"


def test_following_goes_on_after_somebody_emptied_the_file(job):
    job.write(0, "a0\na1\na2\n", at=101)
    job.so_far(whole=False)
    job.logs["trainer.0"].write_text("")
    assert job.news() == []
    job.write(0, "a3\n")
    assert job.news() == ["a3"]


def test_zeros_of_a_hole_are_not_shown(job):
    job.write(0, "\0" * 5000 + "a0\n", at=101)
    assert job.so_far() == ["a0"]


def test_the_notes_of_the_launcher_are_understood(job, tmp_path):
    class Still:
        def after(self, seconds, handler):
            return None

        def clock(self):
            return job.now

    marks = Marks(tmp_path / "real.marks", Still(), wall=lambda: job.now, ask=lambda fd: True)
    merged = Merged(job.logs, tmp_path / "real.marks", 100.0, lambda: job.now)
    marks.start(job.logs)
    for moment, number, text in ((101.0, 1, "b0\n"), (102.0, 0, "a0\n"), (103.0, 1, "b1\n")):
        job.now = moment
        job.write(number, text)
        marks.handle({"event": "exited", "container": f"trainer.{number}"})
    marks.close()
    assert [(line.text, line.moment) for line in merged.so_far(everything)] == [
        (b"b0", 101.0), (b"a0", 102.0), (b"b1", 103.0),
    ]  # fmt: skip
    merged.close()


# ---- From the sizes of a log to the times of its lines.


def track(*marks, rest=1.0):
    made = Track()
    for moment, size in marks:
        made.add(moment, size, rest)
    return made


@pytest.mark.parametrize(
    ("offset", "moment"),
    [
        (100, 10.0),  # the kernel told at once of the first write after silence
        (1, 10.0),
        (200, 11.0),
        (150, 10.5),  # spread over the second in which nobody looked
        (110, 10.1),
        (300, 20.0),  # silence, then told
        (250, 20.0),
        (301, math.inf),
    ],
)
def test_when_a_byte_was_written(offset, moment):
    assert track((10.0, 100), (11.0, 200), (20.0, 300)).at(offset) == pytest.approx(moment, abs=0.03)


def test_times_never_go_back():
    made = track((10.0, 100), (11.0, 200), (11.2, 205), (20.0, 300), (20.5, 1000), (25.0, 1001))
    times = [made.at(offset) for offset in range(1, 1002)]
    assert times == sorted(times)


def test_a_clock_that_was_set_back_does_not_mix_the_lines():
    made = track((10.0, 100), (5.0, 200), (12.0, 300))
    times = [made.at(offset) for offset in range(1, 301)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("moment", "offset"), [(0.0, 0), (10.0, 0), (10.5, 100), (11.0, 100), (11.5, 200), (99.0, 300)]
)
def test_everything_before_that_is_older(moment, offset):
    assert track((10.0, 100), (11.0, 200), (20.0, 300)).since(moment) == offset


def test_a_longer_rest_is_spread_wider():
    made = track((10.0, 100), (74.0, 200), rest=64.0)
    assert made.at(150) == pytest.approx(42.0)


def test_a_log_that_was_emptied_begins_anew():
    made = track((10.0, 100), (11.0, 200), (20.0, 50), (21.0, 60))
    assert (made.sizes, made.times) == ([50, 60], [20.0, 21.0])


def test_what_was_cut_off_the_head_moves_all_offsets():
    made = track((10.0, 100), (11.0, 200), (12.0, 300))
    made.cut(150)
    assert (made.sizes, made.times) == ([50, 150], [11.0, 12.0])
    assert made.at(50) == 11.0


def test_the_end_of_the_file_is_as_old_as_the_file_says():
    made = track((10.0, 100)).closed(200, began=9.0, last=10.4)
    assert made.at(200) == pytest.approx(10.4)
    assert made.at(150) == pytest.approx(10.2)


def test_without_marks_it_grew_evenly():
    made = Track().closed(1000, began=100.0, last=200.0)
    assert [made.at(offset) for offset in (1, 500, 1000)] == pytest.approx([100.1, 150.0, 200.0])
    assert Track().closed(0, began=100.0, last=200.0).at(1) == math.inf


# ---- the file


@pytest.fixture
def path(tmp_path):
    return tmp_path / "job.abcdef.marks"


def test_marks_are_read_by_the_names_of_their_logs(path):
    path.write_text("# trainer.0 ps.0\nrest 1\n10.00 0:100\n11.00 0:150 1:7\nrest 2\n13.00 1:9\n")
    reader = MarksReader(path)
    assert reader.read() == {}
    assert reader.tracks["trainer.0"].sizes == [100, 150]
    assert reader.tracks["ps.0"].times == [11.0, 13.0]
    assert reader.tracks["ps.0"].rests == [1.0, 2.0]


def test_reading_goes_on_where_it_stopped(path):
    path.write_text("# a\nrest 1\n10.00 0:100\n11.00 0:")
    reader = MarksReader(path)
    reader.read()
    assert reader.tracks["a"].sizes == [100], "half a line is not read"
    with path.open("a") as file:
        file.write("150\n12.00 0-50\n13.00 0:110\n")
    assert reader.read() == {"a": 50}
    assert reader.tracks["a"].sizes == [50, 100, 110]
    assert reader.read() == {}


@pytest.mark.parametrize(
    "damage",
    [
        "\n",
        "garbage\n",
        "nan 0:5\n",
        "-3 0:5\n",
        "10 7:5\n",
        "10 0:x 0:-3 0:\n",
        "10 0:" + "9" * 40 + "\n",
        "# \n\n",
        "\0\0\n",
        "rest nan\nrest 0\nrest x\n",
    ],
)
def test_a_damaged_line_is_passed_over(path, damage):
    path.write_text("# a\n10.00 0:100\n" + damage + "# a\n11.00 0:200\n")
    reader = MarksReader(path)
    reader.read()
    assert reader.tracks["a"].sizes == [100, 200]
    assert reader.tracks["a"].rests == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["missing", "fifo", "folder"])
def test_no_marks_are_none(path, kind):
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    reader = MarksReader(path)
    assert reader.read() == {}
    assert reader.tracks == {}
