"""The `fleetrun top` command shows the live view of a running job until the user quits."""

from __future__ import annotations

import os
import signal
import sys

import click

from fleetrun.commands.everywhere import Where, node_options, nodes_at, read_where
from fleetrun.commands.find import find_running, interval_option, running_job
from fleetrun.commands.live_job import RemoteWatch
from fleetrun.commands.output import write
from fleetrun.commands.status import NodeFilter, StatusWatch, answering, check_interval
from fleetrun.errors import UsageError
from fleetrun.host.interpreter import check_package


@click.command()
@running_job
@interval_option(help="Seconds between two updates.")
@node_options
def command(job: str | None, interval: float, **options: object) -> int:
    """Show a running job live: all processes of all nodes, with their state, steps, step times and lateness.

    JOB is a job's name, run ID (pod), script or directory. The default is the job of this directory.

    The bottom line shows the keys: sort, filter, the stack and the log of a process, the tables of parameter
    servers, restart and stop. Restart and stop ask first. q leaves the view, and the job continues. When the
    job ends, the view stays open and shows how it ended. --job works from a host outside of the job.

    Scripts use `fleetrun status --json` instead.

    \b
    Examples:
      fleetrun top
      fleetrun top resnet --node 3
      fleetrun top --job h1:6768/resnet --token_file secret

    \b
    Exit codes:
      0  you left the view with q or Ctrl-C
      1  no such job exists
      2  several jobs match JOB, or no terminal is connected
      3  the launcher does not answer: it is stopped (Ctrl-Z) or very busy
    """
    check_interval(interval)
    _check_terminal()
    check_package("textual", "fleetrun top", "monitor")
    where = read_where(options, {"JOB": job})
    if where.url is not None:
        with nodes_at(where) as nodes:
            return _show(RemoteWatch(nodes, where.url, interval), where, interval)
    found = answering(find_running(job))
    wanted = NodeFilter(where.node, whole=True)
    wanted.check(found.status)
    return _show(StatusWatch(found, wanted), where, interval)


def _show(watch: StatusWatch | RemoteWatch, where: Where, interval: float) -> int:
    for name in ("COLUMNS", "LINES"):  # they would hide a change of the window's size
        os.environ.pop(name, None)
    # not all terminals support the protocol, and no key needs it
    os.environ.setdefault("TEXTUAL_DISABLE_KITTY_KEY", "1")
    # imported late, so that the errors above appear immediately
    from fleetrun.commands.live_screen import Top

    top = Top(watch, where, interval)
    number = top.run() or 0
    if top.return_code:  # a bug, which Textual has printed
        return top.return_code
    if top.end:
        write(f"{top.end}\n")
    return 128 + number if number not in (0, signal.SIGINT) else 0


def _check_terminal() -> None:
    """Raise UsageError if there is no suitable terminal."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if not all(each is not None and each.isatty() for each in streams):
        what = "a terminal as standard input, output and error"
    elif os.environ.get("TERM", "dumb") == "dumb":
        what = "a terminal that is not dumb (TERM)"
    else:
        return
    raise UsageError(
        f"fleetrun top needs {what}", hint="`fleetrun status` prints the same once, also as --json."
    )
