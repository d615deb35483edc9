"""A process companions a job: lines to it and from it, whatever it does with them; and it is nobody's
stray.
"""

import os
import signal
import subprocess

import pytest

from fleetrun.errors import LaunchError
from fleetrun.pod import companion
from fleetrun.pod import process as processes
from fleetrun.pod.companion import Companion
from fleetrun.pod.loop import Loop
from fleetrun.pod.process import Exit
from tests.support.isolated import isolated
from tests.support.traces import state_of, wait_until

ENVIRONMENT = {"PATH": os.environ["PATH"]}
DEAF = 100.0
"""Seconds from SIGKILL to the end of one that a busy machine lets wait."""
LINE = b"x" * 999 + b"\n"


class Made:
    """A companion in a loop of its own, and what came of it."""

    def __init__(self, *argv, keep=()):
        self.loop = Loop()
        self.companions = set()
        self.lines = []
        self.exits = []
        self.enough = lambda: False
        self.it = Companion(
            self.loop, self.companions, argv, ENVIRONMENT, received=self._heard, ended=self._ended, keep=keep
        )

    def _heard(self, line):
        self.lines.append(line)
        self._look()

    def _ended(self, exit):
        self.exits.append(exit)
        self._look()

    def _look(self):
        if self.enough():
            self.loop.stop()

    def until(self, condition):
        self.enough = condition
        bound = self.loop.after(60, lambda: pytest.fail(f"{self.lines[-5:]} {self.exits}"))
        if not condition():
            self.loop.run()
        bound.cancel()


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(companion, "_DEAF", DEAF)
    made = []

    def one(*argv, **options):
        made.append(Made(*argv, **options))
        return made[-1]

    yield one
    for each in made:
        each.it.close()
        each.loop.close()


def test_lines_go_there_and_come_back(make):
    made = make("cat")
    made.it.write(b"one\n")
    made.it.write(b"two\n")
    made.until(lambda: len(made.lines) == 2)
    assert made.lines == [b"one", b"two"]
    assert made.companions == {made.it.pid}
    assert made.it.alive


def test_its_end_is_told_with_its_last_words(make):
    made = make("sh", "-c", "echo first; echo last words >&2; printf 'no newline'; exit 3")
    made.until(lambda: made.exits)
    assert made.exits == [Exit(3)]
    assert made.lines == [b"first", b"last words", b"no newline"]
    assert made.companions == set()
    assert not made.it.alive


def test_what_is_written_after_its_end_is_let_go(make):
    made = make("true")
    made.until(lambda: made.exits)
    made.it.write(LINE)
    assert made.it.close() is True


def test_one_that_has_closed_its_input_is_no_trouble(make):
    made = make("sh", "-c", "exec <&-; echo closed; exec sleep 1000")
    made.until(lambda: made.lines)
    for _ in range(10):
        made.it.write(LINE)
    assert made.it.close() is False


def test_one_that_reads_nothing_holds_up_nobody_and_gets_whole_lines_only(make):
    made = make("sh", "-c", "read go; cat")
    for _ in range(3000):
        made.it.write(LINE)
    assert made.it.lost > 1000
    made.it.write(b"y" * (2 << 20))
    lost = made.it.lost
    assert made.it.close(60.0) is True
    assert set(made.lines) == {LINE[:-1]}
    assert len(made.lines) == 3001 - lost - 1


def test_closing_waits_for_what_it_has_to_say(make):
    made = make("sh", "-c", "read a; read b; echo got $a $b")
    made.it.write(b"1\n")
    made.it.close_input()
    assert made.it.close(60.0) is True
    assert made.lines == [b"got 1"]
    assert made.exits == [], "whoever closes it need not be told"
    assert made.it.exit == Exit(0)
    assert made.it.close() is True, "twice"


def test_one_that_does_not_end_is_killed(make):
    made = make("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1000; done")
    made.until(lambda: made.lines)
    assert made.it.finish(0.0) is False
    assert made.it.alive
    assert made.it.close(0.0) is False
    assert made.it.exit == Exit(-signal.SIGKILL)
    assert made.companions == set()


