"""`fleetrun init`: writes a commented job file."""

from __future__ import annotations

import sys

import click

from fleetrun.envs.settings.write_job_file import create, template, typed
from fleetrun.errors import LaunchError

_HELP = """Write a job file with every option, commented out, into FILE (job.toml). A file that is there stays
as it is. To turn a command line into a job file, use `fleetrun OPTIONS --dry_run --save FILE SCRIPT`.

\b
Examples:
  fleetrun init
  fleetrun init night.toml --script train.py
  fleetrun init -                           # to the standard output

\b
Exit codes:
  0    written
  2    FILE is there already, or cannot be written
"""


@click.command(help=_HELP, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.option("--script", default="train.py", show_default=True, help="The script of the job.")
@click.argument("file", default="job.toml")
def command(file: str, script: str) -> int:
    text = template(script)
    if file == "-":
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LaunchError(f"cannot write to the standard output: {error.strerror}") from None
        return 0
    create(file, text, "fleetrun init")
    sys.stdout.write(f"wrote {file}; start it with: fleetrun up {typed(file)}\n")
    return 0
