"""srun: the same command on every node of the Slurm allocation that this process runs in."""

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
    # fleetrun itself reports the first failure to all nodes; Slurm's own signal would come in between and
    # put 143 in place of the exit code.
    "--kill-on-bad-exit=0",
)


def srun(job: Submission) -> list[str]:
    """It ends the others a minute after the first, unless the job goes on without a node."""
    return [*_SRUN, *(("--wait=0", "--no-kill") if outlives_a_node(job) else ("--wait=60",))]


def outlives_a_node(job: Submission) -> bool:
    """Whether the job continues when a node is lost: with a spare; or with fewer, where the rendezvous store
    is not on one of them.
    """
    fewest, most = job.settings.nnodes
    return job.settings.spares > 0 or (fewest < most and job.settings.master is not None)


def settled_by_step(job: Submission) -> Strings:
    """Options that a step of Slurm sets: with a rendezvous of the user's, the user gives the number of
    machines too.
    """
    return ("ips",) if job.settings.master else ("ips", "nnodes", "master")


class Srun:
    """`--scheduler srun`, which is the default in a batch script and in the shell of salloc."""

    name = "srun"

    def submit(self, job: Submission) -> int:
        """Becomes srun: its exit code is the largest of those of the nodes, which end with the same one."""
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
    """Those that the tasks get, and the word to srun that they get any."""
    found = job.carried | job.own_secrets
    return found | ({"SLURM_EXPORT_ENV": "ALL"} if found else {})


def exported(names: Collection[str], asked: str | None) -> str | None:
    """--export of sbatch and srun with these variables; all are passed on unless they are told otherwise."""
    if asked is None or not names or asked.upper().startswith("ALL"):
        return asked
    others = [] if asked.upper() in ("NONE", "NIL") else [asked]
    return ",".join((*others, *names))


def _export(job: Submission) -> Strings:
    asked = exported(tuple(job.carried | job.own_secrets), job.options.given.get("export"))
    return () if asked is None else (f"--export={asked}",)


def unpacking(job: Submission, tree: Tree, verb: str) -> Strings:
    """srun, whose stdin goes to all nodes."""
    words = (job.options.python, "-m", "fleetrun.schedulers.tree_remote", verb, tree.digest)
    return ("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *words)


def sending(job: Submission, tree: Tree) -> Strings:
    """A step on all nodes of the allocation: Slurm chooses those of the step that follows."""
    first, *rest = unpacking(job, tree, "unpack")
    nodes = nodes_of_allocation(job.environ)
    return (first, f"--nodes={nodes}", f"--ntasks={nodes}", *_export(job), *rest)


def _send(job: Submission, tree: Tree, environ: Environ) -> None:
    """With the variables of the step that follows: they say where a tree is kept. Raises LaunchError."""
    nodes, argv = nodes_of_allocation(job.environ), sending(job, tree)
    with tree.archive() as archive:
        answer = run_programs({"": argv}, archive, environ, job.signals, job.guard)[""]
    if answer.code:
        said = next((line for line in answer.err.splitlines() if "fleetrun: error: " in line), answer.err)
        raise LaunchError(f"the code did not get to all nodes: {said.strip() or f'code {answer.code}'}")
    job.console.info(f"Code: {tree.text}, sent to {nodes} node{'' if nodes == '1' else 's'}")


def _nodes(job: Submission) -> str:
    if job.settings.nnodes != (1, 1):
        return str(job.settings.nnodes[1] + job.settings.spares)
    return nodes_of_allocation(job.environ)


def nodes_of_allocation(environ: Environ) -> str:
    """How many nodes the job has; empty outside a job."""
    return environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")


def is_switch(value: str) -> bool:
    """Whether `NAME=value` means Slurm's bare `--NAME`."""
    return value.lower() in ("", "true", "yes")


def command(job: Submission, tree: Tree | None = None) -> list[str]:
    """srun and the words for it. Raises UsageError outside an allocation."""
    environ, options = job.environ, job.options
    nodes = _nodes(job)
    if not nodes or not environ.get("SLURM_JOB_ID"):
        raise UsageError(
            "--scheduler srun is for the nodes of a Slurm job, and this process is in none",
            hint="--scheduler slurm submits one.",
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
