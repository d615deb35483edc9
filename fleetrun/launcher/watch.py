"""Start the processes again when their script or one of their own modules changes (--watch)."""

from __future__ import annotations

import os
import stat
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from fleetrun.console.text import printable
from fleetrun.envs.channels import FILES_SUFFIX, PROBE_VARIABLE
from fleetrun.envs.contract import Role
from fleetrun.launcher.parts import Event, Launch, Part, Reach
from fleetrun.pod.container import Pod
from fleetrun.pod.events import Restarting
from fleetrun.pod.loop import Timer
from fleetrun.pod.zygote import script_of

_REST = 0.06  # seconds between two looks
_SETTLE = 0.03  # seconds without another change, because editors write a file in several steps
_MISSING = -1


class Watch(Part):
    """A part of a launch with --watch. States are modification times in nanoseconds."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        self._launch = launch
        self._pod: Pod | None = None
        self._known: Mapping[str, int] = {}
        """The states that the processes have read, or will read, by path."""
        self._last: Mapping[str, int] = {}
        """The states at the last look."""
        self._handled: Mapping[str, int] = {}
        """The changes that led to a restart or to an error."""
        self._timer = Timer()

    def set_pod(self, pod: Pod, restarts: int) -> None:
        self._pod = pod
        self._renew()
        self._timer.cancel()
        self._look()

    def handle(self, event: Event) -> None:
        if isinstance(event, Restarting):
            self._renew()

    def close(self, urgent: int) -> None:
        self._timer.cancel()

    def _renew(self) -> None:
        """Expect that processes which start now read all files. Opening a file makes a network file system
        check its state, as the processes will.
        """
        assert self._pod is not None
        paths = {*self._known, *(script_of(each.spec.argv) for each in self._pod.containers)}
        for path in paths:
            with suppress(OSError):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        self._known = _states(paths)
        self._handled = {}

    def _look(self) -> None:
        """Look for changes, until the states are the same twice. A missing file is no change."""
        known = self._known = {**self._noted(), **self._known}
        states = _states(known)
        changed = {path: now for path, now in states.items() if now not in (_MISSING, known[path])}
        settled = states == self._last
        self._last = states
        if settled and changed and changed != self._handled and self._answer(changed):
            self._handled = changed
        self._timer = self._launch.loop.after(_REST if settled else _SETTLE, self._look)

    def _noted(self) -> dict[str, int]:
        """Return the states of the modules that the processes have imported."""
        found: dict[str, int] = {}
        for each in self._pod.containers if self._pod is not None else ():
            with suppress(OSError, ValueError):
                notes = Path(each.spec.env[PROBE_VARIABLE] + FILES_SUFFIX).read_bytes()
                for line in notes.splitlines():
                    state, path = line.split(b" ", 1)
                    found.setdefault(os.fsdecode(path), int(state))
        return found

    def _answer(self, changed: Mapping[str, int]) -> bool:
        """Restart, or show why not. Return False if the job cannot restart now."""
        for path in changed:
            try:
                if path.endswith(".py"):
                    _check_syntax(path)
            except OSError:
                return False
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self._launch.console.error(f"no restart, because {_named(path)} does not compile:")
                lines = "".join(traceback.format_exception_only(error)).splitlines()
                self._launch.console.block([printable(each) for each in lines], level="ERROR")
                return True
        assert self._pod is not None
        there = [each for each in self._pod.containers if each.spec.role is not Role.EVALUATOR]
        name = next((each for each in there if each.alive), there[0]).spec.name
        for path in changed:  # Python compares sizes and whole seconds, and two saves may share both
            with suppress(OSError):
                Path(cache_from_source(path)).unlink()
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return not self._launch.interrupts.restart(name, f"a change of {_named(next(iter(changed)))}{more}")


def _states(paths: Mapping[str, int] | set[str]) -> dict[str, int]:
    """Return the states of files. The time of a directory changes with any file in it, and a pipe blocks."""
    found = dict.fromkeys(paths, _MISSING)
    for path in paths:
        with suppress(OSError):
            state = os.stat(path)  # noqa: PTH116 - many times a second
            if stat.S_ISREG(state.st_mode):
                found[path] = state.st_mtime_ns
    return found


def _check_syntax(path: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _named(path: str) -> str:
    with suppress(OSError):  # the directory was deleted
        path = path.removeprefix(f"{Path.cwd()}/")
    return printable(path)
