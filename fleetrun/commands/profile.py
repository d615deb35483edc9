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
_OUTPUT = "File to write: .svg for a flame graph, .json for speedscope.app.  [default: JOB.POD.ROLE.RANK.svg]"


@click.command()
@running_job
@click.option(
    "--role", metavar="ROLE", help="Select only these roles: trainer, ps, ..., separated by commas."
)
@click.option("--rank", default="0", show_default=True, metavar="LIST",
              help="Select only these ranks, such as 0,4-7, of trainers unless you set --role.")  # fmt: skip
@click.option("--seconds", default=10, show_default=True, metavar="SECONDS",
              type=click.IntRange(1, _LONGEST), help="Seconds to record.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", help=_OUTPUT)
def command(job: str | None, role: str | None, rank: str, seconds: int, output: str | None) -> int:
    """Record where processes of JOB and their data loader workers spend their time.

    JOB is a job's name, run ID (pod), script or directory. The default is the job of this directory.

    py-spy samples the Python stacks of all threads 100 times a second, from outside: you change nothing, and
    the job continues. The graph includes waiting time, such as waiting for a collective or for data. A thread
    that is always in `_answer` is fleetrun's probe. For a GPU, the graph shows the call that the program
    waits for. To see kernels, use torch.profiler in your script. The command needs
    `pip install 'fleetrun[monitor]'`, and records only processes of this node.

    \b
    Examples:
      fleetrun profile
      fleetrun profile mnist --rank 3 --seconds 30
      fleetrun profile --role ps --rank 0 -o server.json

    \b
    Exit codes:
      0  the files are written
      1  a process could not be read, or no such job exists
      2  the command line is wrong, or several jobs match JOB
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
        raise UsageError(
            f"--output {output} names one file for {len(files)} processes; choose one with --rank"
        )
    titles = ", ".join(each.title for each in chosen)
    remark(f"{printable(job_title(running))}: recording {titles} for {seconds} s")
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
