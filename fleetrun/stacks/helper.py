"""Collects the stacks of containers when a job hangs, in a helper process: the launcher's loop never waits
for a process that hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence

from fleetrun.errors import LaunchError
from fleetrun.host.interpreter import helper_command, helper_environment
from fleetrun.pod.companion import Companion
from fleetrun.pod.container import Container
from fleetrun.pod.hangs import HangWatch
from fleetrun.pod.loop import Loop
from fleetrun.pod.process import Exit
from fleetrun.stacks.frames import Target

# ---- Collecting stacks in a helper process

WITHIN = 20.0
"""Seconds for all stacks together."""

_MORE = 10.0  # for a slow machine to start that process, and to ask a process itself
_MOST_LINES = 20
_LONGEST = 500


class Taker:
    """One for a launch. `companions` gets the pid of the process while it runs, which `argv` starts; `why`
    is printed above the stacks.
    """

    def __init__(self, loop: Loop, companions: set[int], why: str, argv: Sequence[str] = ()) -> None:
        self._argv = argv or helper_command("fleetrun.stacks")
        self._loop = loop
        self._companions = companions
        self._why = why

    def take(
        self, containers: Sequence[Container], then: Callable[[tuple[str, ...]], None]
    ) -> Callable[[], None]:
        """Begin; `then` gets a line for each place where processes are, or why that is not known. Returns a
        function that cancels it.
        """
        return _Taking(self._loop, self._companions, then).begin(self._argv, self._request(containers))

    def _request(self, containers: Sequence[Container]) -> bytes:
        targets = [target_of(each).as_json() for each in containers if each.process is not None]
        said = {"targets": targets, "why": self._why, "within": WITHIN}
        return json.dumps(said).encode() + b"\n"


def target_of(container: Container) -> Target:
    spec = container.spec
    assert container.process is not None
    return Target(
        role=spec.label or str(spec.role),
        rank=spec.rank,
        title=spec.title,
        pid=container.process.pid,
        log=str(spec.log),
        mark=spec.mark.partition("=")[2],
    )


class _Taking:
    """One time."""

    def __init__(self, loop: Loop, companions: set[int], then: Callable[[tuple[str, ...]], None]) -> None:
        self._loop = loop
        self._companions = companions
        self._then: Callable[[tuple[str, ...]], None] | None = then
        self._companion: Companion | None = None
        self._last = b""
        self._limit = loop.after(WITHIN + _MORE, self._too_long)

    def begin(self, argv: Sequence[str], request: bytes) -> Callable[[], None]:
        try:
            self._companion = Companion(
                self._loop,
                self._companions,
                argv,
                helper_environment(os.environ),
                heard=self._heard,
                ended=self._ended,
            )
        except LaunchError as error:
            why = f"the stacks could not be taken: {error.message}"
            self._loop.after(0.0, lambda: self._finish((why,)))
        else:
            self._companion.write(request)
        return self._call_off

    def _heard(self, line: bytes) -> None:
        self._last = line

    def _ended(self, exit: Exit) -> None:
        """Its exit code is not asked: the line counts."""
        self._companion = None
        with contextlib.suppress(ValueError, TypeError, LookupError):
            lines = json.loads(self._last)["stacks"]
            self._finish(tuple(str(line)[:_LONGEST] for line in lines[:_MOST_LINES]))
            return
        said = self._last.decode("utf-8", "backslashreplace")[:_LONGEST]
        self._finish((f"the stacks could not be taken: {said or exit}",))

    def _too_long(self) -> None:
        self._kill()
        self._finish((f"the stacks could not be taken within {WITHIN + _MORE:g} s",))

    def _finish(self, lines: tuple[str, ...]) -> None:
        self._limit.cancel()
        if self._then is not None:
            then, self._then = self._then, None
            then(lines)

    def _call_off(self) -> None:
        self._then = None
        self._limit.cancel()
        self._kill()

    def _kill(self) -> None:
        if self._companion is not None:
            companion, self._companion = self._companion, None
            companion.close()


# ---- --hang_timeout


def watch_for_hangs(
    loop: Loop, companions: set[int], limit: float, tell: Callable[[tuple[str, ...]], None]
) -> HangWatch:
    """`companions` are helper processes of the launcher, `limit` the seconds of silence; `tell` is
    `HangWatch`'s.
    """
    why = f"no sign of life for {limit:g} s (--hang_timeout)"
    return HangWatch(loop, limit, Taker(loop, companions, why).take, tell)