def test_one_that_is_deaf_in_the_kernel_is_not_waited_for(make, monkeypatch):
    made = make("sleep", "1000")
    with monkeypatch.context() as patch:
        patch.setattr(companion, "_DEAF", 0.01)
        patch.setattr(made.it._process, "signal_group", lambda number: None)
        assert made.it.close() is False
    assert (made.it.alive, made.companions) == (True, {made.it.pid})

    def look():
        made.loop.after(0.002, look) if made.it.alive else made.loop.stop()

    os.kill(made.it.pid, signal.SIGKILL)
    look()
    made.loop.run()
    assert (made.it.exit, made.exits, made.companions) == (Exit(-signal.SIGKILL), [], set())


def test_somebody_in_a_hurry_does_not_wait(make):
    made = make("sleep", "1000")
    read, write = os.pipe()
    os.close(write)
    assert made.it.close(1e6, read) is False
    os.close(read)


def test_a_line_without_end_is_bounded(make):
    made = make("sh", "-c", "head -c 3000000 /dev/zero; echo; echo next")
    made.until(lambda: b"next" in made.lines)
    assert len(made.lines[0]) < 1_500_000


def test_a_long_line_is_whole(make):
    """What a rank with many groups tells of itself."""
    made = make("sh", "-c", "head -c 500000 /dev/zero; echo; echo next")
    made.until(lambda: b"next" in made.lines)
    assert len(made.lines[0]) == 500_000


def test_a_descriptor_is_kept(make):
    read, write = os.pipe()
    made = make("sh", "-c", f"echo told > /dev/fd/{write}", keep=[write])
    os.close(write)
    made.until(lambda: made.exits)
    assert os.read(read, 100) == b"told\n"
    os.close(read)


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        (["/nowhere/program"], LaunchError), (["/bin/true", "a\0b"], ValueError),
        (["/bin/true", "\ud800"], ValueError),
    ],
    ids=["no program", "null", "surrogate"],
)  # fmt: skip
def test_one_that_cannot_be_started_leaves_nothing(argv, kind):
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    companions = set()
    with pytest.raises(kind, match=r"the program does not exist|embedded null|surrogates"):
        Companion(Loop(), companions, argv, ENVIRONMENT, received=print, ended=print)
    assert companions == set()
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "the loop's"  # noqa: PTH208


# ---- sweeping up, in a sub-reaper of its own


def companions_are_no_strays():
    loop, companions = Loop(), set()
    made = Companion(loop, companions, ["sleep", "1000"], ENVIRONMENT, received=print, ended=print)
    stray = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    stray.returncode = 0  # the sweep reaps it
    processes.ask_strays({*companions, os.getpgid(0)})
    wait_until(lambda: state_of(stray.pid) in ("Z", ""))
    processes.reap_adopted(companions)
    assert state_of(made.pid) not in ("Z", "")
    second = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    second.returncode = 0
    assert processes.end_descendants(0.0, but=companions) == 1
    assert state_of(second.pid) == ""
    assert not processes.has_children(companions)
    assert processes.has_children()
    assert made.alive
    assert processes.end_descendants(1000.0, but=companions) == 0
    assert made.close() is False


def a_companion_that_ended_is_left_to_its_handle():
    made = Companion(
        Loop(), companions := set(), ["sh", "-c", "exit 7"], ENVIRONMENT, received=print, ended=print
    )
    wait_until(lambda: state_of(made.pid) == "Z")
    assert not processes.has_children(companions)
    processes.end_descendants(0.0, but=companions)
    assert made.finish(60.0)
    assert made.exit == Exit(7)


@pytest.mark.slow
@pytest.mark.parametrize("case", [companions_are_no_strays, a_companion_that_ended_is_left_to_its_handle])
def test_sweeping_up(case):
    isolated(case)
