"""`fleetrun up`: launch what a job file says. Stands for a command line with --config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from fleetrun.envs.settings.command_line import read
from fleetrun.errors import UsageError

DEFAULT = "job.toml"

_HELP = """Launch what the job file FILE says (without FILE: job.toml). It is short for

\b
  fleetrun --config FILE [OPTIONS] [SCRIPT [ARGUMENTS]]

FILE comes first. All options of a launch may follow (`fleetrun --help`); they win over the file, and so do
their variables. A SCRIPT with its ARGUMENTS takes the place of the file's.

\b
Examples:
  fleetrun init && fleetrun up
  fleetrun up night.toml --trainer_num 4
  LR=0.2 fleetrun up night.toml             # where the file says ${LR}
  fleetrun up night.toml --dry_run          # what would be started

Exit codes are those of a launch; 2 also for a job file that cannot be read or does not make sense.
"""


@click.command(
    help=_HELP,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    options_metavar="",
)
@click.argument("file", required=False, metavar="[FILE] [OPTIONS OF A LAUNCH]")
@click.argument("script", required=False, metavar="[SCRIPT")
@click.argument("arguments", nargs=-1, metavar="[ARGUMENTS]]")
def command(file: str | None, script: str | None, arguments: tuple[str, ...]) -> None:
    """For its --help: what is launched goes through `stands_for`."""


def stands_for(words: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
    """The command line for these words after `up`. Raises UsageError when there is no job file."""
    if words and not words[0].startswith("-"):
        return ["--config", words[0], *words[1:]], environ
    script = read(words).script or ""
    if script.endswith(".toml"):
        raise UsageError(
            f"fleetrun up: {script} stands where a script would",
            hint=f"The job file comes first: fleetrun up {script} [OPTIONS]",
        )
    if not Path(DEFAULT).exists():
        raise UsageError(
            f"fleetrun up: there is no {DEFAULT} here, and no other job file was named",
            hint="usage: fleetrun up FILE [OPTIONS]; `fleetrun init` writes one to begin with.",
        )
    return ["--config", DEFAULT, *words], environ
