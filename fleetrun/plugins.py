"""Find plug-ins by name: schedulers, exporters, notifiers and commands. fleetrun has its own, and installed
packages declare others as entry points of the group `fleetrun.KIND`.

fleetrun's own plug-ins are in a table. A launch therefore does not have to read the installed packages, and a
copy of the sources works. The table comes first, so a package cannot replace its plug-ins. Programs named
`fleetrun-NAME` on PATH are commands too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NoReturn, TypeVar

from fleetrun.aliases import Strings, Texts
from fleetrun.errors import LaunchError, PluginError, similar
from fleetrun.values import frozen

T = TypeVar("T")

ASKING: Texts = {
    "ps": "List the jobs that run on this node.",
    "status": "Show the state of a job: processes, progress, last output.",
    "top": "Watch a job live: ranks, stacks, logs, restart and stop.",
    "logs": "Print the logs of a job, merged by time.",
    "stop": "Stop a job.",
    "why": "Show which rank a stuck job waits for.",
    "stacks": "Print the Python stacks of all processes of a job.",
    "debug": "Open pdb in a process that waits at a breakpoint.",
    "profile": "Record a flame graph of a running process.",
    "report": "Report how a job ended, and why.",
    "history": "List the jobs of a log directory: when, how long, how each ended.",
    "prune": "Delete logs and records of old jobs.",
    "bundle": "Collect everything about a job into one file, for a bug report.",
    "plot": "Plot loss and speed of a job over time, and when its processes ran.",
    "serve": "Serve an exported model over HTTP and gRPC.",
    "tables": "Inspect the tables of a job's parameter servers, or saved tables.",
    "doctor": "Check nodes before a job.",
    "nodes": "List the faults of nodes, and which nodes jobs exclude.",
    "init": "Write a commented job file.",
    "token": "Print a new token for a job.",
    "help": "Explain a topic or a command.",
}
"""Commands that launch no job."""

LAUNCHING: Texts = {
    "run": "Start SCRIPT. You can leave out the word `run`.",
    "up": "Start the job of a job file.",
    "again": "Start an earlier job again, with the same settings.",
}
"""Commands that launch a job."""

IN_TREE: Mapping[str, Texts] = {
    "schedulers": {
        name: f"fleetrun.schedulers.{name}:ENGINE" for name in ("slurm", "srun", "kubernetes", "ssh")
    },
    "exporters": {
        "tensorboard": "fleetrun.exporters.tensorboard:exporter",
        "prometheus": "fleetrun.exporters.prometheus:Prometheus",
    },
    "notifiers": {
        "webhook": "fleetrun.notifiers.webhook:Webhook",
        "command": "fleetrun.notifiers.command:Command",
    },
    "commands": {
        name: f"fleetrun.commands.{name}:command" for name in (*ASKING, *LAUNCHING) if name != "run"
    },
}
"""fleetrun's own plug-ins of each kind, as `module:attribute`, the syntax of entry points."""


@frozen
class Plugin:
    """A plug-in of fleetrun or of an installed package."""

    kind: str
    name: str
    target: str
    package: str = ""  # the distribution with its version, or empty for fleetrun's own

    def __str__(self) -> str:
        """`the scheduler 'lsf' of fleetrun-lsf 1.0`"""
        return f"the {self.kind.removesuffix('s')} {self.name!r} of {self.package or 'fleetrun'}"

    def load(self, has: str) -> Any:
        """Import and return the object. It must have a callable attribute `has` (`__call__`: the object is
        callable).

        Raises PluginError for every error in the code of another package.
        """
        module, _, attribute = self.target.partition(":")
        try:
            found: Any = import_module(module.strip())
            for part in attribute.split("[")[0].strip().split("."):  # `module:attribute [extra]`
                found = getattr(found, part)
        except (Exception, SystemExit) as error:
            if not self.package:
                raise
            raise PluginError(
                f"{self} cannot be loaded: {type(error).__name__}: {error}",
                hint=f"Reinstall {self.package.partition(' ')[0]}, or uninstall it.",
            ) from error
        if not callable(getattr(found, has, None)):
            what = "cannot be called" if has == "__call__" else f"has no {has}()"
            raise PluginError(f"{self} cannot be used: {self.target} {what}", hint="See docs/plugins.md.")
        return found


def find(kind: str, name: str) -> Plugin | None:
    """Find a plug-in. Raises PluginError if two packages have one of this name."""
    target = IN_TREE[kind].get(name)
    if target is not None:
        return Plugin(kind, name, target)
    found = _installed(kind).get(name, ())
    if len(found) > 1:
        packages = " and ".join(each.package for each in found)
        raise PluginError(
            f"{len(found)} {kind} have the name {name!r}, in {packages}", hint="Uninstall one of them."
        )
    return found[0] if found else None


def load(kind: str, name: str, has: str) -> Any:
    """Find and load a plug-in. Raises PluginError, also if there is none of this name."""
    found = find(kind, name)
    if found is None:
        _refuse(kind, name)
    return found.load(has)


