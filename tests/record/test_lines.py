"""The lines of a log, forwards and backwards: the same ones, with the same offsets."""

import os
import random

import pytest

from fleetrun.record.log_lines import LONGEST, PIECE, LogReader


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
