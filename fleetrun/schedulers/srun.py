"""Run the same command with srun on every node of the Slurm allocation that contains this process."""

from __future__ import annotations

import os
from collections.abc import Collection

from fleetrun.aliases import Environ, Strings
from fleetrun.errors import LaunchError, UsageError
from fleetrun.schedulers.base import FLEETRUN, Submission, run_programs
from fleetrun.schedulers.tree import Tree, tree_of_job

_SRUN = (
    "srun",
    "--ntasks-per-node=1",
    # fleetrun itself reports the first failure to all nodes. Slurm's signal would arrive in between and
    # replace the exit code by 143.
    "--kill-on-bad-exit=0",
)


def srun(job: Submission) -> list[str]:
    """Return the words of srun.

    It ends the other tasks a minute after the first, if the job cannot outlive a node.
    """
    return [*_SRUN, *(("--wait=0", "--no-kill") if outlives_a_node(job) else ("--wait=60",))]


def outlives_a_node(job: Submission) -> bool:
    """Return True if the job continues after the loss of a node.

    This needs a spare. Without spares, it needs a job that may shrink and a rendezvous store outside its
    nodes.
    """
    fewest, most = job.settings.nnodes
    return job.settings.spares > 0 or (fewest < most and job.settings.master is not None)


def settled_by_step(job: Submission) -> Strings:
    """Return the options that a step of Slurm sets.

    With the user's rendezvous address, the user also sets the number of nodes.
    """
    return ("ips",) if job.settings.master else ("ips", "nnodes", "master")


class Srun:
    """Implements `--scheduler srun`, the default in a batch script and in the shell of salloc."""

    name = "srun"

    def submit(self, job: Submission) -> int:
        """Replace this process by srun.

        All nodes end with the same exit code, and srun exits with the largest.
        """
        job, tree = tree_of_job(job)
        argv = command(job, tree)
        if job.settings.dry_run:
            import shlex

            job.print(f"{shlex.join(argv)}\n")
            return 0
        unset = job.variables("rank", *settled_by_step(job))
        environ = {name: value for name, value in job.environ.items() if name not in unset}
        environ |= _variables(job)
        if tree is not None:
            _send(job, tree, environ)
        job.console.info(f"On the nodes of Slurm job {job.environ['SLURM_JOB_ID']}: srun")
        try:
            os.execvpe(argv[0], argv, environ)
        except OSError as error:
            raise LaunchError(
                f"cannot run {argv[0]}: {error.strerror}", hint="Is Slurm installed here?"
            ) from None


def _variables(job: Submission) -> dict[str, str]:
    """Return the variables for the tasks. SLURM_EXPORT_ENV makes srun pass them on."""
    found = job.carried | job.own_secrets
    return found | ({"SLURM_EXPORT_ENV": "ALL"} if found else {})


def exported(names: Collection[str], asked: str | None) -> str | None:
    """Return the value of --export for sbatch and srun with these variables.

    By default, both pass on all variables.
    """
    if asked is None or not names or asked.upper().startswith("ALL"):
        return asked
    others = [] if asked.upper() in ("NONE", "NIL") else [asked]
    return ",".join((*others, *names))


def _export(job: Submission) -> Strings:
    asked = exported(tuple(job.carried | job.own_secrets), job.options.given.get("export"))
    return () if asked is None else (f"--export={asked}",)


def unpacking(job: Submission, tree: Tree, verb: str) -> Strings:
    """Return an srun command that sends its stdin to all nodes."""
    words = tree.receiver(job.options.python, verb)
    return ("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *words)


def sending(job: Submission, tree: Tree) -> Strings:
    """Return a step on all nodes of the allocation. Slurm picks the nodes of the following step among
    them.
    """
    first, *rest = unpacking(job, tree, "unpack")
    nodes = nodes_of_allocation(job.environ)
    return (first, f"--nodes={nodes}", f"--ntasks={nodes}", *_export(job), *rest)


def _send(job: Submission, tree: Tree, environ: Environ) -> None:
    """Send the tree with the variables of the following step, because they set where a tree is kept.

    Raises LaunchError.
    """
    nodes, argv = nodes_of_allocation(job.environ), sending(job, tree)
    with tree.archive() as archive:
        answer = run_programs({"": argv}, archive, environ, job.signals, job.guard)[""]
    if answer.code:
        text = next((line for line in answer.err.splitlines() if "fleetrun: error: " in line), answer.err)
        raise LaunchError(f"the code did not reach all nodes: {text.strip() or f'code {answer.code}'}")
    job.console.info(f"Code: {tree.text}, sent to {nodes} node{'' if nodes == '1' else 's'}")


def _nodes(job: Submission) -> str:
    if job.settings.nnodes != (1, 1):
        return str(job.settings.nnodes[1] + job.settings.spares)
    return nodes_of_allocation(job.environ)


def nodes_of_allocation(environ: Environ) -> str:
    """Return the number of nodes of the Slurm job. Empty outside a job."""
    return environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")


def is_switch(value: str) -> bool:
    """Return True if `NAME=value` stands for Slurm's bare `--NAME`."""
    return value.lower() in ("", "true", "yes")


def command(job: Submission, tree: Tree | None = None) -> list[str]:
    """Build the srun command. Raises UsageError outside an allocation."""
    environ, options = job.environ, job.options
    nodes = _nodes(job)
    if not nodes or not environ.get("SLURM_JOB_ID"):
        raise UsageError(
            "--scheduler srun works only inside a Slurm job, and this process is in none",
            hint="Use --scheduler slurm to submit a Slurm job.",
        )
    words = (*options.program(FLEETRUN), *job.command("rank", *settled_by_step(job)))
    if tree is not None:
        words = tree.command(options.python, job.logs, words)
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    others = {name: value for name, value in options.rest().items() if name != "export"}
    return [
        *srun(job),
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--quit-on-interrupt",
        "--input=none",  # it is not in the foreground of the terminal
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *(f"--{name}" if is_switch(value) else f"--{name}={value}" for name, value in others.items()),
        *_export(job),
        *words,
    ]


ENGINE = Srun()
