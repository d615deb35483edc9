"""`fleetrun stop`: ask a job to end, and wait until it has."""

from __future__ import annotations

import click

from fleetrun.commands.find import describe_end, find_running, job_title, of_running
from fleetrun.commands.output import write
from fleetrun.control.client import Gone, NoAnswer, Running, Watched, ask, ask_by_signal
from fleetrun.errors import LaunchError

_TIMEOUT = 5.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False, shell_complete=of_running)
@click.option("--now", is_flag=True, help="Kill the processes at once: SIGKILL without a SIGTERM before.")
def command(job: str | None, now: bool) -> int:
    """Ask a running job to end, and wait until nothing of it is left.

    JOB is the name of a job, its pod, or the beginning of one of them. It can be left out when one job runs.

    The processes get SIGTERM, trainers before servers, and SIGKILL after the --stop_timeout of the launch: as
    after Ctrl-C. A second `fleetrun stop --now` ends the waiting. Of a job on several machines this node
    leaves; what follows from that its --elastic_level and the others decide.

    A launcher that does not answer is sent the signal; one that is stopped (Ctrl-Z) is continued for it.

    \b
    Examples:
      fleetrun stop
      fleetrun stop resnet --now

    \b
    Exit codes:
      0    the job is over
      1    there is no such job
      2    the name fits several jobs
      130  Ctrl-C: the waiting is over, the job goes on ending
    """
    found = find_running(job)
    watched = Watched(found.pid)
    try:
        if _ask(found, now, watched):
            write(f"{job_title(found)} is asked to end\n")
            watched.wait()
    finally:
        watched.close()
    write(f"{job_title(found)} is over{describe_end(found)}\n")
    return 0


def _ask(job: Running, now: bool, watched: Watched) -> bool:
    """By word, or by signal where no word is understood; False when it had ended by itself."""
    try:
        ask(job.socket, {"ask": "stop", "now": now}, _TIMEOUT)
    except Gone:
        return False
    except NoAnswer as silence:
        if not ask_by_signal(silence.pid or job.pid, now):
            if watched.ending():  # that is why it did not answer
                watched.wait()
                return False
            why = f"the launcher of {job_title(job)} does not answer ({silence})"
            raise LaunchError(why, hint="`fleetrun ps` tells whether it still runs.") from None
    return True
