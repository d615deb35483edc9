"""Tracebacks are held back until the cause is known, in whatever pieces they arrive."""

import pytest

from fleetrun.envs.channels import ErrorRecord
from fleetrun.envs.contract import Role
from fleetrun.launcher.victims import Victims
from fleetrun.pod.container import Ended
from fleetrun.pod.loop import Timer
from fleetrun.pod.process import Exit
from tests.support.pods import spec_of

LOST = b"""Traceback (most recent call last):
  File "train.py", line 7, in <module>
    dist.all_reduce(values)
RuntimeError: Connection closed by peer
"""
WRONG = LOST.replace(b"Connection closed by peer", b"a bad batch")
BY_TORCH = b"".join(b"[rank0]: " + line for line in LOST.splitlines(keepends=True))


class Console:
    def __init__(self) -> None:
        self.timers: list[tuple[float, Timer]] = []
        self.shown = b""
        self.victims = Victims(self, lambda text: None, lambda: None)  # type: ignore[arg-type]
        self.take = self.victims.hold("trainer.0", self._show)

    def after(self, seconds, handler):
        self.timers.append((seconds, Timer(handler)))
        return self.timers[-1][1]

    def _show(self, lines: bytes) -> None:
        self.shown += lines

    def write(self, text: bytes) -> None:
        """As a process prints its traceback: line by line."""
        for line in text.splitlines(keepends=True):
            self.take(line)


def test_other_lines_are_shown_immediately():
    console = Console()
    console.write(b"step 1\nerror: timed out\nstep 2\n")
    assert console.shown == b"step 1\nerror: timed out\nstep 2\n"
    assert console.timers == []


def test_an_error_of_the_process_itself_is_shown_when_it_is_complete():
    console = Console()
    console.write(b"step 1\n" + WRONG)
    assert console.shown == b"step 1\n" + WRONG
    assert not any(timer.pending for _, timer in console.timers)


def test_a_lost_connection_is_shown_once_if_the_process_goes_on():
    for text in (LOST, BY_TORCH):
        console = Console()
        console.write(b"step 1\n" + text + b"trying again\n")
        assert console.shown == b"step 1\n"
        ((seconds, timer),) = console.timers
        assert seconds == 3.0
        timer.fire()
        assert console.shown == b"step 1\n" + text + b"trying again\n"
        console.write(b"step 2\n")
        assert console.shown.endswith(b"trying again\nstep 2\n")


def test_a_traceback_without_an_end_does_not_grow_for_ever():
    console = Console()
    console.write(LOST[:40] + (b"    " + b"x" * 200 + b"\n") * 600)
    assert len(console.shown) > 100_000


@pytest.mark.parametrize(("role", "blamed"), [(Role.TRAINER, True), (Role.EVALUATOR, False)])
def test_an_evaluator_that_fails_first_explains_no_other_traceback(tmp_path, role, blamed):
    console = Console()

    def ended(role: Role, rank: int, message: str) -> Ended:
        spec = spec_of(tmp_path, "exit 1", role, rank=rank)
        record = ErrorRecord(message, "", 2.0)
        return Ended(spec=spec, exit=Exit(1), pid=1, started=1.0, ended=2.0, attempt=0, record=record)

    console.write(LOST)
    console.victims.handle(ended(role, 1, "RuntimeError: a bad batch"))
    console.victims.handle(ended(Role.TRAINER, 0, "RuntimeError: Connection closed by peer"))
    console.victims.settle()
    assert (console.shown == b"") is blamed
