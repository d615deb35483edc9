"""srun: the same command on every node of the Slurm allocation that this process runs in."""

from __future__ import annotations

import os

from fleetrun.errors import LaunchError, UsageError
from fleetrun.schedulers.base import FLEETRUN, Submission

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


def settled_by_step(job: Submission) -> tuple[str, ...]:
    """Options that a step of Slurm sets: with a rendezvous of the user's, the user gives the number of
    machines too.
    """
    return ("ips",) if job.settings.master else ("ips", "nnodes", "master")


class Srun:
    """`--scheduler srun`, which is the default in a batch script and in the shell of salloc."""

    name = "srun"

    def submit(self, job: Submission) -> int:
        """Becomes srun: its exit code is the largest of those of the nodes, which end with the same one."""
        argv = command(job)
        if job.settings.dry_run:
            import shlex

            job.print(f"{shlex.join(argv)}\n")
            return 0
        job.console.info(f"On the nodes of Slurm job {job.environ['SLURM_JOB_ID']}: srun")
        unset = job.variables("rank", *settled_by_step(job))
        environ = {name: value for name, value in job.environ.items() if name not in unset}
        environ |= job.carried
        if job.carried:
            environ["SLURM_EXPORT_ENV"] = "ALL"
        try:
            os.execvpe(argv[0], argv, environ)
        except OSError as error:
            raise LaunchError(
                f"cannot run {argv[0]}: {error.strerror}", hint="Is Slurm installed here?"
            ) from None


def is_switch(value: str) -> bool:
    """Whether `NAME=value` means Slurm's bare `--NAME`."""
    return value.lower() in ("", "true", "yes")


def command(job: Submission) -> list[str]:
    """srun and the words for it. Raises UsageError outside an allocation."""
    environ, options = job.environ, job.options
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "")
    if not nodes or not environ.get("SLURM_JOB_ID"):
        raise UsageError(
            "--scheduler srun is for the nodes of a Slurm job, and this process is in none",
            hint="--scheduler slurm submits one.",
        )
    if job.settings.nnodes != (1, 1):
        nodes = str(job.settings.nnodes[1] + job.settings.spares)
    program = options.program(FLEETRUN)
    cpus = environ.get("SLURM_CPUS_PER_TASK")
    return [
        *srun(job),
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--quit-on-interrupt",
        "--input=none",  # it is not in the foreground of the terminal
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        *(f"--{name}" if is_switch(value) else f"--{name}={value}" for name, value in options.rest().items()),
        *program,
        *job.command("rank", *settled_by_step(job)),
    ]


ENGINE = Srun()
