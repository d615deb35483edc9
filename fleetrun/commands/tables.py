"""The `fleetrun tables` command inspects tables of parameter servers, in a running job or in saved tables.

The runtime reads saved tables in a separate process.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from fleetrun.commands import live_tables
from fleetrun.commands.find import NoJobError, find_running, job_title, json_option
from fleetrun.commands.output import (
    output_width,
    print_json,
    print_lines,
    remark,
    write,
)
from fleetrun.commands.status import SilentError, answering
from fleetrun.console.text import format_date, printable
from fleetrun.control.client import TIMEOUT, NoAnswer, Running, ask
from fleetrun.envs.contract import TOKEN
from fleetrun.envs.settings.parsing import byte_size, plural
from fleetrun.errors import LaunchError, UsageError
from fleetrun.host.interpreter import check_package, helper_command, helper_environment

_MODULE = "trainers.ps.saves.inspection"
_LIVE = "trainers.ps.live_rows"
_COLUMNS = {
    "table": "TABLE",
    "rows": "ROWS:>",
    "changed": "CHANGED:>6",
    "values": "VALUES:>8",
    "type": "TYPE:7",
    "rule": "RULE:7",
    "updates": "UPDATES:>5",
    "servers": "SERVERS:>4",
}
_DIFFERENCES = {
    "table": "TABLE",
    "only": "ONLY FIRST:>8",
    "only_other": "ONLY SECOND:>8",
    "changed": "CHANGED:>",
    "both": "OF:>7",
    "largest": "LARGEST:>6",
    "mean": "MEAN:>5",
    "not_finite": "NOT FINITE:>4",
    "difference": "DIFFERENCE:9*",
}


class UnreadableSaveError(LaunchError):
    """Saved tables cannot be read."""

    exit_code = 1


class NoTablesError(LaunchError):
    """The job has no tables."""

    exit_code = 1


class _Tables(click.Group):
    """Adds the `list` command.

    A single word that is not a command is the job or the saved tables to list. Without a word, the running
    job is listed.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [each for each in args if not each.startswith("-")]
        asks_for_help = not {"-h", "--help"}.isdisjoint(args)
        if not asks_for_help and (not words or (len(words) == 1 and words[0] not in self.commands)):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Tables, no_args_is_help=False)
def command() -> None:
    """Inspect the tables of a running job, or saved tables: list them, show rows, compare, export and check.

    JOB is a job's name, run ID (pod), script or directory. The default is the job of this directory.

    SAVE is the directory or URL that you passed to fleet.save_persistables. If a directory has the name of a
    job, the command reads the directory. It never loads a table as a whole.

    \b
    Examples:
      fleetrun tables
      fleetrun tables saved
      fleetrun tables show user.weight 17 42
      fleetrun tables show saved user.weight 17 42
      fleetrun tables diff saved yesterday
      fleetrun tables export saved user.weight -o user.parquet
      fleetrun tables check saved

    \b
    Exit codes:
      0  done
      1  there is no such job, or it has no tables; the save cannot be read, or has problems
      2  the command line is wrong
      3  the launcher does not answer
    """


@command.command("list")
@click.argument("where", metavar="[JOB|SAVE]", required=False)
@json_option(help="Print one JSON document, for a job with each server.")
def list_tables(where: str | None, in_json: bool) -> int:
    """List the tables of JOB, summed over its servers. The columns are: rows and their memory; rows that were
    created, refused by the entry filter, evicted and removed by shrink since the servers started; pulls and
    pushes per second over the last ten seconds; keys per pull, and the share of keys without a row; the
    largest load of a server as a multiple of an equal share (skew).

    For SAVE, the columns are: rows, rows in its deltas, values per row, type, rule and updates.
    """
    if where is None or not _is_save(where):
        return _list_live(_job(where), in_json)
    found = _ask("list", where)
    if in_json:
        print_json(found)
        return 0
    deltas = f" and {plural(found['deltas'], 'delta')}" if found["deltas"] else ""
    version = ""
    if "version" in found:
        version = f"version {found['version']} of {format_date(found['time'])}, "
    write(
        f"{printable(found['save'])}: {version}step {found['step']}, {plural(found['servers'], 'server')}, "
        f"mode {found['mode']}{deltas}, {byte_size(found['bytes'])}\n"
    )
    for each in found["tables"]:
        each["changed"] = sum(each["changed"]) if each["changed"] else None
    print_lines(live_tables.lines_of(_COLUMNS, found["tables"], output_width()))
    return 0


