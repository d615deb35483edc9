"""Plug-ins: schedulers, exporters, notifiers and commands by their names, of fleetrun itself and of installed
packages, which declare them as entry points of the group `fleetrun.KIND`.

Those of fleetrun are a table, so that no launch has to read what is installed, and a copy of the sources
works. They come first: no package replaces one of them. Commands are also programs `fleetrun-NAME` on PATH.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

from fleetrun.aliases import Strings, Texts
from fleetrun.errors import LaunchError, PluginError, similar
from fleetrun.values import frozen

ASKING: Texts = {
    "ps": "List the jobs that run on this machine.",
    "status": "Show the state of a job: processes, progress, last log lines.",
    "top": "Watch a job live: all ranks, their stacks and logs; restart and stop.",
    "logs": "Print the logs of a job, merged by time.",
    "stop": "Stop a job.",
    "why": "Say which rank the others wait for, in a job that makes no progress.",
    "stacks": "Print the Python stacks of all processes of a job.",
    "profile": "Write where a process spends its time, as a flame graph.",
    "report": "Report how a job ended, and why.",
    "history": "List the jobs that ran with their logs here: when, how long, how each ended.",
    "prune": "Delete logs and records of old jobs.",
    "bundle": "Pack all that is known of a job into one file, to ask for help.",
    "plot": "Plot loss and speed of a job over time, and when its processes ran.",
    "serve": "Answer requests with a saved model, over HTTP.",
    "tables": "Inspect the tables of parameter servers, of a job or in a save.",
    "doctor": "Check machines before a launch.",
    "nodes": "List the faults of machines, and which are left out for them.",
    "init": "Write a commented job file.",
    "token": "Print a new secret for a job.",
    "help": "Explain a topic or a command.",
}
"""Commands that launch no job."""

LAUNCHING: Texts = {
    "run": "Launch SCRIPT. The word may be left out.",
    "up": "Launch the job of a job file.",
    "again": "Launch an earlier job again, with the same settings.",
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
"""Of each kind what fleetrun has itself, as `module:attribute`, the syntax of entry points."""


@frozen
class Plugin:
    """`package` is the distribution that has it, with its version; empty for those of fleetrun."""

    kind: str
    name: str
    target: str
    package: str = ""

    def __str__(self) -> str:
        """`the scheduler 'lsf' of fleetrun-lsf 1.0`"""
        return f"the {self.kind.removesuffix('s')} {self.name!r} of {self.package or 'fleetrun'}"

    def load(self, has: str) -> Any:
        """The object itself. It must have an attribute `has` that can be called (`__call__`: be callable).

        Raises PluginError, whatever the code of the package raises.
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
                hint=f"Install {self.package.partition(' ')[0]} again, or uninstall it.",
            ) from error
        if not callable(getattr(found, has, None)):
            what = "cannot be called" if has == "__call__" else f"has no {has}()"
            raise PluginError(f"{self} cannot be used: {self.target} {what}", hint="See docs/plugins.md.")
        return found

    def failed(self, error: Exception) -> PluginError:
        """For a bug in the code of another package, which is not to be taken for one in fleetrun."""
        return PluginError(f"{self} failed: {type(error).__name__}: {error}")


def find(kind: str, name: str) -> Plugin | None:
    """Raises PluginError where two packages have one of this name."""
    target = IN_TREE[kind].get(name)
    if target is not None:
        return Plugin(kind, name, target)
    found = _installed(kind).get(name, ())
    if len(found) > 1:
        packages = " and ".join(each.package for each in found)
        raise PluginError(
            f"there are {len(found)} {kind} called {name!r}: of {packages}", hint="Uninstall one of them."
        )
    return found[0] if found else None


def load(kind: str, name: str, has: str) -> Any:
    """`find` and `Plugin.load`. Raises PluginError also where there is none."""
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
    """All that there are, those of fleetrun first."""
    return (*IN_TREE[kind], *others(kind))


