"""The `fleetrun why` command shows which rank the others wait for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import click

from fleetrun.aliases import Document
from fleetrun.commands.everywhere import Where, job_options, nodes_at, read_where
from fleetrun.commands.find import find_running, job_title, json_option, running_job
from fleetrun.commands.output import print_json, write_lines
from fleetrun.console.text import printable
from fleetrun.control.client import NoAnswer, Running, ask
from fleetrun.errors import LaunchError

_MOST = 8
_TIMEOUT = 10.0
"""In seconds. The launchers of all nodes ask their processes, which takes at most 3 seconds."""


@click.command()
@running_job
@json_option()
@job_options
def command(job: str | None, in_json: bool, **options: object) -> int:
    """Show which rank of JOB the others wait for, and where all ranks of all nodes are.

    JOB is a job's name, run ID (pod), script or directory. The default is the job of this directory.

    The probe of each trainer reports its Python stack, and the collectives that it has entered and completed.
    The trainers continue undisturbed. The command hides waits of less than a second, and also shows ranks
    that often arrive late at collectives.

    \b
    Examples:
      fleetrun why
      fleetrun why mnist --json | jq .verdict.ranks
      fleetrun why --job h1:6768/mnist --token_file secret

    \b
    Exit codes:
      0  the places of the ranks are printed
      1  no such job exists, or its launcher does not answer
      2  the command line is wrong, or several jobs match JOB
    """
    where = read_where(options, {"JOB": job})
    if where.url is not None:
        return _why_at(replace(where, node=0), in_json)
    running = find_running(job)
    try:
        answer = ask_why(running)
    except NoAnswer as silence:
        raise LaunchError(
            f"the launcher of {job_title(running)} does not answer ({silence})",
            hint="`fleetrun stacks` reads the processes of this node without the launcher.",
        ) from None
    _show({"version": 1, "job": running.job, "pod": running.pod, **answer}, in_json)
    return 0


def _show(answer: Document, in_json: bool) -> None:
    if in_json:
        print_json(answer)
    else:
        write_lines(map(printable, _lines(answer)))


def _why_at(where: Where, in_json: bool) -> int:
    """Show the diagnosis of a job on other hosts. Node 0 queries the other nodes. Return the exit code."""
    with nodes_at(where) as nodes:
        nodes.ask("why", {"json": True})
        answer = nodes.answer(0)
        code = nodes.report()
    if answer is None:
        return code or 1
    _show(answer, in_json)
    return code


def ask_why(running: Running, *, states: bool = False) -> Document:
    """Ask the launcher for its diagnosis. Raises NoAnswer.

    `verdict` holds the diagnosis, or None if there is no diagnosis. `ranks` holds the lines of the tree of
    all ranks. With `states`, the answer also holds the answers of all probes.
    """
    answer = ask(running.socket, {"ask": "why", "states": states}, _TIMEOUT)
    if not isinstance(answer.get("ranks"), list):
        raise NoAnswer(str(answer.get("error", "its fleetrun has another version")))
    return answer


def _lines(answer: Document) -> Iterator[str]:
    verdict = answer.get("verdict")
    if isinstance(verdict, dict):
        yield str(verdict.get("sentence"))
        yield from (f"    {row}" for row in verdict.get("stack", ()))
    else:
        yield "No rank is known that the others wait for."
    yield from map(str, answer.get("ranks", ()))
    late = (answer.get("late") or ())[:_MOST]
    if late:
        phrases = (f"trainer {each['rank']} {each['share']:.0%} of the time" for each in late)
        yield f"Late to collectives: {', '.join(phrases)}"
