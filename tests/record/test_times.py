"""From the sizes of a log to the times of its lines."""

import math
import os

import pytest

from fleetrun.record.log_lines import MarksReader, Track


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
