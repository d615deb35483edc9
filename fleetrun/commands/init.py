"""The `fleetrun init` command writes a commented job file."""

from __future__ import annotations

import click

from fleetrun.commands.output import write
from fleetrun.envs.settings.write_job_file import create, template, typed

_HELP = """Write a job file that lists every option, commented out, to FILE (default: job.toml). An existing
file is not overwritten. To turn a command line into a job file, use
`fleetrun OPTIONS --dry_run --save FILE SCRIPT`.

\b
Examples:
  fleetrun init
  fleetrun init night.toml --script train.py
  fleetrun init -                           # to standard output

\b
Exit codes:
  0    written
  2    FILE exists already, or cannot be written
"""


@click.command(help=_HELP, context_settings={"max_content_width": 100})
@click.option("--script", default="train.py", show_default=True, help="Script of the job.")
@click.argument("file", default="job.toml")
def command(file: str, script: str) -> int:
    text = template(script)
    if file == "-":
        write(text)
        return 0
    create(file, text, "fleetrun init")
    write(f"wrote {file}; start it with: fleetrun up {typed(file)}\n")
    return 0
