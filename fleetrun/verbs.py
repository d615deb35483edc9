"""Find and run the commands besides launching a script. They come from fleetrun, such as `fleetrun status`,
or from other packages. Each command is imported when used.

To launch a script or program with the name of a command, write `./status` or `fleetrun run status`.
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
from fleetrun.aliases import Environ, Texts
from fleetrun.plugins import ASKING, LAUNCHING

VERBS: Texts = {**ASKING, **LAUNCHING}

FAMILIES: Mapping[str, Sequence[str]] = {
    "launching": ("run", "up", "init", "token", "doctor", "nodes"),
    "running jobs": ("ps", "status", "top", "logs", "stop", "why", "stacks", "debug", "profile"),
    "earlier jobs": ("history", "report", "plot", "again", "bundle", "prune"),
    "models": ("tables", "serve"),
    "other": ("help",),
}
"""The commands in the groups of the help."""


def asked(argv: Sequence[str]) -> str | None:
    """Return the command of this command line if it launches no job or requests only help, else None."""
    if not argv:
        return None
    if argv[0] in ("-h", "--help"):
        return "help"
    if argv[0] in LAUNCHING:
        return argv[0] if argv[0] != "run" and argv[1:2] in (["--help"], ["-h"]) else None
    return argv[0] if argv[0] in ASKING or plugins.is_command(argv[0]) else None


def answer(verb: str, argv: Sequence[str]) -> int:
    """Run the command and return the exit code. A program replaces this process.

    Raises LaunchError.
    """
    if (program := program_of(verb)) is not None:
        _become(program, argv)
    import click

    from fleetrun.errors import UsageError

    asked_for = command(verb)
    gc.enable()  # it was off during the imports
    main = partial(asked_for.main, list(argv), prog_name=f"fleetrun {verb}", standalone_mode=False)
    try:
        found = plugins.find("commands", verb)
        passed = (click.exceptions.Abort, click.ClickException)
        code = main() if found is None else plugins.guarded(found, main, passed)
    except click.exceptions.Abort:
        return 130
    except SystemExit:  # click reports a broken pipe in this way
        raise BrokenPipeError from None
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            hidden = {
                word for each in asked_for.params if getattr(each, "hidden", False) for word in each.opts
            }
            meant = [word for word in error.possibilities if word not in hidden]
            error = click.NoSuchOption(error.option_name, possibilities=meant, ctx=error.ctx)
        hint = f"See fleetrun {verb} --help."
        raise UsageError(error.format_message().replace("\n", " ").rstrip("."), hint=hint) from None
    return code if isinstance(code, int) else 0


def command(verb: str) -> Any:
    """Return the click command of this name with the common option -h. Raises PluginError."""
    found = plugins.load("commands", verb, has="get_help")  # only click commands have this method
    found.context_settings.setdefault("help_option_names", ["-h", "--help"])
    return found


def program_of(verb: str) -> str | None:
    """Return the path of the program behind this command, or None for a command of fleetrun or a package."""
    if verb in VERBS or plugins.find("commands", verb) is not None:
        return None
    return plugins.program(verb)


def _become(program: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process, so that the program's exit code and signals become those of this command.

    Raises LaunchError.
    """
    from fleetrun.errors import ScriptNotExecutableError

    sys.stdout.flush()
    # Python ignores these two, and the program would inherit that
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(program, [program, *argv])
    except OSError as error:
        hint = "Its first line must name an interpreter." if error.errno == errno.ENOEXEC else None
        raise ScriptNotExecutableError(f"cannot run {program}: {error.strerror}", hint=hint) from None


def nearest(word: str) -> str | None:
    """Return a command with a similar name as a suggestion, or None if no name is similar."""
    from fleetrun.errors import similar

    cutoff = 0.6 if len(word) <= 3 else 0.7  # `tpo`
    return next(iter(similar(word, (*VERBS, *plugins.other_commands()), cutoff=cutoff)), None)


def launching(argv: Sequence[str], environ: Environ) -> tuple[Sequence[str], Environ]:
    """Replace a command of `LAUNCHING` with the command line and environment that it stands for.

    Raises LaunchError.
    """
    if not argv or argv[0] not in LAUNCHING:
        return argv, environ
    if argv[0] == "run":
        return argv[1:], environ
    module: Any = import_module(f"fleetrun.commands.{argv[0]}")
    words, variables = module.launch_arguments(argv[1:], environ)
    return words, variables