@command.command()
@click.argument("words", metavar="[JOB|SAVE] TABLE KEY...", nargs=-1)
@json_option()
def show(words: Sequence[str], in_json: bool) -> int:
    """Show rows of TABLE in JOB or SAVE: values, optimizer state, shows and clicks. For a key without a row,
    show whether the row was removed or evicted, or waits for admission. Write -- before negative keys.

    The command reads the current rows of the servers of a job, and does not count as a use or a pull.
    """
    where, wanted = _place_of(words)
    live = where is None or not _is_save(where)
    found = _show_live(where, wanted) if live else _ask("show", str(where), *wanted)
    if in_json:
        print_json(found)
        return 0
    for row in found["rows"]:
        server = f" (server {row.pop('server')})" if "server" in row else ""
        write(f"{row.pop('key')}: {row.pop('state')}{server}\n")
        for what, value in row.items():
            states = value if what == "optimizer" else [value]
            for numbers in states:
                shown = " ".join(
                    f"{each:.6g}" for each in (numbers if isinstance(numbers, list) else [numbers])
                )
                write(f"  {what.replace('_', ' ')}: {shown}\n")
    return 0


@command.command()
@click.argument("save")
@click.argument("other")
@click.argument("names", metavar="[TABLE]...", nargs=-1)
@json_option()
def diff(save: str, other: str, names: Sequence[str], in_json: bool) -> int:
    """Compare the sparse tables of SAVE and OTHER: rows that only one of them has, rows with different
    values, and the largest and the mean difference of a value.
    """
    found = _ask("diff", save, other, *names)
    if in_json:
        print_json(found)
        return 0
    for each in found["tables"]:
        if "rows" in each:
            each["both"], each["not_finite"] = each["rows"] - each["only"], each["not_finite"] or None
    print_lines(live_tables.lines_of(_DIFFERENCES, found["tables"], output_width()))
    return 0


@command.command()
@click.argument("save")
@click.argument("name", metavar="TABLE")
@click.option(
    "-o", "--output", metavar="FILE", required=True, help="File to write: FILE.parquet or FILE.csv."
)
def export(save: str, name: str, output: str) -> int:
    """Write the keys and values of TABLE in SAVE to a file, every row once: key, and values as a list
    (parquet) or in columns (csv).
    """
    if Path(output).suffix == ".parquet":
        check_package("pyarrow", "fleetrun tables export to a .parquet file", "parquet")
    found = _ask("export", save, name, output)
    click.echo(f"{found['rows']:,} rows, {byte_size(found['bytes'])}: {printable(output)}")
    return 0


@command.command()
@click.argument("save")
def check(save: str) -> int:
    """Check all files of SAVE for wrong checksums, rows on a wrong server, duplicate keys, and values that
    are not finite. The exit code is 1 if the command finds a problem.
    """
    found = _ask("check", save)
    for problem in found["problems"]:
        remark(printable(problem))
    click.echo(
        f"{found['files']} files, {byte_size(found['bytes'])}, {found['rows']:,} rows: "
        f"{len(found['problems']) or 'no'} problems"
    )
    return 1 if found["problems"] else 0


def _is_save(where: str) -> bool:
    return "://" in where or Path(where).exists()


def _place_of(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Split the words into JOB or SAVE (None: the running job), and TABLE with keys.

    Raises UsageError of click.
    """
    has_place = len(words) > 2 and (_is_save(words[0]) or not _is_number(words[1]))
    if len(words) < 2 or not (has_place or _is_number(words[1])):
        raise click.UsageError("Missing argument 'KEY...'." if words else "Missing argument 'TABLE'.")
    return (words[0], words[1:]) if has_place else (None, words)


def _is_number(word: str) -> bool:
    return word.lstrip("+-").isdecimal()


def _show_live(where: str | None, wanted: Sequence[str]) -> Any:
    job = _job(where)
    try:
        servers = ask(job.socket, {"ask": "servers"}, TIMEOUT)
    except NoAnswer as reason:
        raise SilentError(f"the launcher of {job_title(job)} does not answer: {reason}") from None
    if not servers["endpoints"]:
        raise NoTablesError(f"{job_title(job)} has no parameter servers")
    return _ask(",".join(servers["endpoints"]), *wanted, module=_LIVE, token=servers["token"])


def _job(word: str | None) -> Running:
    """Return the running job. Raises LaunchError."""
    try:
        return answering(find_running(word))
    except NoJobError as error:
        if word is None:
            raise
        raise NoJobError(
            f"{printable(word)} is neither a directory or URL with saved tables, nor a job that runs here",
            hint=error.hint,
        ) from None


def _list_live(job: Running, in_json: bool) -> int:
    found = live_tables.live_tables(job)
    if not found["servers"]:
        raise NoTablesError(
            f"{job_title(job)} has reported no tables",
            hint="Servers report tables after trainer 0 has sent the initial values. A job without "
            "servers or sparse tables has none.",
        )
    if in_json:
        print_json(found)
        return 0
    write(f"{live_tables.heading(found)}\n")
    print_lines(live_tables.lines(found, output_width()))
    return 0


def _ask(*words: str, module: str = _MODULE, token: str = "") -> Any:
    """Run a query in the runtime and return its answer. Raises UnreadableSaveError and UsageError."""
    environment = helper_environment()
    done = subprocess.run(
        helper_command(module, *words),
        env={**environment, TOKEN: token} if token else environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise UnreadableSaveError(f"reading {words[1]} failed with exit code {done.returncode}") from None
    if "error" in found:
        raise (UsageError if found["usage"] else UnreadableSaveError)(printable(found["error"]))
    return found
