"""Turn the command line into settings, and the settings into an exit code. Only this module prints errors and
exits.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from fleetrun import __version__, verbs
from fleetrun.aliases import Environ
from fleetrun.envs.channels import inside_container
from fleetrun.envs.settings import command_line
from fleetrun.envs.settings.command_line import Choice
from fleetrun.envs.settings.options import NOTHING, JobFile, Resolved
from fleetrun.envs.settings.resolve import EngineValues, no_engine, resolve
from fleetrun.envs.variables import JOB_FILE
from fleetrun.errors import LaunchError, ScriptNotFoundError, UsageError

Run = Callable[[Resolved], int]
"""Launches a job and returns its exit code."""


def main(argv: Sequence[str], environ: Environ, run: Run, engine_values: EngineValues = no_engine) -> int:
    """Run the command line in this environment and return the exit code.

    `engine_values`: the settings by the scheduler that started this process, if any.
    """
    try:
        return _command(argv, environ, run, engine_values)
    except LaunchError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard(sys.stdout)  # else Python reports an error when it flushes at exit
        return 141
    except Exception as error:  # noqa: BLE001  (the last resort: no other place may swallow a bug)
        if isinstance(error, OSError) and (known := _known(error)):
            _report(known)
            with suppress(LaunchError):
                _write(sys.stdout, "")  # if this stream is full, Python must not flush it at exit
            return known.exit_code
        import traceback

        bug = "fleetrun: error: this is a bug in fleetrun, not in your script\n"
        _write(sys.stderr, traceback.format_exc() + bug)
        return 125


_DEFAULT_COLUMNS = 80

_EXHAUSTED = {
    errno.EMFILE: "The limit on open files is reached. Raise the limit with `ulimit -n`.",
    errno.ENFILE: "The system's limit on open files is reached.",
    errno.ENOSPC: "The disk of a file, or of standard output, is full. Free some room.",
    errno.EDQUOT: "The disk quota of a file, or of standard output, is exceeded.",
}


def _known(error: OSError) -> LaunchError | None:
    """Return the error to report for an OSError that any call may raise."""
    if error.errno in _EXHAUSTED:
        return LaunchError(f"cannot continue: {error.strerror}", hint=_EXHAUSTED[error.errno])
    try:
        Path.cwd()
    except FileNotFoundError:
        return UsageError(
            "the current directory no longer exists", hint="Change to an existing directory, or run `cd .`."
        )
    return None


def _command(argv: Sequence[str], environ: Environ, run: Run, engine_values: EngineValues) -> int:
    if environ.get("_FLEETRUN_COMPLETE"):
        from fleetrun import completion  # imports click, which a launch does not need

        return completion.answer(environ["_FLEETRUN_COMPLETE"])
    if not argv:
        from fleetrun.help import short_help, style_of  # late: a launch needs no help

        _write(sys.stderr, short_help(style_of(sys.stderr is not None and sys.stderr.isatty())))
        return 2
    if argv[0] == "version":
        argv = ["--version"]
    verb = verbs.asked(argv)
    if verb is not None and verb == argv[0]:
        return verbs.answer(verb, argv[1:])
    argv, environ = verbs.launching(argv, environ)
    line = command_line.read(argv)
    if line.action is not None:
        _answer(line.action, alone=verb is not None)
        return 0
    resolved = resolve(line, environ, engine_values, _job_file(line, environ))
    if resolved.settings.save is not None and not resolved.settings.dry_run:
        _save(resolved, resolved.settings.save)
    try:
        code = run(resolved)
    except ScriptNotFoundError as error:
        meant = verbs.nearest(resolved.settings.script)
        if meant is None or error.hint:
            raise
        raise ScriptNotFoundError(error.message, hint=f"Did you mean `fleetrun {meant}`?") from None
    if code == 0 and resolved.settings.save is not None and resolved.settings.dry_run:
        _save(resolved, resolved.settings.save)
    return code


def _save(resolved: Resolved, name: str) -> None:
    from fleetrun.envs.settings.write_job_file import save, typed

    save(resolved, name)
    _write(sys.stderr, f"fleetrun: wrote {name}; start it with: fleetrun up {typed(name)}\n")


def _job_file(line: command_line.CommandLine, environ: Environ) -> JobFile:
    """Return the job file of --config, or the job file of the scheduler that started this process, if one
    exists.
    """
    named = line.last("config")
    carried = environ.get(JOB_FILE, "") and not inside_container(environ)
    if named is None and not carried:
        return NOTHING
    # Late: a launch without a job file needs no TOML reader.
    from fleetrun.envs.settings.job_file import job_file_of_variable, load_job_file

    if named is None:
        return job_file_of_variable(environ)

    return load_job_file(named.text, environ, named.origin)


def _answer(action: Choice, alone: bool) -> None:
    """Print the answer to `-h`, `--help`, `--version` or `--show_completion`. `alone`: no guard runs, so a
    pager can have the terminal.
    """
    if action.option.name == "help":
        from fleetrun import help

        columns = _columns(sys.stdout)
        style = help.style_of(columns is not None)
        if action.origin == "-h":
            _write(sys.stdout, help.short_help(style))
        else:
            text = help.long_help(columns or _asked_columns() or _DEFAULT_COLUMNS, style)
            if alone and columns is not None:
                help.page(text)
            else:
                _write(sys.stdout, text)
    elif action.option.name == "version":
        _write(sys.stdout, f"fleetrun {__version__}\n")
    else:
        from fleetrun import completion

        _write(sys.stdout, completion.script(action.value))


def _report(error: LaunchError) -> None:
    """Print `fleetrun: error: MESSAGE` and the hint, wrapped on a terminal. Control characters
    are escaped.
    """
    from fleetrun.console.text import printable

    lines = [printable(line) for line in f"fleetrun: error: {error.message}".splitlines()]
    if error.hint:
        lines += [f"  {printable(line)}" for line in error.hint.splitlines()]
    columns = _columns(sys.stderr)
    if columns:
        from fleetrun.help import wrapped

        lines = [wrapped(line, columns - 1, indent="    ", first="") for line in lines]
    _write(sys.stderr, "\n".join(lines) + "\n")


def _columns(stream: TextIO | None) -> int | None:
    """Return the width of a terminal, or None for other streams."""
    if stream is None or not stream.isatty():
        return None
    try:
        return _asked_columns() or os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except OSError:
        return _DEFAULT_COLUMNS


def _asked_columns() -> int | None:
    """Return COLUMNS if its value is a possible width of lines."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and 20 <= int(columns) < 10_000 else None


def _write(stream: TextIO | None, text: str) -> None:
    """Write to a stream. None stands for a closed stream. A broken pipe raises, and a full disk
    is an error.
    """
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(stream)
        if stream is sys.stdout:
            raise LaunchError(f"cannot write to standard output: {error.strerror}") from None


def _discard(stream: TextIO | None) -> None:
    """Send the buffered output of a dead stream to /dev/null."""
    if stream is not None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
