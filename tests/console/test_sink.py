"""An output that never blocks: real pipes, files, terminals and sockets."""

import contextlib
import os
import pty
import select
import socket
import termios
import threading

import pytest

from fleetrun.console.console import Sink, sinks
from fleetrun.pod.loop import Loop
from tests.support.isolated import isolated

MORE_THAN_A_PIPE = b"".join(b"%07d\n" % number for number in range(50_000))
ROOM = 1 << 20


@pytest.fixture
def loop():
    made = Loop()
    made.after(60.0, lambda: pytest.fail("not within 60 s"))
    yield made
    made.close()


@pytest.fixture
def pipe():
    read, write = os.pipe()
    ends = {"read": read, "write": write}
    yield ends
    for fd in ends.values():
        if fd is not None:
            os.close(fd)


def read_all(fd, size):
    data = b""
    while len(data) < size:
        assert select.select([fd], [], [], 60.0)[0], "nothing comes"
        data += os.read(fd, 65536)
    return data


# ---- pipes


def test_a_reader_that_is_slow_delays_nobody(pipe, loop):
    """What the pipe does not take waits, and goes out when there is room: all of it, in order."""
    sink = Sink(pipe["write"])
    sink.attach(loop, loop.stop)
    for start in range(0, len(MORE_THAN_A_PIPE), 8000):
        sink.write(MORE_THAN_A_PIPE[start : start + 8000])
    received = []
    reader = threading.Thread(target=lambda: received.append(read_all(pipe["read"], len(MORE_THAN_A_PIPE))))
    reader.start()
    loop.run()
    reader.join(60.0)
    assert received == [MORE_THAN_A_PIPE]


def test_without_a_loop_draining_writes_the_rest(pipe):
    sink = Sink(pipe["write"])
    sink.write(MORE_THAN_A_PIPE)
    received = []
    reader = threading.Thread(target=lambda: received.append(read_all(pipe["read"], len(MORE_THAN_A_PIPE))))
    reader.start()
    sink.drain()
    reader.join(60.0)
    assert received == [MORE_THAN_A_PIPE]


def test_room_is_short_when_much_waits(pipe):
    sink = Sink(pipe["write"])
    assert sink.room
    sink.write(b"x" * (ROOM + 128 * 1024))
    assert not sink.room
    read_all(pipe["read"], 65536)


def test_draining_can_be_interrupted(pipe):
    sink = Sink(pipe["write"])
    sink.write(b"x" * ROOM)
    interrupt, told = os.pipe()
    os.write(told, b"x")
    sink.drain(interrupt)
    os.close(interrupt)
    os.close(told)


def test_a_reader_that_has_gone_is_written_to_no_more(pipe, loop):
    sink = Sink(pipe["write"])
    os.close(pipe["read"])
    pipe["read"] = None
    sink.write(b"x\n")
    assert sink.closed
    sink.write(b"y\n")
    assert sink.room
    sink.drain()


def test_a_reader_that_goes_while_something_waits(pipe, loop):
    sink = Sink(pipe["write"])
    sink.attach(loop, loop.stop)
    sink.write(MORE_THAN_A_PIPE)

    def go():
        os.close(pipe["read"])
        pipe["read"] = None

    loop.after(0.0, go)
    loop.run()
    assert sink.closed


def test_others_who_share_the_pipe_still_block(pipe):
    """O_NONBLOCK belongs to the open file: on the shell's own it would break the shell."""
    Sink(pipe["write"]).write(b"x")
    assert os.get_blocking(pipe["write"])


# ---- files, sockets, terminals


def test_a_file_gets_everything_at_once(tmp_path):
    path = tmp_path / "out"
    with path.open("ab") as file:
        file.write(b"before\n")
        file.flush()
        Sink(file.fileno()).write(MORE_THAN_A_PIPE)
    assert path.read_bytes() == b"before\n" + MORE_THAN_A_PIPE


def test_a_full_disk_loses_output_and_no_more(loop):
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        sink = Sink(full.fileno())
        sink.attach(loop, loop.stop)
        sink.write(b"lost\n")
        sink.drain()
        assert not sink.closed
        assert sink.room


def test_a_socket_whose_reader_is_slow(loop):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sink = Sink(ours.fileno())
        sink.attach(loop, loop.stop)
        for start in range(0, len(MORE_THAN_A_PIPE), 8000):
            sink.write(MORE_THAN_A_PIPE[start : start + 8000])
        received = []
        size = len(MORE_THAN_A_PIPE)
        reader = threading.Thread(target=lambda: received.append(read_all(theirs.fileno(), size)))
        reader.start()
        loop.run()
        reader.join(60.0)
        assert received == [MORE_THAN_A_PIPE]


def test_draining_into_a_socket_that_nobody_reads_can_be_interrupted():
    ours, theirs = socket.socketpair()
    interrupt, told = os.pipe()
    with ours, theirs:
        sink = Sink(ours.fileno())
        sink.write(MORE_THAN_A_PIPE * 3)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(b"x", socket.MSG_DONTWAIT)
        os.write(told, b"x")
        sink.drain(interrupt)
    os.close(interrupt)
    os.close(told)


def test_a_terminal_that_was_stopped_delays_nobody(loop):
    """Ctrl-S, then Ctrl-Q: in between everything waits, after it all comes."""
    master, slave = pty.openpty()
    attributes = termios.tcgetattr(slave)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, attributes)
    sink = Sink(slave)
    sink.attach(loop, loop.stop)
    termios.tcflow(slave, termios.TCOOFF)
    sink.write(MORE_THAN_A_PIPE)
    assert not select.select([master], [], [], 0)[0]
    received = []

    def resume():
        termios.tcflow(slave, termios.TCOON)
        reader.start()

    reader = threading.Thread(target=lambda: received.append(read_all(master, len(MORE_THAN_A_PIPE))))
    loop.after(0.0, resume)
    loop.run()
    reader.join(60.0)
    assert received == [MORE_THAN_A_PIPE]
    os.close(slave)
    os.close(master)


# ---- both outputs


def one_file_for_both():
    _, write = os.pipe()
    os.dup2(write, 1)
    os.dup2(write, 2)
    out, err = sinks()
    assert out is err


def two_files():
    for fd in (1, 2):
        _, write = os.pipe()
        os.dup2(write, fd)
    out, err = sinks()
    assert out is not err


@pytest.mark.slow
@pytest.mark.parametrize("case", [one_file_for_both, two_files])
def test_two_outputs_that_are_one_file_have_one_writer(case):
    isolated(case)
