"""The `fleetrun up` command launches a job file. It is short for a command line with --config."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from fleetrun.aliases import Environ, Strings
from fleetrun.envs.settings.command_line import read
from fleetrun.errors import UsageError

DEFAULT = "job.toml"

_HELP = """Start the job that the job file FILE describes (default: job.toml). The command is short for

\b
  fleetrun --config FILE [OPTIONS] [SCRIPT [ARGUMENTS]]

FILE comes first. Any launch option may follow (`fleetrun --help`). Options and environment variables override
the file. SCRIPT and ARGUMENTS replace the script and the arguments of the file.

\b
Examples:
  fleetrun init && fleetrun up
  fleetrun up night.toml --trainer_num 4
  LR=0.2 fleetrun up night.toml             # if the file contains ${LR}
  fleetrun up night.toml --dry_run          # print the plan, and start nothing

Exit codes are the codes of `fleetrun run`. Code 2 also means that the job file cannot be read or is not
valid.
"""


@click.command(
    help=_HELP,
    context_settings={"max_content_width": 100},
    options_metavar="",
)
@click.argument("file", required=False, metavar="[FILE] [LAUNCH OPTIONS]")
@click.argument("script", required=False, metavar="[SCRIPT")
@click.argument("arguments", nargs=-1, metavar="[ARGUMENTS]]")
def command(file: str | None, script: str | None, arguments: Strings) -> None:
    """Only for --help. `launch_arguments` does the work."""


def launch_arguments(words: Sequence[str], environ: Environ) -> tuple[list[str], Environ]:
    """Build the command line of the launch from the words after `up`.

    Raises UsageError if the job file is missing.
    """
    if words and not words[0].startswith("-"):
        if not os.path.exists(words[0]):  # noqa: PTH110  (a Path raises for some names)
            raise UsageError(
                f"fleetrun up: the job file {words[0]} does not exist", hint="`fleetrun init` writes one."
            )
        return ["--config", words[0], *words[1:]], environ
    script = read(words).script or ""
    if script.endswith(".toml"):
        raise UsageError(
            f"fleetrun up: the job file {script} must be the first argument",
            hint=f"fleetrun up {script} [OPTIONS]",
        )
    if not Path(DEFAULT).exists():
        raise UsageError(
            f"fleetrun up: this directory has no {DEFAULT}, and the command line names no other job file",
            hint="usage: fleetrun up FILE [OPTIONS]; `fleetrun init` writes a template.",
        )
    return ["--config", DEFAULT, *words], environ
