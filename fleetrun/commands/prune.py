"""The `fleetrun prune` command deletes the logs and event logs of old runs."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import click

from fleetrun.commands.find import (
    LOG_DIR,
    EndedJob,
    NoJobError,
    ended_jobs,
    logs_of_launches,
    named_jobs,
)
from fleetrun.commands.output import remark, write
from fleetrun.console.text import printable
from fleetrun.control.client import Running, running_launches
from fleetrun.envs.settings.parsing import InvalidValue, byte_size, plural, seconds
from fleetrun.errors import LaunchError, UsageError
from fleetrun.record.history import UnreadableError, glance


@click.command()
@click.argument("job", required=False)
@click.option(
    "--keep", type=click.IntRange(0), default=10, show_default=True, help="Number of newest runs to keep."
)
@click.option(
    "--older_than", "--older-than", metavar="TIME", help="Delete only runs older than this, such as 12h."
)
@logs_of_launches
@click.option("-y", "--yes", is_flag=True, help="Delete without a question.")
def command(job: str | None, keep: int, older_than: str | None, log_dir: Path | None, yes: bool) -> int:
    """Delete the logs and event logs of old runs, except of the newest --keep runs.

    JOB limits the command to runs with this whole name, run ID (pod) or script. The command deletes all
    files of a run in --log_dir: LOG_DIR/JOB.POD.*. It keeps the files of runs that may still be running, and
    the files of other users. It also keeps checkpoints, saved tables, tables of parameter servers and the
    faults of nodes. On a terminal, fleetrun shows the list and asks first.

    \b
    Examples:
      fleetrun prune
      fleetrun prune --keep 3 --yes
      fleetrun prune train.py --keep 0 --older_than 30d

    \b
    Exit codes:
      0    the files are deleted, or no run is old enough
      1    no such job exists, or some files could not be deleted
      2    the command cannot ask, because no terminal is connected: add --yes
      130  you answered no, or pressed Ctrl-C
    """
    place = log_dir or LOG_DIR
    before = math.inf
    if older_than is not None:
        try:
            before = time.time() - seconds(older_than.strip())
        except InvalidValue:
            raise UsageError(f"--older_than {older_than}: use a time such as 12h or 30d") from None
    running = running_launches(os.environ)
    there = ended_jobs(place, {each.pod for each in running})
    chosen = there if job is None else named_jobs(job, there)
    if job is not None and not chosen:
        raise NoJobError(
            f"no job {printable(job)!r} has an event log in {place}", hint="Write the whole name of the job."
        )
    old = [each for each in reversed(chosen[keep:]) if (each.written or 0.0) < before]
    deletable = [each for each in old if _may_be_deleted(each)]
    if len(deletable) < len(old):
        remark(f"{plural(len(old) - len(deletable), 'launch')} kept: running, unreadable or another user's")
    if not deletable:
        write(f"nothing to delete in {place}: {plural(len(there), 'launch')}\n")
        return 0
    present: list[EndedJob | Running] = [*running, *there]
    owners = {f"{each.job}.{each.pod}." for each in present}
    files = [path for each in deletable for path in _files(each, owners)]
    what = f"{plural(len(deletable), 'launch')}, {byte_size(sum(map(_size, files)))}"
    if not yes:
        _confirm(deletable, what)
    failed = [path for path in files if not _deleted(path)]
    if failed:
        raise LaunchError(f"{len(failed)} files could not be deleted, the first is {failed[0]}")
    write(f"deleted {what}\n")
    return 0


def _may_be_deleted(job: EndedJob) -> bool:
    """Return True for a run of this user that has certainly ended."""
    try:
        found = glance(job.record)
        # without file locks, only the final event proves the end
        ended = found.running is False or found.over is not None
        return job.record.stat().st_uid == os.getuid() and not found.running and ended
    except (UnreadableError, OSError):
        return False


def _files(job: EndedJob, owners: Collection[str]) -> Iterator[Path]:
    """Yield the files of a run in its directory, with its event log last. A run whose deletion fails is then
    found again.

    `owners`: the file prefixes of all runs. Job `a` with run ID `b` does not own the files of job `a.b`.
    """
    start = f"{job.job}.{job.pod}."
    with os.scandir(job.log_dir) as entries:
        names = sorted(
            each.name
            for each in entries
            if each.name.startswith(start) and each.is_file(follow_symlinks=False)
        )
    for name in names:
        owner = max((each for each in owners if name.startswith(each)), key=len, default=start)
        if owner == start and job.log_dir / name != job.record:
            yield job.log_dir / name
    links = job.log_dir / f".latest.{job.pod}"
    if links.is_dir() and not links.is_symlink():
        yield from (each for each in links.iterdir() if each.is_symlink())
        yield links
    latest = job.log_dir / "latest"
    if latest.is_symlink() and os.fspath(latest.readlink()) == links.name:
        yield latest
    yield job.record


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


def _deleted(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _confirm(old: Sequence[EndedJob], what: str) -> None:
    if not (sys.stdin and sys.stdin.isatty()):
        raise UsageError(f"{what} would be deleted", hint="Add --yes to delete the files without a question.")
    for each in old:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.written or 0.0))
        click.echo(f"  {at}  {printable(each.job)} {each.pod} {printable(each.script)}".rstrip())
    click.confirm(f"Delete {what}?", abort=True)
