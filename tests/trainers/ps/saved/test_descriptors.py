"""Whole writes, whatever the kernel takes at once."""

import ctypes
import fcntl
import itertools
import mmap
import os
import random
import resource
import signal
import sys
import termios
import threading

import numpy as np
import pytest

from tests.support.waiting import eventually
from trainers.storage.folder import write_all, write_direct, write_file


def test_a_write_that_was_interrupted_goes_on_where_it_stopped():
    chance = random.Random(1)
    pieces = [chance.randbytes(chance.choice((0, 1, 100, 40_000))) for _ in range(60)]
    readable, writable = os.pipe()
    interrupted = threading.Event()
    got = bytearray()

    def drain() -> None:
        """Leaves the pipe full until a signal has cut the first write short."""
        eventually(lambda: unread(readable) == fcntl.fcntl(readable, fcntl.F_GETPIPE_SZ))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert interrupted.wait(60)
        while some := os.read(readable, 1 << 16):
            got.extend(some)

    reader = threading.Thread(target=drain)
    former = signal.signal(signal.SIGUSR1, lambda number, frame: interrupted.set())
    reader.start()
    try:
        assert write_all(writable, pieces) == sum(map(len, pieces))
    finally:
        os.close(writable)
        reader.join()
        signal.signal(signal.SIGUSR1, former)
        os.close(readable)
    assert bytes(got) == b"".join(pieces)


def unread(readable: int) -> int:
    """How many bytes are in a pipe."""
    return int.from_bytes(fcntl.ioctl(readable, termios.FIONREAD, bytes(4)), sys.byteorder)


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


@pytest.mark.slow
@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, (8 << 20) - 1, 8 << 20, (24 << 20) + 4100])
def test_a_large_file_in_pieces_of_any_size(tmp_path, size):
    content = memoryview(random.Random(size).randbytes(size))
    cuts = [0, 1, 4096, 5000, 5000, 300_001, size // 2, size]
    write_file(tmp_path / "file", [content[start:stop] for start, stop in itertools.pairwise(cuts)])
    assert (tmp_path / "file").read_bytes() == content


def test_a_large_file_does_not_fill_the_page_cache(tmp_path):
    """Else it would cost new memory for every byte."""
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        os.write(descriptor, bytes(4096))
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
        os.pwrite(descriptor, mmap.mmap(-1, 4096), 0)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    finally:
        os.close(descriptor)
    write_file(path, [bytes(32 << 20)])
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert cached_pages(mapped) < 100


def cached_pages(mapped: mmap.mmap) -> int:
    found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found)
    return sum(each & 1 for each in found)


def test_what_cannot_be_written_directly_goes_through_the_page_cache(tmp_path):
    """A file system may say so when it is asked or at a write, as here: to an odd place."""
    content = random.Random(1).randbytes(9 << 20)
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, b"odd")
    write_direct(descriptor, [memoryview(content)])
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"odd" + content


def test_a_large_file_that_finds_no_room_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_001, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            write_file(tmp_path / "file", [bytes(20 << 20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
