"""The `fleetrun nodes` command lists the faults of nodes, which exclude nodes from jobs, and resets them."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetrun.commands.find import LOG_DIR, json_option, logs_of_launches
from fleetrun.commands.output import (
    Cell,
    columns,
    print_json,
    print_table,
    remark,
)
from fleetrun.console.text import describe_duration, printable
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.faults import Kept, MachineFault, counted, excluded, faults_path, keep, read_kept

_COLUMNS = columns(
    "NODE",
    "FAULTS:>",
    "STATE:8",
    "LAST:7",
    "WHAT:6*",
)


@click.command()
@logs_of_launches
@click.option("--reset", metavar="NODE", help="Forget the faults of this node. all: of every node.")
@json_option()
def command(log_dir: Path | None, reset: str | None, in_json: bool) -> int:
    """List the faults of nodes, and which nodes jobs exclude.

    A node gets a fault when it is lost, when SIGBUS or SIGILL kills a process on it, when its GPU fails, and
    when it fails a check before a start (--check). It also gets a fault when SIGSEGV or an unexplained
    SIGKILL kills a process, or when other trainers wait for its trainer in vain. fleetrun removes such a
    fault when the same happens on another node. Faults expire after an hour of work. A node with
    --exclude_after faults (2) is excluded from jobs with the same log directory, if enough other nodes
    remain.

    \b
    Examples:
      fleetrun nodes
      fleetrun nodes --reset h2

    \b
    Exit codes:
      0  the list is printed, even if it is empty
      2  no node of this name has a fault
    """
    path = faults_path(log_dir or LOG_DIR)
    try:
        if reset is not None:
            _forget(path, read_kept(path), reset)
        kept = read_kept(path)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(str(error), hint="Move this file away to start with no faults.") from None
    found = counted(kept.faults)
    out = excluded(kept.faults, kept.exclude_after)
    if in_json:
        listed = {node: [{"time": each.time, "what": each.what} for each in found[node]] for node in found}
        print_json([{"machine": node, "left_out": node in out, "faults": listed[node]} for node in found])
    elif not found:
        remark(f"No node has a fault in {path.parent}.")
    else:
        now = time.time()
        lines = [_row(node, faults, node in out, now) for node, faults in found.items()]
        print_table(_COLUMNS, lines)
    return 0


def _forget(path: Path, kept: Kept, name: str) -> None:
    """Reset the faults of one node, or of all nodes. `name` is a node as listed, its first word or its
    address.

    Raises UsageError, OSError and ValueError.
    """
    there = counted(kept.faults)
    named = [node for node in there if name in (node, *node.replace("(", "").replace(")", "").split())]
    if name != "all" and len(named) != 1:
        what = f"{len(named)} machines" if named else "no node with a fault"
        hint = f"Nodes with faults: {printable(', '.join(there))}" if there else None
        raise UsageError(f"--reset {name}: {what} of this name in {path}", hint=hint)
    forgiven = [fault for node in (there if name == "all" else named) for fault in there[node]]
    # The clock of the node that recorded the faults may be ahead.
    at = round(max(time.time(), *(fault.time + 0.1 for fault in forgiven), 0.0), 1)
    keep(path, tuple(MachineFault(at, node) for node in ([""] if name == "all" else named)))


def _row(node: str, faults: list[MachineFault], out: bool, now: float) -> list[Cell]:
    last = faults[-1]
    return [
        node,
        str(len(faults)),
        ("excluded", "red") if out else "",
        f"{describe_duration(max(0.0, now - last.time))} ago",
        last.what,
    ]
