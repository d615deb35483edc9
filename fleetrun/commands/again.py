"""The `fleetrun again` command launches an earlier job again, with the settings in its event log."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from fleetrun.aliases import Environ, Strings
from fleetrun.commands.find import EndedJob, any_job, find_ended, history_of, still_running
from fleetrun.console.text import printable
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.options import NOTIFY
from fleetrun.envs.settings.show import FUNCTION
from fleetrun.envs.settings.write_job_file import Recorded, again
from fleetrun.errors import LaunchError, UsageError

_HELP = """Start JOB again with the same settings: its options (from the command line, environment
variables, and its job file as it was then), the same script and arguments, in the same directory. The
default is the newest job in --log_dir.

LAUNCH OPTIONS after JOB override the recorded options. The event log does not contain other environment
variables, secrets (FLEETRUN_TOKEN, --notify), or the files of the job. --display=json is not repeated.

\b
Examples:
  fleetrun again
  fleetrun again night --max_restart 10
  fleetrun again night --dry_run            # print the plan, and start nothing
  fleetrun again --log_dir /data/log night

\b
Exit codes are the codes of `fleetrun run`, and:
  1    no such job exists
  2    the event log lacks the command of the job, the job ran a function of a Python program, or several
       jobs match JOB
"""


@click.command(
    help=_HELP,
    context_settings={"max_content_width": 100},
    options_metavar="[--log_dir DIR]",
)
@any_job
@click.argument("options", nargs=-1, metavar="[LAUNCH OPTIONS]")
def command(job: str | None, options: Strings) -> None:
    """Only for --help. `launch_arguments` does the work."""


def launch_arguments(words: Sequence[str], environ: Environ) -> tuple[list[str], Environ]:
    """Build the command line and the environment of the launch from the words after `again`.

    Environment variables that set options are removed. The command line already holds the values that the
    first launch took from them.

    Changes into the directory of the first launch. Raises LaunchError.
    """
    log_dir, rest = _log_dir(list(words))
    job = rest.pop(0) if rest and not rest[0].startswith("-") else None
    history = history_of(_ended(job, log_dir))
    if not trusted(history.owner, os.getuid()):
        raise UsageError(
            f"the event log {history.path} belongs to another user, and would run with your rights",
            hint="`fleetrun report` shows the recorded command. Check it, and run it yourself.",
        )
    if history.running and history.over is None:  # on another node, or not reachable
        host = printable(str(history.launch.get("host") or "an unknown node"))
        raise UsageError(
            f"{printable(history.job)} is still running (pod {history.pod}, on {host})",
            hint="`fleetrun again POD` starts an older run.",
        )
    recorded = Recorded.read(history.launch, str(history.path))
    if recorded.line.script == FUNCTION:
        title, name = printable(history.job), printable((recorded.line.script_args or ("",))[-1])
        raise UsageError(
            f"{title} (pod {history.pod}) ran {name}, a function of a Python program",
            hint="Run this program again.",
        )
    folder = history.path.parent.absolute()
    try:
        os.chdir(recorded.cwd)
    except OSError as error:
        raise LaunchError(
            f"cannot change to {recorded.cwd}, where the job was started: {error.strerror}"
        ) from None
    # Warn that the event log does not contain the value of --notify.
    settings = history.launch.get("settings")
    given = any(each.option.name == "notify" for each in read(rest).options) or environ.get(NOTIFY)
    if isinstance(settings, dict) and "notify" in settings and not given:
        sys.stderr.write(f"fleetrun: the event log does not contain --notify: add it, or set {NOTIFY}\n")
    return again(recorded, rest, folder / f"{history.job}.{history.pod}.job.toml", environ)


def trusted(owner: int, uid: int) -> bool:
    """Return True if a command from a file of `owner` may run with the rights of `uid`."""
    return owner in (uid, 0)


def _ended(job: str | None, log_dir: Path | None) -> EndedJob:
    """Find the ended job. Raises UsageError if it still runs, because both launches would collide."""
    found = still_running(job, log_dir) if job is not None else None
    if found is not None:
        what = f"{printable(found.job) or 'that job'} is still running (pod {found.pod})"
        raise UsageError(what, hint=f"`fleetrun stop {found.pod}` ends it.")
    return find_ended(job, log_dir)


def _log_dir(words: list[str]) -> tuple[Path | None, list[str]]:
    """Split off --log_dir before JOB, the directory in which to look for the event log. After JOB, --log_dir
    is an option of the launch.
    """
    if not words or words[0].partition("=")[0].replace("-", "_") != "__log_dir":
        return None, words
    first = words.pop(0)
    _, equals, text = first.partition("=")
    if not equals and not words:
        raise UsageError(f"{first} needs a value: {first} DIR")
    return Path(text if equals else words.pop(0)), words
