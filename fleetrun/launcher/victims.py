"""Keep tracebacks of victims off the console. A victim is a rank that lost a connection because another rank
failed.
"""

from __future__ import annotations

import re
from functools import partial

from fleetrun.aliases import Callback, Integers, ShowText
from fleetrun.envs.contract import Role
from fleetrun.launcher.parts import Event, Part
from fleetrun.pod.container import Ended
from fleetrun.pod.events import Restarting, Verdict
from fleetrun.pod.logs import Emit
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.policy import is_symptom
from fleetrun.pod.process import Exit

_HEADER = b"Traceback (most recent call last):"
_COMPLETE = rb"(?m)^(?:\[rank\d+\]: )?+(?!Traceback )\S.*\n\s*\Z"  # compiled when it is needed
"""The last line of a traceback. torch marks the lines of a traceback with their rank."""
_PATIENCE = 3.0  # seconds for a process to exit after it printed a traceback
_MOST = 64 * 1024  # bytes


class Victims(Part):
    """A buffer that holds a traceback until its process has ended and the pod restarts or ends. The log has
    the traceback earlier.

    The traceback is shown after `_PATIENCE` if the process continues. It is shown immediately if its error
    cannot come from another process.
    """

    def __init__(self, loop: Loop, report: ShowText, catch_up: Callback) -> None:
        """Make an empty buffer. `catch_up` reads the new lines of the logs."""
        self._loop = loop
        self._report = report
        self._catch_up = catch_up
        self._held: dict[str, tuple[bytes, Emit, Timer]] = {}
        self._ended: dict[str, Ended] = {}
        self._failed = False
        self._named: Integers = ()
        """The ranks that the diagnosis names."""

    def hold(self, name: str, emit: Emit) -> Emit:
        """Return a function that receives the output of a process, and passes it on to `emit`."""
        return partial(self._take, name, emit)

    def _take(self, name: str, emit: Emit, lines: bytes) -> None:
        held, _, timer = self._held.pop(name, (b"", emit, None))
        header = 0 if held else lines.find(_HEADER)
        begin = lines.rfind(b"\n", 0, header) + 1 if header >= 0 else len(lines)
        if begin:
            emit(lines[:begin])
        held += lines[begin:]
        if not held:
            return
        timer = timer or self._loop.after(_PATIENCE, partial(self._show, name))
        self._held[name] = held, emit, timer
        complete = re.search(_COMPLETE, held)
        if len(held) > _MOST or (complete and not is_symptom(Exit(1), held.decode(errors="replace"))):
            self._show(name)

    def _show(self, name: str) -> None:
        if name in self._held:
            lines, emit, timer = self._held.pop(name)
            timer.cancel()
            emit(lines)

    def blame_another_node(self) -> None:
        """Record that a process of another node failed first."""
        self._failed = True

    def handle(self, event: Event) -> None:
        match event:
            case Ended() if not event.ok:
                self._catch_up()
                name = event.spec.name
                if event.asked is None and not is_symptom(event.exit, event.message):
                    self._failed |= event.spec.role is not Role.EVALUATOR
                    self._show(name)
                else:
                    self._ended[name] = event
                    if name in self._held:
                        self._held[name][2].cancel()
            case Verdict():
                self._named = event.ranks
            case Restarting():
                self.settle()

    def settle(self) -> None:
        """Show the held tracebacks. If another process failed first, show only the path of the log."""
        for name in list(self._held):
            ended = self._ended.get(name)
            if ended is not None and (self._failed or self._named) and ended.spec.rank not in self._named:
                del self._held[name]
                self._report(
                    f"{ended.spec.title} failed because of another process; its traceback is in "
                    f"{ended.spec.log}"
                )
            self._show(name)
        self._ended, self._failed, self._named = {}, False, ()
