"""`fleetrun again`: launch a job of the past once more. Finds its record; what that means is
`jobfile.recorded`'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from fleetrun.commands.find import Past, find_past, history_of, of_any, still_running
from fleetrun.console.text import printable
from fleetrun.envs.settings.write_job_file import Recorded, again
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.history import History

_HELP = """Launch JOB once more with exactly the same settings: the options that it was started with (typed,
from variables, from its job file as it was then), the same script and arguments, from the same directory.
Without JOB: the newest one that has a record in --log_dir.

OPTIONS of a launch that are typed after JOB take the place of what it was started with. Not part of the
record: the other variables of the shell, the secret (FLEETRUN_TOKEN), and the files of the job.

\b
Examples:
  fleetrun again
  fleetrun again night --max_restart 10
  fleetrun again night --dry_run            # what would be started
  fleetrun again --log_dir /data/log night

\b
Exit codes are those of a launch, and:
  1    there is no such job
  2    its record does not say how it was started, or several jobs fit JOB
"""


@click.command(
    help=_HELP,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    options_metavar="[--log_dir DIR]",
)
@click.argument("job", required=False, shell_complete=of_any)
@click.argument("options", nargs=-1, metavar="[OPTIONS OF A LAUNCH]")
def command(job: str | None, options: tuple[str, ...]) -> None:
    """For its --help: what is launched goes through `stands_for`."""


def stands_for(words: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """The command line for these words after `again`, and the environment without variables that are
    options: those that counted then are words now. Changes into the directory of that launch. Raises
    LaunchError.
    """
    log_dir, rest = _log_dir(list(words))
    job = rest.pop(0) if rest and not rest[0].startswith("-") else None
    history = history_of(_ended(job, log_dir))
    if not trusted(history.owner, os.getuid()):
        raise UsageError(
            f"the record {history.path} is another user's: what it says would run with your rights",
            hint="Type the launch yourself; `fleetrun report` shows what the record says.",
        )
    if history.running and history.over is None:  # on another machine, or out of sight
        raise UsageError(
            f"{printable(history.job)} still runs (pod {history.pod}, on {_host(history)})",
            hint="A second one would be in its way. `fleetrun again POD` launches an older one.",
        )
    recorded = Recorded.read(history.launch, str(history.path))
    folder = history.path.parent.absolute()
    _enter(recorded)
    return again(recorded, rest, folder / f"{history.job}.{history.pod}.job.toml", environ)


def _host(history: History) -> str:
    return printable(str(history.launch.get("host") or "a machine that is not known"))


def trusted(owner: int, uid: int) -> bool:
    """Whether what a file of `owner` says may be run with the rights of `uid`."""
    return owner in (uid, 0)


def _ended(job: str | None, log_dir: Path | None) -> Past:
    """Raises UsageError when that job still runs: a second one would be in its way."""
    found = still_running(job, log_dir) if job is not None else None
    if found is not None:
        what = f"{printable(found.job) or 'that job'} still runs (pod {found.pod})"
        raise UsageError(what, hint=f"`fleetrun stop {found.pod}` ends it.")
    return find_past(job, log_dir)


def _log_dir(words: list[str]) -> tuple[Path | None, list[str]]:
    """--log_dir before JOB says where to look; after it, it is an option of the launch."""
    if not words or words[0].partition("=")[0].replace("-", "_") != "__log_dir":
        return None, words
    first = words.pop(0)
    _, equals, text = first.partition("=")
    if not equals and not words:
        raise UsageError(f"{first} needs a value: {first} DIR")
    return Path(text if equals else words.pop(0)), words


def _enter(recorded: Recorded) -> None:
    try:
        os.chdir(recorded.cwd)
    except OSError as error:
        raise LaunchError(
            f"cannot go to {recorded.cwd}, where the job was started: {error.strerror}"
        ) from None
