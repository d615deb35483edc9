"""Make the pods of this node in a job of several nodes, one per generation. Find the positions of the ranks
on the other nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fleetrun.aliases import Callback, Strings
from fleetrun.console.narrator import failure_headline
from fleetrun.elastic.agent import Agent, Assignment
from fleetrun.elastic.ask import AnswersByRank, OtherNodes
from fleetrun.elastic.rendezvous.checks import Measured
from fleetrun.elastic.rendezvous.records import Node, Round
from fleetrun.launcher.ending import WIDE, failure_report
from fleetrun.launcher.node_check import NodeCheck
from fleetrun.launcher.nodes import place_name
from fleetrun.launcher.parts import Launch
from fleetrun.launcher.runner import PodRunner, announce
from fleetrun.plan.topology import Host, check_complete, pod_spec
from fleetrun.pod.container import Ended
from fleetrun.pod.events import Detail, JobResult, Peers, Verdict, code_of
from fleetrun.pod.supervisor import Supervisor

if TYPE_CHECKING:
    from fleetrun.stacks.helper import State


class PodFactory:
    """A factory of the pods of this node. All generations use the same name and log files."""

    def __init__(self, launch: Launch, host: Host, runner: PodRunner) -> None:
        self._launch = launch
        self._host = host
        self._runner = runner

    def check(
        self, round: Round, members: Sequence[Node], rank: int, then: Callable[[Measured], None]
    ) -> Callback:
        return NodeCheck(self._launch, self._host, round, members, rank, then).cancel

    def supervisor(self, place: Assignment, peers: Peers) -> Supervisor:
        offers = [each.offer for each in place.members]
        settings, pod = self._launch.settings, self._launch.spec.name
        check_complete(settings, offers)
        spec = pod_spec(settings, self._host, offers, place.rank, pod=pod, environ=os.environ)
        if place.first:
            announce(spec, self._launch.console)
        return self._runner.supervisor(
            spec, peers=peers, restarts=place.restarts, spent=place.spent, attempt=place.attempts
        )

    def describe(self, ended: Ended, verdict: Verdict | None, why: str) -> tuple[str, Strings, str]:
        alone = JobResult(code=code_of(ended), cause=ended, verdict=verdict, reason=why)
        _, *lines, log, summary = failure_report(alone, self._launch.log_dir, WIDE)
        log = f"{log.partition(':')[0]}: {ended.spec.log}"  # other processes have their logs on other nodes
        headline = failure_headline(ended) if verdict is None else verdict.sentence
        return headline, (*lines, log), summary


def ask_ranks(
    others: OtherNodes, agent: Agent, detail: Detail, then: Callable[[list[State], str], None]
) -> None:
    """Find the positions of the ranks on the other nodes, as `AskOthers` of `stacks.helper`. If a node does
    not answer, `then` gets its ranks with a note.
    """
    place = agent.place
    if place is None:
        then([], "")
        return
    here = place_name(place.members[place.rank].name, place.rank)
    others.ask("ranks", {"detail": str(detail)}, lambda found: then(_states(found, place), here))


def _states(found: AnswersByRank, place: Assignment) -> list[State]:
    from fleetrun.stacks.helper import unpack_states  # late: few jobs need it

    states: list[State] = []
    first = 0
    for number, member in enumerate(place.members):
        ranks = range(first, first + len(member.offer.trainers))
        first = ranks.stop
        if number not in found:
            continue
        node, answer = place_name(member.name, number), found[number]
        if answer is not None:
            states += unpack_states(*answer, node)
        else:
            silent = {"alive": True, "node": node, "note": "on a node that does not answer"}
            states += [{**silent, "rank": rank, "title": f"trainer {rank}"} for rank in ranks]
    return states
