"""`fleetrun tables`: look into the tables of a save of parameter servers. The runtime reads them, in a
process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fleetrun.commands.output import Cell, Column, output_width, print_json, print_lines, table, write
from fleetrun.console.text import printable
from fleetrun.doctor.facts import size
from fleetrun.errors import LaunchError, UsageError
from fleetrun.host.interpreter import check_package, helper_command, helper_environment

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_MODULE = "trainers.ps.saves.inspection"
_COLUMNS = (
    Column("TABLE"),
    Column("ROWS", right=True),
    Column("CHANGED", 6, right=True),
    Column("VALUES", 8, right=True),
    Column("TYPE", 7),
    Column("RULE", 7),
    Column("UPDATES", 5, right=True),
    Column("SERVERS", 4, right=True),
)
_DIFFERENCES = (
    Column("TABLE"),
    Column("ONLY FIRST", 8, right=True),
    Column("ONLY SECOND", 8, right=True),
    Column("CHANGED", right=True),
    Column("OF", 7, right=True),
    Column("LARGEST", 6, right=True),
    Column("MEAN", 5, right=True),
    Column("NOT FINITE", 4, right=True),
    Column("DIFFERENCE", 9, rest=True),
)


class SaveError(LaunchError):
    """A save cannot be read."""

    exit_code = 1


class _Tables(click.Group):
    """One word that is no command is the save to list."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [each for each in args if not each.startswith("-")]
        if not args:
            ctx.fail("Missing argument 'SAVE'.")
        if len(words) == 1 and args[0] == words[0] and words[0] not in self.commands:
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Tables, no_args_is_help=False, context_settings=_SETTINGS)
def command() -> None:
    """Look into the tables that parameter servers have saved: a folder or URL that fleet.save_persistables
    was given. No table is loaded as a whole.

    \b
    Examples:
      fleetrun tables saved
      fleetrun tables show saved user.weight 17 42
      fleetrun tables diff saved yesterday
      fleetrun tables export saved user.weight -o user.parquet
      fleetrun tables check saved

    \b
    Exit codes:
      0  done
      1  the save cannot be read, or has problems
      2  the command line is wrong
    """


@command.command("list", context_settings=_SETTINGS)
@click.argument("save")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_tables(save: str, as_json: bool) -> int:
    """List the tables of SAVE: rows, rows that its deltas have, values a row, type, rule and updates."""
    found = _ask("list", save)
    if as_json:
        print_json(found)
        return 0
    deltas = f" and {found['deltas']} deltas" if found["deltas"] else ""
    write(
        f"{printable(found['save'])}: step {found['step']}, {found['servers']} servers, mode {found['mode']}"
        f"{deltas}, {size(found['bytes'])}\n"
    )
    rows = [
        [
            Cell(each["table"]),
            Cell("" if each["rows"] is None else f"{each['rows']:,}"),
            Cell(f"{sum(each['changed']):,}" if each["changed"] else ""),
            Cell(f"{each['values']:,}"),
            Cell(each["type"]),
            Cell(each["rule"]),
            Cell(f"{each['updates']:,}"),
            Cell(str(each["servers"])),
        ]
        for each in found["tables"]
    ]
    print_lines(table(_COLUMNS, rows, output_width()))
    return 0


@command.command(context_settings=_SETTINGS)
@click.argument("save")
@click.argument("name", metavar="TABLE")
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(save: str, name: str, keys: Sequence[str], as_json: bool) -> int:
    """Show rows of TABLE in SAVE: values, optimizer state, shows and clicks; or that a key has no row, was
    removed, or waits for admission. Write -- before negative keys.
    """
    found = _ask("show", save, name, *keys)
    if as_json:
        print_json(found)
        return 0
    for row in found["rows"]:
        write(f"{row.pop('key')}: {row.pop('state')}\n")
        for what, value in row.items():
            states = value if what == "optimizer" else [value]
            for numbers in states:
                shown = " ".join(
                    f"{each:.6g}" for each in (numbers if isinstance(numbers, list) else [numbers])
                )
                write(f"  {what.replace('_', ' ')}: {shown}\n")
    return 0


@command.command(context_settings=_SETTINGS)
@click.argument("save")
@click.argument("other")
@click.argument("names", metavar="[TABLE]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diff(save: str, other: str, names: Sequence[str], as_json: bool) -> int:
    """Compare the sparse tables of SAVE and OTHER: rows that only one has, rows with other values, and the
    largest and the mean difference of a value.
    """
    found = _ask("diff", save, other, *names)
    if as_json:
        print_json(found)
        return 0
    rows = [
        [
            Cell(each["table"]),
            *(
                [Cell("")] * 7
                if "difference" in each
                else [
                    Cell(f"{each['only']:,}"),
                    Cell(f"{each['only_other']:,}"),
                    Cell(f"{each['changed']:,}"),
                    Cell(f"{each['rows'] - each['only']:,}"),
                    Cell(f"{each['largest']:.3g}"),
                    Cell(f"{each['mean']:.3g}"),
                    Cell(f"{each['not_finite']:,}" if each["not_finite"] else ""),
                ]
            ),
            Cell(each.get("difference", "")),
        ]
        for each in found["tables"]
    ]
    print_lines(table(_DIFFERENCES, rows, output_width()))
    return 0


@command.command(context_settings=_SETTINGS)
@click.argument("save")
@click.argument("name", metavar="TABLE")
@click.option("-o", "--output", metavar="FILE", required=True, help="FILE.parquet or FILE.csv.")
def export(save: str, name: str, output: str) -> int:
    """Write the keys and values of TABLE in SAVE to a file, every row once: key, and values as a list
    (parquet) or in columns (csv).
    """
    if Path(output).suffix == ".parquet":
        check_package("pyarrow", "fleetrun tables export to a .parquet file", "parquet")
    found = _ask("export", save, name, output)
    click.echo(f"{found['rows']:,} rows, {size(found['bytes'])}: {printable(output)}")
    return 0


@command.command(context_settings=_SETTINGS)
@click.argument("save")
def check(save: str) -> int:
    """Read all files of SAVE: checksums, rows on a wrong server, keys that are there twice, values that are
    not finite. The exit code is 1 if there is any problem.
    """
    found = _ask("check", save)
    for problem in found["problems"]:
        click.echo(printable(problem), err=True)
    click.echo(
        f"{found['files']} files, {size(found['bytes'])}, {found['rows']:,} rows: "
        f"{len(found['problems']) or 'no'} problems"
    )
    return 1 if found["problems"] else 0


def _ask(*words: str) -> Any:
    """What the runtime finds. Raises SaveError, UsageError."""
    done = subprocess.run(
        helper_command(_MODULE, *words),
        env=helper_environment(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise SaveError(f"reading {words[1]} failed with exit code {done.returncode}") from None
    if "error" in found:
        raise (UsageError if found["usage"] else SaveError)(printable(found["error"]))
    return found
