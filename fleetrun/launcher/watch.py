"""Start the processes again when their script or one of their own modules changes (--watch)."""

from __future__ import annotations

import filecmp
import os
import re
import stat
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

from fleetrun.console.text import printable
from fleetrun.elastic.agent import Assignment
from fleetrun.envs.channels import FILES_SUFFIX, PROBE_VARIABLE, TREE_VARIABLE
from fleetrun.errors import LaunchError
from fleetrun.launcher.parts import Event, Launch, Part, Reach
from fleetrun.pod.container import Pod
from fleetrun.pod.events import RestartAsked, Restarting
from fleetrun.pod.loop import Timer
from fleetrun.pod.zygote import script_of
from fleetrun.schedulers.tree_remote import use

_REST = 0.06  # seconds between two looks
_SETTLE = 0.03  # seconds without another change, because editors write a file in several steps
_MISSING = -1
_TIME = 20  # characters of the time in an edit, in nanoseconds and with a space
_EDIT = re.compile("(?m)^[0-9]{19} [0-9a-f]{32}$")


class Watch(Part):
    """A part of a launch with --watch. States are modification times in nanoseconds.

    With --sync, the processes run in a copy of the code, which never changes. When all nodes have a copy with
    later edits, its name arrives on stdin. The round after a restart by an edit has this name, so that all
    nodes run the same copy. The state of a file that differs in the copy belongs to the edit.
    """

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
        self._tree = os.environ.get(TREE_VARIABLE, "")
        self._edit = "0" * _TIME + self._tree
        """The time of the last edit, and the copy with it. Without --sync, they do not change."""
        if self._tree:
            with suppress(PermissionError):  # /dev/null, in a rank of a job with --sync
                launch.loop.add(0, self._offered)

    def set_pod(self, pod: Pod, restarts: int) -> None:
        self._pod = pod
        self._renew()
        self._timer.cancel()
        self._look()

    def handle(self, event: Event) -> None:
        match event:
            case Assignment():
                self._enter(event.edit)
                self._edit = max(self._edit, event.edit)
            case RestartAsked() if self._pod and event.containers == self._pod.containers:
                self._enter(self._edit)
            case Restarting():
                self._renew()

    def close(self, urgent: int) -> None:
        self._timer.cancel()

    def _renew(self) -> None:
        """Expect that processes which start now read all files. Opening a file makes a network file system
        check its state, as the processes will.

        Remove what Python has compiled from other states. Python compares sizes and whole seconds, and two
        saves may share both. Only now can no process of the last attempt write it again.
        """
        assert self._pod is not None
        known = {**self._noted(), **self._known}
        paths = {*known, *(script_of(each.spec.argv) for each in self._pod.containers)}
        for path in paths:
            with suppress(OSError):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        states = _states(paths)
        for path in paths:
            if states[path] != known.get(path, states[path]):
                with suppress(OSError):
                    Path(cache_from_source(path)).unlink()
        self._known, self._handled = states, {}

    def _look(self) -> None:
        """Look for changes, until the states are the same twice. A missing file is no change."""
        known = self._known = {**self._noted(), **self._known}
        states = _states(known)
        if self._tree:
            states = {**known, **dict.fromkeys(filter(self._differs, known), hash(self._edit))}
        changed = {path: now for path, now in states.items() if now not in (_MISSING, known[path])}
        settled = states == self._last
        self._last = states
        if settled and changed and changed != self._handled and self._answer(changed):
            self._handled = changed
        self._timer = self._launch.loop.after(_REST if settled else _SETTLE, self._look)

    # ---- With --sync

    def _offered(self) -> None:
        if data := os.read(0, 1 << 16):
            self._edit = max(self._edit, *_EDIT.findall(data.decode(errors="replace")))
        else:  # the connection is lost
            self._launch.loop.remove(0)

    def _in_copy(self, path: str) -> str:
        """Return the path of a file in the last copy."""
        return path.replace(self._tree, self._edit[_TIME:])

    def _differs(self, path: str) -> bool:
        other = self._in_copy(path)
        with suppress(OSError):
            return other != path and not filecmp.cmp(path, other, shallow=False)
        return Path(other).is_file()

    def _enter(self, edit: str) -> None:
        """Let the processes that start now run in this copy. Raises LaunchError."""
        tree = edit[_TIME:]
        if tree not in ("", self._tree):
            if not (self._tree and _EDIT.fullmatch(edit)):
                raise LaunchError(f"this node cannot have {edit!r}, the copy of the code that the job uses")
            trees, _, inside = str(Path.cwd()).partition(self._tree)
            # The file of the last copy is closed with its last reference, which is this one.
            self._used = use(Path(trees), tree, inside[1:])
            self._tree, self._known = tree, {}

    # ---- Files

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
                    _check_syntax(self._in_copy(path))
            except OSError:
                return False
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                self._launch.console.error(f"no restart, because {_named(path)} does not compile:")
                lines = "".join(traceback.format_exception_only(error)).splitlines()
                self._launch.console.block([printable(each) for each in lines], level="ERROR")
                return True
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        what = f"a change of {_named(next(iter(changed)))}{more}"
        return not self._launch.interrupts.restart("", what, self._edit)


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
