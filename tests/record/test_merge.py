"""Several logs as one: in the order of time, once each, while they are written and afterwards."""

import errno
import os
import re

import pytest

from fleetrun.pod.linux import punch_hole
from fleetrun.record.journal import Marks
from fleetrun.record.log_lines import AT_ONCE, Merged, in_time_order


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

    marks = Marks(tmp_path / "real.marks", Still(), wall=lambda: job.now, ask=lambda fd: None)
    merged = Merged(job.logs, tmp_path / "real.marks", 100.0, lambda: job.now)
    marks.start(job.logs)
    for moment, number, text in ((101.0, 1, "b0\n"), (102.0, 0, "a0\n"), (103.0, 1, "b1\n")):
        job.now = moment
        job.write(number, text)
        marks.heard({"event": "exited", "container": f"trainer.{number}"})
    marks.close()
    assert [(line.text, line.moment) for line in merged.so_far(everything)] == [
        (b"b0", 101.0), (b"a0", 102.0), (b"b1", 103.0),
    ]  # fmt: skip
    merged.close()
