"""What fleetrun says: which of it, in which form, in which colour."""

import contextlib
import os
import pty
import re
import select
import socket
import termios
import threading

import pytest

from fleetrun.console.console import LEVELS, Sink, sinks, wants_colour
from fleetrun.pod.loop import Loop
from tests.support.isolated import isolated

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def test_a_line_has_the_stamp_of_the_documents(said):
    """`LAUNCH INFO 2022-05-18 11:27:17,761 text`"""
    made = said()
    made.console.info("Job: default")
    assert re.fullmatch(rf"LAUNCH INFO {STAMP} Job: default\n", made.err)
    assert made.out == b""


def test_each_line_of_a_text_has_it(said):
    made = said()
    made.console.warning("one\ntwo")
    assert re.fullmatch(rf"LAUNCH WARNING {STAMP} one\nLAUNCH WARNING {STAMP} two\n", made.err)


def test_an_empty_text_is_a_line(said):
    made = said()
    made.console.info("")
    assert re.fullmatch(rf"LAUNCH INFO {STAMP} \n", made.err)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_below_the_level_is_not_said(said, level):
    made = said(level)
    for name in ("debug", "info", "warning", "error"):
        getattr(made.console, name)(name)
    words = [line.split()[-1] for line in made.err.splitlines()]
    order = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    assert words == ["debug", "info", "warning", "error"][order.index(level) :]


@pytest.mark.parametrize(("level", "shown"), [("INFO", True), ("ERROR", True), ("CRITICAL", False)])
def test_blocks_have_a_level_and_no_stamp(said, level, shown):
    made = said(level)
    made.console.block(["a", "b"], level="ERROR")
    assert made.err == ("a\nb\n" if shown else "")


def test_colour_is_for_the_head_of_warnings_and_errors(said):
    made = said(colour=True)
    made.console.info("x")
    made.console.warning("x")
    made.console.error("x")
    first, second, third = made.err.splitlines()
    assert first.startswith("LAUNCH INFO ")
    assert second.startswith("\033[33mLAUNCH WARNING\033[0m ")
    assert third.startswith("\033[31mLAUNCH ERROR\033[0m ")


def test_a_report_ends_with_its_cause_in_red_and_whole_words(said):
    made = said(colour=True, columns=40)
    made.console.report(["=" * 40, "First failure: trainer 1", f"trainer 1: {'word ' * 9}at train.py:36"])
    *_, above, first, last = made.err.splitlines()
    assert above == "First failure: trainer 1"
    assert all(row.startswith("\x1b[31m") and row.endswith("\x1b[0m") for row in (first, last))
    assert last == "\x1b[31m    word word word at train.py:36\x1b[0m", made.err


@pytest.mark.parametrize(("columns", "date"), [(None, True), (100, True), (99, False)])
def test_a_narrow_terminal_gets_the_time_without_the_date(said, columns, date):
    made = said(columns=columns)
    made.console.info("Job: x")
    assert (re.fullmatch(r"LAUNCH INFO \d\d:\d\d:\d\d Job: x\n", made.err) is None) is date


def test_no_colour_unless_asked(said):
    made = said()
    made.console.error("x")
    assert "\033" not in made.err
    assert made.console.label("trainer.0", 9, 0) == b"trainer.0 | "


def test_containers_print_what_they_print(said):
    made = said()
    made.console.show(b"", b"\xff any bytes\n")
    assert made.out == b"\xff any bytes\n"
    assert made.err == ""


def test_each_line_has_its_label(said):
    made = said()
    made.console.show(b"trainer.0 | ", "一\n\n二\n".encode())
    assert made.out.decode() == "trainer.0 | 一\ntrainer.0 | \ntrainer.0 | 二\n"


def test_labels_are_as_wide_as_the_widest_and_differ_in_colour(said):
    console = said(colour=True).console
    labels = [console.label(name, 11, number) for number, name in enumerate(("ps.0", "trainer.10"))]
    assert b"ps.0        |" in labels[0]
    assert b"trainer.10  |" in labels[1]
    assert labels[0][:5] != labels[1][:5]


def test_on_a_terminal_long_lines_are_broken_between_words(said):
    made = said(columns=60)
    made.console.error(f"trainer 0 exited {'and so on ' * 20}see /a/path/that/is/longer/than/{'x' * 60}")
    lines = made.err.splitlines()
    assert len(lines) > 3
    assert all(len(line) <= 60 or " " not in line.strip() for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])


def test_elsewhere_they_stay_whole(said):
    made = said()
    made.console.error("word " * 100)
    assert len(made.err.splitlines()) == 1


def test_names_of_files_that_are_no_text(said):
    made = said()
    made.console.info("log \udcff.log")
    assert made.err.endswith("log \udcff.log\n")


# ---- who wants colour: nobody here is a terminal


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
        ({"FORCE_COLOR": ""}, False),
    ],
)
def test_who_wants_colour(environ, wanted):
    assert wants_colour(environ, 1, 2) is wanted


# ---- An output that never blocks: real pipes, files, terminals and sockets.

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


@pytest.fixture
def never():
    """A descriptor that never becomes readable."""
    read, write = os.pipe()
    yield read
    os.close(read)
    os.close(write)


def test_without_a_loop_draining_writes_the_rest(pipe, never):
    sink = Sink(pipe["write"])
    sink.write(MORE_THAN_A_PIPE)
    received = []
    reader = threading.Thread(target=lambda: received.append(read_all(pipe["read"], len(MORE_THAN_A_PIPE))))
    reader.start()
    sink.drain(never)
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


def test_a_reader_that_has_gone_is_written_to_no_more(pipe, loop, never):
    sink = Sink(pipe["write"])
    os.close(pipe["read"])
    pipe["read"] = None
    sink.write(b"x\n")
    assert sink.closed
    sink.write(b"y\n")
    assert sink.room
    sink.drain(never)


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


def test_a_full_disk_loses_output_and_no_more(loop, never):
    with open("/dev/full", "wb", buffering=0) as full:  # noqa: PTH123
        sink = Sink(full.fileno())
        sink.attach(loop, loop.stop)
        sink.write(b"lost\n")
        sink.drain(never)
        assert not sink.closed
        assert sink.room


def test_a_full_disk_is_told_once_on_the_other_output(loop, tmp_path):
    with open("/dev/full", "wb", buffering=0) as full, (tmp_path / "err").open("wb") as err:  # noqa: PTH123
        sink = Sink(full.fileno(), Sink(err.fileno()))
        sink.attach(loop, loop.stop)
        for _ in range(3):
            sink.write(b"lost\n")
    (line,) = (tmp_path / "err").read_text().splitlines()
    assert line.startswith("LAUNCH WARNING stdout: No space left on device; ")


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


def a_full_disk():
    """Between an output and an error that differ."""
    full = os.open("/dev/full", os.O_WRONLY)
    read, write = os.pipe()
    os.dup2(full, 1)
    os.dup2(write, 2)
    out, _ = sinks()
    out.write(b"lost\n")
    assert b"No space left on device" in os.read(read, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("case", [one_file_for_both, two_files, a_full_disk])
def test_two_outputs_that_are_one_file_have_one_writer(case):
    isolated(case)
