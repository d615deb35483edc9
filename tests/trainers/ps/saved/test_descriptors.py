"""Whole writes, whatever the kernel takes at once."""

import os
import random
import signal
import threading

import pytest

from trainers.ps.saved.descriptors import write_all, write_file


def test_a_write_that_was_interrupted_goes_on_where_it_stopped():
    chance = random.Random(1)
    pieces = [chance.randbytes(chance.choice((0, 1, 100, 40_000))) for _ in range(60)]
    readable, writable = os.pipe()
    interrupted = threading.Event()
    got = bytearray()

    def drain() -> None:
        """Leaves the pipe full until the signal has cut the first write short."""
        assert interrupted.wait(20)
        while some := os.read(readable, 1 << 16):
            got.extend(some)

    reader = threading.Thread(target=drain)
    reader.start()
    former = signal.signal(signal.SIGALRM, lambda number, frame: interrupted.set())
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert write_all(writable, pieces) == sum(map(len, pieces))
    finally:
        signal.signal(signal.SIGALRM, former)
        os.close(writable)
        reader.join()
        os.close(readable)
    assert bytes(got) == b"".join(pieces)


def test_more_pieces_than_the_kernel_takes_at_once(tmp_path):
    pieces = [bytes([number % 251]) * (number % 3) for number in range(5000)]
    write_file(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_take_its_place_leaves_nothing(tmp_path):
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_file(tmp_path / "taken", [b"content"])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