def others(kind: str) -> Texts:
    """Those of other packages by name, sorted, and which packages have them."""
    found = {name: ", ".join(each.package for each in some) for name, some in _installed(kind).items()}
    return dict(sorted((name, package) for name, package in found.items() if name not in IN_TREE[kind]))


@cache
def _installed(kind: str) -> Mapping[str, tuple[Plugin, ...]]:
    found: dict[str, dict[str, Plugin]] = {}
    for distribution in _distributions():
        try:
            owner = distribution.metadata["Name"]
            package = f"{owner} {distribution.version}"
            # Without a name: pip was killed while it removed the package.
            points = tuple(distribution.entry_points.select(group=f"fleetrun.{kind}")) if owner else ()
        except Exception:  # noqa: BLE001  (broken metadata: other commands must work)
            continue
        for each in points:
            # A package that is on the path twice is one, and its first copy counts.
            found.setdefault(each.name, {}).setdefault(owner, Plugin(kind, each.name, each.value, package))
    return {name: tuple(some.values()) for name, some in found.items()}


@cache
def _distributions() -> tuple[Any, ...]:
    """The installed packages that declare a plug-in of any kind."""
    found = [path for folder in dict.fromkeys(sys.path) for path in _declaring(folder or os.curdir)]
    if not found:
        return ()
    from importlib.metadata import Distribution  # late: it takes half as long as a launch

    return tuple(map(Distribution.at, found))


def _declaring(folder: str) -> Iterator[str]:
    """The folders of metadata in a folder of `sys.path` that name a group of ours."""
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
    """Whether it can be the name of a command: no option, no path, no `train.py`."""
    return re.fullmatch(_WORD, name) is not None


def is_command(word: str) -> bool:
    """Whether another package, or a program `fleetrun-WORD` on PATH, is this command. Reads what is installed
    only for what can be the name of one.
    """
    if not _is_word(word):
        return False
    return program(word) is not None or word in others("commands")


def program(name: str) -> str | None:
    """The path of `fleetrun-NAME`."""
    paths = (os.path.join(folder or ".", f"fleetrun-{name}") for folder in _folders())  # noqa: PTH118 - many
    return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), None)  # noqa: PTH113


def programs() -> Texts:
    """The path of each `fleetrun-NAME`, sorted by name."""
    found: dict[str, str] = {}
    for folder in _folders():
        try:
            present = sorted(os.listdir(folder or "."))  # noqa: PTH208 - it is the faster one
        except OSError:
            continue
        for each in present:
            name = each.removeprefix("fleetrun-")
            if name != each and _is_word(name) and name not in found and program(name):
                found[name] = os.path.join(folder or ".", each)  # noqa: PTH118
    return dict(sorted(found.items()))


def _folders() -> list[str]:
    return os.environ.get("PATH", os.defpath).split(os.pathsep)


def other_commands() -> Texts:
    """Those that fleetrun does not have itself, by name, and what each is. An entry point comes before a
    program of its name.
    """
    found = {name: f"The program {path}." for name, path in programs().items()}
    found |= {name: f"Of the package {package}." for name, package in others("commands").items()}
    return {
        name: found[name]
        for name in sorted(found)
        if _is_word(name) and name not in ASKING and name not in LAUNCHING
    }


def described(kind: str, name: str, error: BaseException) -> str:
    """What a plug-in has raised, or its lookup, as text."""
    if isinstance(error, PluginError):
        return str(error)
    return f"the {kind.removesuffix('s')} {name!r} failed: {type(error).__name__}: {error}"


def guarded(plugin: Plugin, call: Callable[[], Any], but: tuple[type[Exception], ...] = ()) -> Any:
    """What this call of a plug-in returns. A bug in another package is told as that: its traceback on stderr,
    then PluginError. LaunchErrors, a broken pipe and the exceptions `but` pass.
    """
    try:
        return call()
    except Exception as error:
        if not plugin.package or isinstance(error, (LaunchError, BrokenPipeError, *but)):
            raise
        import traceback  # late: for bugs only

        traceback.print_exc()
        raise plugin.failed(error) from error
