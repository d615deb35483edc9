"""`fleetrun stop`: stop a job, and wait until it has ended."""

from __future__ import annotations

import click

from fleetrun.commands.find import complete_running_jobs, describe_end, find_running, job_title
from fleetrun.commands.output import write
from fleetrun.control.client import Gone, NoAnswer, Running, Watched, ask, ask_by_signal
from fleetrun.errors import LaunchError

_TIMEOUT = 5.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=complete_running_jobs)
@click.option("--now", is_flag=True, help="Kill the processes at once with SIGKILL, without SIGTERM.")
def command(job: str | None, now: bool) -> int:
    """Stop a running job, and wait until all its processes have ended.

    JOB is the name of a job, its pod, or the beginning of either. It is optional if only one job is running.

    As after Ctrl-C, the processes get SIGTERM, trainers before servers, and SIGKILL after the --stop_timeout
    of the launch. A second `fleetrun stop --now` kills them at once. Of a job on several machines only this
    node leaves; whether the others continue depends on --on_node_loss.

    A launcher that does not answer gets a signal instead; one that is stopped (Ctrl-Z) is continued first.

    \b
    Examples:
      fleetrun stop
      fleetrun stop resnet --now

    \b
    Exit codes:
      0    the job has ended
      1    there is no such job
      2    JOB fits several jobs
      130  Ctrl-C: the command no longer waits, but the job still stops
    """
    found = find_running(job)
    watched = Watched(found.pid)
    try:
        if _ask(found, now, watched):
            write(f"stopping {job_title(found)}\n")
            watched.wait()
    finally:
        watched.close()
    write(f"{job_title(found)} has ended{describe_end(found)}\n")
    return 0


def _ask(job: Running, now: bool, watched: Watched) -> bool:
    """By its socket, or by a signal if it does not answer there. False if it had already ended."""
    try:
        ask(job.socket, {"ask": "stop", "now": now}, _TIMEOUT)
    except Gone:
        return False
    except NoAnswer as silence:
        if not ask_by_signal(silence.pid or job.pid, now):
            if watched.ending():  # which is why it did not answer
                watched.wait()
                return False
            why = f"the launcher of {job_title(job)} does not answer ({silence})"
            raise LaunchError(why, hint="`fleetrun ps` shows whether it is still running.") from None
    return True
