"""Run a job of several nodes on this node: make the objects of the launch, and run them to their end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fleetrun.elastic.agent import Agent
from fleetrun.elastic.answer import Answers
from fleetrun.elastic.ask import OtherNodes
from fleetrun.elastic.meeting import open_meeting
from fleetrun.elastic.membership import Membership
from fleetrun.host.network import Ports
from fleetrun.launcher import joining
from fleetrun.launcher.nodes import Nodes
from fleetrun.launcher.parts import Reach
from fleetrun.launcher.places import PodFactory, ask_ranks
from fleetrun.launcher.runner import PodRunner
from fleetrun.launcher.session import LaunchSession
from fleetrun.plan.topology import Host, Offer


def run_cluster(session: LaunchSession, host: Host, ports: Ports, offer: Offer, facts: str) -> int:
    """Take part in the job and return the exit code. `facts` describes the processes of this node in words.

    Raises LaunchError if something cannot be started.
    """
    settings, loop, interrupts = session.settings, session.loop, session.interrupts
    node = joining.described(session, host, offer)
    runner = PodRunner(session, interrupts)
    nodes, pods = Nodes(session, runner, facts), PodFactory(session, host, runner)
    lease = settings.heartbeat_timeout
    agent = Agent(loop, node, pods, session.publish, timeout=settings.timeout, lease=lease)
    interrupts.listen(agent.interrupt, agent.guard_lost, agent.restart)
    options = joining.meeting_options(session, host, node)
    others = OtherNodes(loop, node.id, options.token)
    meeting = answers = None
    try:
        session.open(Reach(others, partial(ask_ranks, others, agent)), nodes, runner.victims)
        meeting = open_meeting(options, loop, ports)
        if session.notices is not None:  # this holds until the nodes have joined
            session.notices.at_end(settings.rank == 0 if settings.rank >= 0 else meeting.hosted)
        joining.report_meeting(session, host, meeting)
        node = replace(node, has_store=meeting.hosted or meeting.member)
        policy = joining.policy(settings, host, meeting)
        membership = Membership(meeting.store, loop, node, policy, agent)
        others.join(membership)
        answers = Answers(
            loop,
            membership,
            node.id,
            session.spec.name,
            session.companions,
            options.token,
            state=session.status.packed,
            ranks=session.ranks.answer,
            stop=interrupts.stop,
            restart=interrupts.restart,
        )
        url = f"{meeting.endpoint}/{settings.job_id}"
        session.set_store(joining.store_address(options, meeting), url)
        outcome = agent.run(membership, start_checks=meeting.start_checks, serves=meeting.hosted)
        runner.over()
        session.over(nodes.report_end(outcome, served="://" not in meeting.endpoint))
    finally:
        if answers is not None:
            answers.close()
        if meeting is not None:
            meeting.close()
        session.close()
    return outcome.code
