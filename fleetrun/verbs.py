"""The words that may stand in place of a script: `fleetrun status`, `fleetrun logs`. Knows where each is, and
imports none before it is asked for.

A file whose name is one of these words is launched as `./status`.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

ASKING: Mapping[str, str] = {
    "ps": "The jobs that run here.",
    "status": "How a job stands: its processes, their progress, their last words.",
    "logs": "What the processes of a job print, merged in the order of time.",
    "stop": "Ask a job to end.",
    "stacks": "Where each process of a job is: the Python stacks.",
    "report": "How a job ended, and why.",
    "plot": "A picture of a job: loss and speed over time, the lives of its processes.",
    "doctor": "Check machines before a launch.",
    "init": "Write a commented job file.",
}
"""Words that start no processes of a job."""

LAUNCHING: Mapping[str, str] = {
    "up": "Launch what a job file says.",
    "again": "Launch a job of the past once more, with the same settings.",
}
"""Words that end in a launch."""

VERBS: Mapping[str, str] = {**ASKING, **LAUNCHING}


def asked(argv: Sequence[str]) -> str | None:
    """The word that starts no job, if the command line begins with one; any word whose help is wanted."""
    if not argv:
        return None
    helps = argv[0] in LAUNCHING and argv[1:2] in (["--help"], ["-h"])
    return argv[0] if argv[0] in ASKING or helps else None


def answer(verb: str, argv: Sequence[str]) -> int:
    """Do what the word says; return the exit code. Raises LaunchError."""
    import click

    from fleetrun.errors import UsageError

    asked_for = command(verb)
    gc.enable()  # which was off for the imports
    try:
        code = asked_for.main(list(argv), prog_name=f"fleetrun {verb}", standalone_mode=False)
    except click.exceptions.Abort:
        return 130
    except SystemExit:  # click's way to say that nobody reads any more
        raise BrokenPipeError from None
    except click.ClickException as error:
        hint = f"See fleetrun {verb} --help."
        raise UsageError(error.format_message().replace("\n", " ").rstrip("."), hint=hint) from None
    return code if isinstance(code, int) else 0


def command(verb: str) -> Any:
    """The click command behind a word."""
    return import_module(f"fleetrun.commands.{verb}").command


def nearest(word: str) -> str | None:
    """The word that was perhaps meant by one that is almost it."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, VERBS, 1, 0.7)), None)


def launching(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command line and environment that a word of `LAUNCHING` stands for; any other as it is.

    Raises LaunchError.
    """
    if not argv or argv[0] not in LAUNCHING:
        return argv, environ
    module: Any = import_module(f"fleetrun.commands.{argv[0]}")
    words, variables = module.launch_arguments(argv[1:], environ)
    return words, variables
