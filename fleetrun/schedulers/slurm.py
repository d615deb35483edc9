"""Read the placement of Slurm's srun, and implement `--scheduler slurm`, which writes a batch script for
sbatch.
"""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from fleetrun.aliases import Environ
from fleetrun.envs.contract import agreed_port, join_endpoint
from fleetrun.envs.settings.command_line import EngineValue
from fleetrun.envs.settings.parsing import byte_size
from fleetrun.envs.variables import JOB_FILE
from fleetrun.errors import LaunchError, UsageError
from fleetrun.schedulers import base
from fleetrun.schedulers.base import (
    FLEETRUN,
    Submission,
    excluded_nodes,
    gpus,
    has_secrets,
    processes,
)
from fleetrun.schedulers.srun import (
    exported,
    is_switch,
    nodes_of_allocation,
    outlives_a_node,
    settled_by_step,
    srun,
    unpacking,
)
from fleetrun.schedulers.tree import Tree, tree_of_job

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # batch, extern and interactive steps, which srun did not start for this job
_STEPS_PER_JOB = 16  # ports of neighbouring jobs stay apart for this many steps

# ---- placement


def place(environ: Environ, but: Collection[str] = ()) -> Mapping[str, EngineValue]:
    """Make each task of the step one node of the job, in the order of the tasks.

    A batch script or the shell of salloc has no step. fleetrun then has to start itself on the nodes.
    """
    if not _in_step(environ):
        nodes = nodes_of_allocation(environ)
        on_a_node = bool(environ.get("SLURM_PROCID"))  # otherwise salloc's shell, which may run anywhere
        if not nodes or (nodes == "1" and on_a_node):
            return {}
        return {"scheduler": EngineValue("srun", "SLURM_JOB_NUM_NODES")}
    step, job = _number(environ, "SLURM_STEP_ID"), environ["SLURM_JOB_ID"]
    found = {"job_id": EngineValue(f"{job}.{step}" if step else job, "SLURM_JOB_ID")}
    tasks = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    if _number(environ, tasks) > 1:
        found["nnodes"] = EngineValue(environ[tasks], tasks)
        found["rank"] = EngineValue(environ["SLURM_PROCID"], "SLURM_PROCID")
        if "master" not in but:
            port = agreed_port(_number(environ, "SLURM_JOB_ID") * _STEPS_PER_JOB + step)
            host = _address(_first_host(environ), environ)
            found["master"] = EngineValue(join_endpoint(host, port), "SLURM_STEP_NODELIST")
    return found


