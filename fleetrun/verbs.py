"""The commands besides launching a script: `fleetrun status`, `fleetrun logs`, and those of other packages.
Each is imported when used.

A script or program with the name of a command is launched as `./status`, or as `fleetrun run status`.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from fleetrun import plugins

ASKING: Mapping[str, str] = {
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
    "help": "Explain a topic or a command.",
}
"""Commands that launch no job."""

LAUNCHING: Mapping[str, str] = {
    "run": "Launch SCRIPT. The word may be left out.",
    "up": "Launch the job of a job file.",
    "again": "Launch an earlier job again, with the same settings.",
}
"""Commands that launch a job."""

VERBS: Mapping[str, str] = {**ASKING, **LAUNCHING}

FAMILIES: Mapping[str, Sequence[str]] = {
    "launching": ("run", "up", "init", "doctor", "nodes"),
    "running jobs": ("ps", "status", "top", "logs", "stop", "why", "stacks", "profile"),
    "earlier jobs": ("history", "report", "plot", "again", "bundle", "prune"),
    "models": ("tables", "serve"),
    "other": ("help",),
}
"""The commands as the help groups them."""


def asked(argv: Sequence[str]) -> str | None:
    """The command of this command line, if it launches no job or only its help is wanted."""
    if not argv:
        return None
    if argv[0] in ("-h", "--help"):
        return "help"
    if argv[0] in LAUNCHING:
        return argv[0] if argv[0] != "run" and argv[1:2] in (["--help"], ["-h"]) else None
    return argv[0] if argv[0] in ASKING or plugins.is_command(argv[0]) else None


def answer(verb: str, argv: Sequence[str]) -> int:
    """Run the command; return the exit code. A program takes the place of this process.

    Raises LaunchError.
    """
    if (program := program_of(verb)) is not None:
        _become(program, argv)
    import click

    from fleetrun.errors import UsageError

    asked_for = command(verb)
    gc.enable()  # which was off for the imports
    main = partial(asked_for.main, list(argv), prog_name=f"fleetrun {verb}", standalone_mode=False)
    try:
        found = plugins.find("commands", verb)
        passed = (click.exceptions.Abort, click.ClickException)
        code = main() if found is None else plugins.guarded(found, main, passed)
    except click.exceptions.Abort:
        return 130
    except SystemExit:  # how click reports a broken pipe
        raise BrokenPipeError from None
    except click.ClickException as error:
        hint = f"See fleetrun {verb} --help."
        raise UsageError(error.format_message().replace("\n", " ").rstrip("."), hint=hint) from None
    return code if isinstance(code, int) else 0


def command(verb: str) -> Any:
    """The click command of this name, with -h as all have it. Raises PluginError."""
    found = plugins.load("commands", verb, has="get_help")  # what has that is a command of click
    found.context_settings.setdefault("help_option_names", ["-h", "--help"])
    return found


def program_of(verb: str) -> str | None:
    """The path of the program that is this command; None if it is one of fleetrun or of a package."""
    if verb in VERBS or plugins.find("commands", verb) is not None:
        return None
    return plugins.program(verb)


def _become(program: str, argv: Sequence[str]) -> NoReturn:
    """Its exit code and its signals are those of this command then. Raises LaunchError."""
    from fleetrun.errors import ScriptNotExecutableError

    sys.stdout.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, and that would be inherited
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, [program, *argv])
    except OSError as error:
        hint = "Its first line must name an interpreter." if error.errno == errno.ENOEXEC else None
        raise ScriptNotExecutableError(f"cannot run {program}: {error.strerror}", hint=hint) from None


def nearest(word: str) -> str | None:
    """A command with a similar name, as a suggestion."""
    from fleetrun.errors import similar

    return next(iter(similar(word, (*VERBS, *plugins.other_commands()))), None)


def launching(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """Replace a command of `LAUNCHING` by the command line and environment that it stands for.

    Raises LaunchError.
    """
    if not argv or argv[0] not in LAUNCHING:
        return argv, environ
    if argv[0] == "run":
        return argv[1:], environ
    module: Any = import_module(f"fleetrun.commands.{argv[0]}")
    words, variables = module.launch_arguments(argv[1:], environ)
    return words, variables
