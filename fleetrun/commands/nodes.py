"""The `fleetrun nodes` command lists the faults of nodes, which exclude nodes from jobs, and resets them."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleetrun.commands.find import LOG_DIR, json_option, logs_of_launches
from fleetrun.commands.output import (
    Cell,
    Column,
    NumberColumn,
    print_json,
    print_table,
    remark,
)
from fleetrun.console.text import describe_duration, printable
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.faults import Kept, MachineFault, counted, excluded, faults_path, keep, read_kept

_COLUMNS = (
    Column("MACHINE"),
    NumberColumn("FAULTS"),
    Column("STATE", 8),
    Column("LAST", 7),
    Column("WHAT", 6, rest=True),
)


@click.command()
@logs_of_launches
@click.option("--reset", metavar="MACHINE", help="Forget the faults of this machine; all: of every one.")
@json_option()
def command(log_dir: Path | None, reset: str | None, in_json: bool) -> int:
    """List the faults of machines, and which are left out for them.

    A machine has a fault when it is lost, when a process on it is killed by SIGBUS or SIGILL, when its GPU
    fails, and when a check before a start fails there (--check); also when a process is killed by SIGSEGV or
    a SIGKILL that nobody explains, or others wait for its trainer in vain, until that happens on another
    machine. Faults are forgotten after an hour of work. After --exclude_after of them (2) it is left out of
    jobs with the same log directory where there are enough other machines.

    \b
    Examples:
      fleetrun nodes
      fleetrun nodes --reset h2

    \b
    Exit codes:
      0  the list is printed, empty or not
      2  no machine of this name has a fault
    """
    path = faults_path(log_dir or LOG_DIR)
    try:
        if reset is not None:
            _forget(path, read_kept(path), reset)
        kept = read_kept(path)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise LaunchError(str(error), hint="Move that file away to begin anew.") from None
    found = counted(kept.faults)
    out = excluded(kept.faults, kept.exclude_after)
    if in_json:
        told = {node: [{"time": each.time, "what": each.what} for each in found[node]] for node in found}
        print_json([{"machine": node, "left_out": node in out, "faults": told[node]} for node in found])
    elif not found:
        remark(f"No machine has a fault in {path.parent}.")
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
        what = f"{len(named)} machines" if named else "no machine with a fault"
        hint = f"Those with faults: {printable(', '.join(there))}" if there else None
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
        ("left out", "red") if out else "",
        f"{describe_duration(max(0.0, now - last.time))} ago",
        last.what,
    ]