def _in_step(environ: Environ) -> bool:
    """Return True if srun started this process. Batch scripts and shells of salloc run outside steps."""
    if not environ.get("SLURM_STEP_ID") or not environ.get("SLURM_PROCID"):
        return False
    return _number(environ, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP


def _first_host(environ: Environ) -> str:
    """Return the node of task 0, the first of the list unless a host file sets another order."""
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        return _first_of_file(environ)
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    item = _FIRST_ITEM.match(text)
    if item is None:
        raise UsageError(f"SLURM_STEP_NODELIST is {text!r}, which is not a list of hosts")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", item[0])


_FIRST_ITEM = re.compile(r"(?:[^][,]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+(?=,|$)")
"""The first item of a list of hosts, such as `n[1-2,07]` of `n[1-2,07],m3`, which is n1, n2, n07 and m3."""


def _first_of_file(environ: Environ) -> str:
    """Return the first host of the host file.

    In an arbitrary distribution, only that file shows the node of task 0.
    """
    try:
        return Path(environ["SLURM_HOSTFILE"]).read_text().split()[0]
    except (KeyError, OSError, IndexError):
        tasks = environ.get("SLURM_STEP_NUM_TASKS", "N")
        raise UsageError(
            "the tasks are distributed arbitrarily, and without a readable SLURM_HOSTFILE fleetrun "
            "cannot find the node of the first task",
            hint=f"Add --nnodes {tasks} --master HOST:PORT, or choose another --distribution.",
        ) from None


def _address(node: str, environ: Environ) -> str:
    """Return the node's name if it resolves, else the address that Slurm itself uses."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        output = base.program_output(("scontrol", "--oneliner", "show", "node", node), environ) or ""
        found = re.search(r"\bNodeAddr=(\S+)", output)
        return found[1] if found else node
    return node


def _number(environ: Environ, name: str) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"{name} is {text!r}; it must be a whole number")
    return int(text)


# ---- submission

_EXPORT = "SBATCH_EXPORT"

_LARGEST_ARCHIVE = 3 << 20
"""In characters. Slurm accepts scripts of 4 MiB, unless max_script_size differs."""


class Slurm:
    """Implements `--scheduler slurm`. Prints a batch script, or gives it to sbatch."""

    name = "slurm"

    def submit(self, job: Submission) -> int:
        script = batch_script(job)
        if job.settings.dry_run:
            job.print(script)
            return 0
        argv = ("sbatch", "--parsable")
        # SBATCH_EXPORT would override the script, which already contains its value.
        inherited = {name: value for name, value in job.environ.items() if name != _EXPORT}
        environ = {**inherited, **_hidden(job)}
        answer = base.run_program(argv, script, environ, job.signals, job.guard)
        if answer.code != 0 and not answer.out:
            raise LaunchError(f"sbatch did not accept the job: {answer.err.strip() or f'code {answer.code}'}")
        number = answer.out.strip().partition(";")[0]
        job.console.info(f"Submitted as Slurm job {number}: squeue -j {number}, scancel {number}")
        if "output" not in job.options.given:
            job.console.info(f"Its output: tail -F slurm-{number}.out")
        job.print(f"{number}\n")
        return answer.code


def batch_script(job: Submission) -> str:
    """Build the script for sbatch.

    Raises UsageError for settings that Slurm decides, and for text that a line cannot hold.
    """
    if job.settings.ips:
        raise UsageError(
            "--ips and --scheduler slurm exclude each other, because Slurm chooses the nodes",
            hint="Set the number with --nnodes, and the names with --scheduler_option nodelist=h1,h2.",
        )
    options = job.options
    job, tree = tree_of_job(job)
    program = options.program(FLEETRUN)
    lines = ["#!/bin/bash", *_directives(job)]
    settled = ("rank", "devices", *settled_by_step(job))
    unset = job.variables(*settled)
    if unset:
        lines.append(f"unset {' '.join(unset)}")
    lines += _carried(job)
    words = (*program, *job.command(*settled))
    if tree is not None:
        lines += _unpacked(job, tree)
        words = tree.command(options.python, job.logs, words)
    lines.append(
        f"exec {shlex.join(srun(job))} ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \\\n"
        f"    {' '.join(map(quoted, words))}"
    )
    return "\n".join(lines) + "\n"


def _unpacked(job: Submission, tree: Tree) -> Iterator[str]:
    """Put the archive into the script, because sbatch transfers only the script. Raises UsageError."""
    import base64  # imported late, because only --sync needs it

    with tree.archive() as archive:
        text = base64.encodebytes(archive.read()).decode()
    if len(text) > _LARGEST_ARCHIVE:
        raise UsageError(
            f"--sync {job.settings.sync} is {tree.text}, packed {byte_size(len(text))}; "
            f"a batch script can have {byte_size(_LARGEST_ARCHIVE)} of it",
            hint="An allocation (`salloc fleetrun --sync . train.py`) has no such limit.",
        )
    words = unpacking(job, tree, "unpack64")
    yield f"{shlex.join(words)} <<'CODE' || exit\n{text}CODE"
    yield "export PADDLE_JOB_ID=${PADDLE_JOB_ID:-$SLURM_JOB_ID}  # not that of a second step"
    job.console.info(f"Code: {tree.text}, in the batch script")


def _hidden(job: Submission) -> dict[str, str]:
    """Return the variables whose values stay out of the script. sbatch receives them in its environment."""
    whole = {} if has_secrets(job.job_file) else {JOB_FILE}
    return {name: value for name, value in job.carried.items() if name not in whole} | job.own_secrets


def _carried(job: Submission) -> Iterator[str]:
    """Yield the lines that export the job file, unless it has secrets."""
    text, hidden = job.carried.get(JOB_FILE), _hidden(job)
    if JOB_FILE in hidden:
        yield f"# {JOB_FILE} has secrets: it is in the environment of sbatch"
    elif text is not None:
        yield f"export {JOB_FILE}={quoted(text)}"
    if text is not None or hidden:
        yield "export SLURM_EXPORT_ENV=ALL"  # otherwise srun would drop the variables given to sbatch


def _directives(job: Submission) -> Iterator[str]:
    """Yield the #SBATCH lines. Values of --scheduler_option replace or follow the default lines."""
    settings = job.settings
    wanted = {"job-name": job.own_name or "fleetrun"}
    nodes = [number + settings.spares for number in settings.nnodes]
    wanted["nodes"] = "-".join(map(str, dict.fromkeys(nodes)))
    bad = excluded_nodes(job)
    if bad:
        wanted["exclude"] = ",".join(bad)
    wanted["ntasks-per-node"] = "1"
    devices, count = gpus(job), processes(settings)
    if devices:
        wanted["gpus-per-node"] = str(devices)
    if count > 1:
        wanted["cpus-per-task"] = str(count)  # otherwise the processes would share one core
    if settings.timeout is not None:
        # One minute more than fleetrun needs to end the job itself, with exit code 124.
        wanted["time"] = str(int((settings.timeout + settings.stop_timeout + 119) // 60))
    wanted["open-mode"] = "append"  # a requeued job appends to its file
    if outlives_a_node(job):
        wanted["no-kill"] = ""
    given = job.options.rest()
    export = exported(_hidden(job).keys(), given.get("export") or job.environ.get(_EXPORT))
    for name, value in (wanted | given | ({} if export is None else {"export": export})).items():
        yield _directive(name, value)


def _directive(name: str, value: str) -> str:
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9-]*", name):
        raise UsageError(f"--scheduler_option {name}: sbatch has no such option")
    if is_switch(value):
        return f"#SBATCH --{name}"
    if not value.isprintable():
        raise UsageError(f"--scheduler_option {name}={value!r}: a line of a batch script cannot hold it")
    plain = re.fullmatch(r"[\w@%+=:,./^*\[\]&|~-]+", value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"#SBATCH --{name}={value}" if plain else f'#SBATCH --{name}="{escaped}"'


def quoted(word: str) -> str:
    """Quote the word for bash. Control characters become escapes, as sbatch rejects a carriage return."""
    if word.isprintable():
        return shlex.quote(word)
    letters = (
        f"\\{letter}" if letter in "\\'" else letter if letter.isprintable() else _escaped(letter)
        for letter in word
    )
    return f"$'{''.join(letters)}'"


def _escaped(letter: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))


ENGINE = Slurm()
