"""The `fleetrun profile` command records where a process of a running job spends its time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from fleetrun.commands.find import find_running, job_title, running_job
from fleetrun.commands.output import output_path, remark, write
from fleetrun.commands.stacks import targets
from fleetrun.console.text import printable
from fleetrun.errors import LaunchError, UsageError
from fleetrun.files import replacing
from fleetrun.host.interpreter import helper_environment
from fleetrun.stacks.collect import PYSPY_MISSING, SpyError, find_pyspy, record_pyspy
from fleetrun.stacks.frames import Target

_FORMATS = {".svg": "flamegraph", ".json": "speedscope"}
_LONGEST = 3600
_OUTPUT = ".svg: a flame graph; .json: for speedscope.app.  [default: JOB.POD.ROLE.RANK.svg]"


@click.command()
@running_job
@click.option("--role", metavar="ROLE", help="Only these roles: trainer, ps, ...; separated by commas.")
@click.option("--rank", default="0", show_default=True, metavar="LIST",
              help="Only these ranks: 3, or 0,4-7; of trainers unless --role is given.")  # fmt: skip
@click.option("--seconds", default=10, show_default=True, metavar="SECONDS",
              type=click.IntRange(1, _LONGEST), help="How long to look.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", help=_OUTPUT)
def command(job: str | None, role: str | None, rank: str, seconds: int, output: str | None) -> int:
    """Write where processes of JOB spend their time, with their data loader workers.

    JOB is a job's name, pod, script or folder; without it, the job of this folder is meant.

    py-spy looks at the Python stacks of all threads 100 times a second, from outside: the job needs no change
    and goes on. Time in which a thread waits counts too, so that waiting for a collective or for data is
    seen; a thread that is in `_answer` all the time is fleetrun's probe. Of a GPU it shows for which call
    the program waits; kernels are shown by torch.profiler, in the script. It needs
    `pip install 'fleetrun[monitor]'`, and acts on this machine.

    \b
    Examples:
      fleetrun profile
      fleetrun profile mnist --rank 3 --seconds 30
      fleetrun profile --role ps --rank 0 -o server.json

    \b
    Exit codes:
      0  the files are written
      1  a process could not be read, or there is no such job
      2  the command line is wrong, or JOB fits several jobs
    """
    program = find_pyspy()
    if program is None:
        raise LaunchError(PYSPY_MISSING)
    running = find_running(job)
    chosen = targets(running, role, rank, "profile")
    files = [
        output_path(output or f"{running.job}.{running.pod}.{each.role}.{each.rank}.svg", tuple(_FORMATS))
        for each in chosen
    ]
    if output is not None and len(files) > 1:
        raise UsageError(f"--output {output}: {len(files)} processes need a file each; choose one rank")
    titles = ", ".join(each.title for each in chosen)
    remark(f"{printable(job_title(running))}: looking at {titles} for {seconds} s")
    env = helper_environment()
    with ThreadPoolExecutor(len(chosen)) as pool:
        errors = list(pool.map(lambda target, to: _record(program, target, to, env, seconds), chosen, files))
    for target, to, error in zip(chosen, files, errors, strict=True):
        if error:
            remark(f"fleetrun: {target.title}, pid {target.pid}: {error}")
        else:
            write(f"{printable(str(to))}\n")
    return 1 if any(errors) else 0


def _record(program: str, target: Target, to: Path, env: dict[str, str], seconds: int) -> str:
    """Record a profile of one process. Return an error text, or an empty string if the file was written."""
    try:
        with replacing(to) as aside:
            record_pyspy(program, target.pid, env, seconds, _FORMATS[to.suffix.lower()], aside)
    except SpyError as error:
        return str(error)
    except OSError as error:
        return f"cannot write {to}: {error.strerror}"
    return ""
