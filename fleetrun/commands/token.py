"""The `fleetrun token` command prints a new token for a job."""

from __future__ import annotations

import secrets

import click

from fleetrun.commands.output import write

_HELP = """Print a new random token. All nodes of a job need the same token.

\b
Examples:
  (umask 077; fleetrun token > token)       # then --token_file token
  export FLEETRUN_TOKEN=$(fleetrun token)
"""


@click.command(help=_HELP)
def command() -> None:
    write(f"{secrets.token_hex(20)}\n")