def _refuse(kind: str, name: str) -> NoReturn:
    known = names(kind)
    meant = similar(name, known)
    hint = f"Did you mean {meant[0]}?" if meant else f"There are: {', '.join(known)}."
    raise PluginError(f"there is no {kind.removesuffix('s')} called {name!r}", hint=hint)


def names(kind: str) -> Strings:
    """Return the names of all plug-ins of a kind, with fleetrun's own first."""
    return (*IN_TREE[kind], *others(kind))


def others(kind: str) -> Texts:
    """Return the sorted names of other packages' plug-ins, each with the names of its packages."""
    found = {name: ", ".join(each.package for each in some) for name, some in _installed(kind).items()}
    return dict(sorted((name, package) for name, package in found.items() if name not in IN_TREE[kind]))


@cache
def _installed(kind: str) -> Mapping[str, tuple[Plugin, ...]]:
    found: dict[str, dict[str, Plugin]] = {}
    for distribution in _distributions():
        try:
            owner = distribution.metadata["Name"]
            package = f"{owner} {distribution.version}"
            # A package without a name is left behind when pip is killed during removal.
            points = tuple(distribution.entry_points.select(group=f"fleetrun.{kind}")) if owner else ()
        except Exception:  # noqa: BLE001  (broken metadata: other commands must work)
            continue
        for each in points:
            # A package may be on the path twice. Its first copy counts.
            found.setdefault(each.name, {}).setdefault(owner, Plugin(kind, each.name, each.value, package))
    return {name: tuple(some.values()) for name, some in found.items()}


@cache
def _distributions() -> tuple[Any, ...]:
    """Return the installed packages that declare a plug-in of any kind."""
    found = [path for folder in dict.fromkeys(sys.path) for path in _declaring(folder or os.curdir)]
    if not found:
        return ()
    from importlib.metadata import Distribution  # late: it takes half as long as a launch

    return tuple(map(Distribution.at, found))


def _declaring(folder: str) -> Iterator[str]:
    """Yield the metadata directories in a directory of `sys.path` that declare a plug-in group of
    fleetrun.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208  (a command may wait for this)
    except OSError:
        return
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            try:
                with open(f"{folder}/{name}/entry_points.txt", "rb") as file:  # noqa: PTH123
                    declares = b"[fleetrun." in file.read()
            except OSError:
                continue
            if declares:
                yield f"{folder}/{name}"


# ---- Commands

_WORD = r"[A-Za-z][\w-]*"


def _is_word(name: str) -> bool:
    """Return True if a command can have this name, which excludes options, paths and `train.py`."""
    return re.fullmatch(_WORD, name) is not None


def is_command(word: str) -> bool:
    """Return True if another package or a program `fleetrun-WORD` on PATH provides this command.

    Reads the installed packages only if the word can be a command's name.
    """
    if not _is_word(word):
        return False
    return program(word) is not None or word in others("commands")


def program(name: str) -> str | None:
    """Return the path of `fleetrun-NAME`, or None if no directory of PATH has it."""
    from shutil import which  # late: few launches look for a program

    return which(f"fleetrun-{name}")


def programs() -> Texts:
    """Return the path of each `fleetrun-NAME`, sorted by name."""
    found: dict[str, str] = {}
    for folder in os.get_exec_path():
        try:
            present = os.listdir(folder or ".")  # noqa: PTH208 - it is the faster one
        except OSError:
            continue
        for each in present:
            name = each.removeprefix("fleetrun-")
            if name != each and _is_word(name) and (path := program(name)) is not None:
                found[name] = path
    return dict(sorted(found.items()))


def other_commands() -> Texts:
    """Return the commands of other packages and programs, with a description of each.

    An entry point comes before a program of the same name.
    """
    found = {name: f"The program {path}." for name, path in programs().items()}
    found |= {name: f"A command of the package {package}." for name, package in others("commands").items()}
    return {
        name: found[name]
        for name in sorted(found)
        if _is_word(name) and name not in ASKING and name not in LAUNCHING
    }


def described(kind: str, name: str, error: BaseException) -> str:
    """Describe an error of a plug-in, or of its lookup, as text."""
    if isinstance(error, PluginError):
        return str(error)
    return f"the {kind.removesuffix('s')} {name!r} failed: {type(error).__name__}: {error}"


def guarded(plugin: Plugin, call: Callable[[], T], but: tuple[type[Exception], ...] = ()) -> T:
    """Call a plug-in and return its result.

    For a bug in another package, print its traceback on stderr and raise PluginError, so that users do not
    take it for a bug in fleetrun. LaunchErrors, a broken pipe and the exceptions `but` pass unchanged.
    """
    try:
        return call()
    except Exception as error:
        if not plugin.package or isinstance(error, (LaunchError, BrokenPipeError, *but)):
            raise
        import traceback  # late: for bugs only

        traceback.print_exc()
        raise PluginError(f"{plugin} failed: {type(error).__name__}: {error}") from error
