"""`fleetrun status`: how a running job stands."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import click
from rich.text import Text

from fleetrun.commands import jobview
from fleetrun.commands.finding import Running, find_running, how, named
from fleetrun.commands.jobnames import of_running
from fleetrun.commands.output import print_json, print_lines, room, write
from fleetrun.control.client import STOPPED, Gone, NoAnswer, ask
from fleetrun.control.observed import MOMENT, Observer
from fleetrun.errors import LaunchError, UsageError

_PATIENCE = 1.0  # seconds for an answer while a person looks on


class SilentError(LaunchError):
    """The launcher does not answer."""

    exit_code = 3


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=of_running)
@click.option("--watch", is_flag=True, help="Show it again and again, until q or Ctrl-C.")
@click.option(
    "--interval", type=float, default=1.0, show_default=True, metavar="SECONDS",
    help="With --watch: seconds between two looks.",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="One line of JSON, for programs; with --watch one each time."
)
def command(job: str | None, watch: bool, interval: float, as_json: bool) -> int:
    """Show how a running job stands: its processes, what they use, how far they are, their last words.

    JOB is the name of a job, its pod, or the beginning of one of them. It can be left out when one job runs.

    A process is one line: role and number, its rank where that is another, pid, state, for how long it has
    been running, how often it was restarted, processor (percent of one), memory, GPU, and what it reported:
    step, loss, samples per second. Columns for which there is no room, or nothing known, are left out; --json
    has all. Of a job on several machines each node tells of its own processes.

    \b
    Examples:
      fleetrun status
      fleetrun status resnet --watch
      fleetrun status --json | jq '.containers[] | {name, step, loss}'

    \b
    Exit codes:
      0  the job runs (with --watch: or is over)
      1  there is no such job
      2  the name fits several jobs
      3  the launcher does not answer: it is stopped (Ctrl-Z), or very busy
    """
    if not 0.1 <= interval <= 3600:  # nan neither
        raise click.BadParameter(f"--interval {interval:g}: it must be 0.1 to 3600 seconds")
    found = _answering(find_running(job))
    if watch:
        return _watch(found, interval, as_json)
    observer = Observer()
    time.sleep(MOMENT)
    status = observer.complete(found.status)
    if as_json:
        print_json(status)
    else:
        _print(status)
    return 0


def _answering(job: Running) -> Running:
    if job.silence:
        name = job.job or f"pod {job.pod}"
        mend = "`fg` in its shell continues it, `fleetrun stop` ends it."
        raise SilentError(
            f"{name} runs (pod {job.pod}, pid {job.pid}), but its launcher does not answer: {job.silence}",
            hint=mend if job.silence == STOPPED else None,
        )
    return job


def _print(status: dict[str, Any]) -> None:
    width = room()
    lines = [*jobview.heading(status, width), *jobview.processes(status, width, jobview.moment(status))]
    last = [] if any("LAST LINE" in line.plain for line in lines) else jobview.last_lines(status, width)
    print_lines([*lines, *([Text("")] if last else []), *last])


def _watch(job: Running, interval: float, as_json: bool) -> int:
    view = Watching(job)
    if as_json:
        return _stream(view, interval)
    dumb = os.environ.get("TERM", "dumb") == "dumb"
    if room() is None or dumb:
        what = "a terminal" if room() is None else "more than a dumb terminal (TERM)"
        raise UsageError(f"--watch needs {what}", hint="With --json it prints a line each time, anywhere.")
    from fleetrun.commands.live import show

    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
    number = show(view.picture, interval, sys.stdout.fileno(), keys)
    if view.over:
        write(f"{named(job)} is over{how(job)}\n")
    return 128 + number if number not in (0, signal.SIGINT) else 0


def _stream(view: Watching, interval: float) -> int:
    """Until the job is over, or Ctrl-C."""
    while (status := view.look()) is not None:
        print_json(status)
        time.sleep(interval)
    return 0


class Watching:
    """Asks again and again. `over` when nobody is there to be asked."""

    def __init__(self, job: Running) -> None:
        self.over = False
        self._job = job
        self._observer = Observer()
        self._status: dict[str, Any] = dict(job.status)
        self._silence = ""

    def look(self) -> dict[str, Any] | None:
        """The newest that is known; None when the job is over."""
        try:
            answer = ask(self._job.socket, {"ask": "status"}, _PATIENCE)
        except Gone:
            self.over = True
            return None
        except NoAnswer as silence:
            self._silence = str(silence)
        else:
            self._status, self._silence = self._observer.complete(answer), ""
        return {**self._status, "silent": self._silence or None}

    def picture(self, columns: int, rows: int) -> list[Text] | None:
        status = self.look()
        if status is None:
            return None
        note = f"the launcher does not answer: {self._silence}; this is from before" if self._silence else ""
        return jobview.picture(status, columns, rows, time.time(), note)
