"""Run a job of several nodes on this node: make the objects of the launch, and run them to their end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fleetrun.elastic.agent import Agent
from fleetrun.elastic.inquiry import Inquiry
from fleetrun.elastic.meeting import open_meeting
from fleetrun.elastic.membership import Membership
from fleetrun.elastic.requests import Requests
from fleetrun.host.network import Ports
from fleetrun.launcher import joining
from fleetrun.launcher.nodes import Nodes
from fleetrun.launcher.parts import Reach
from fleetrun.launcher.places import PodFactory, ask_ranks
from fleetrun.launcher.runner import PodRunner
from fleetrun.launcher.session import LaunchSession
from fleetrun.launcher.spares import Spares
from fleetrun.plan.topology import Host, Offer


def run_cluster(session: LaunchSession, host: Host, ports: Ports, offer: Offer, facts: str) -> int:
    """Take part in the job and return the exit code. `facts` describes the processes of this node in words.

    Raises LaunchError if something cannot be started.
    """
    settings, loop, interrupts = session.settings, session.loop, session.interrupts
    node = joining.described(session, host, offer)
    runner = PodRunner(session, interrupts)
    nodes, pods = Nodes(session, runner.victims, facts), PodFactory(session, host, runner)
    lease = settings.heartbeat_timeout
    agent = Agent(loop, node, pods, session.publish, timeout=settings.timeout, lease=lease)
    interrupts.listen(agent.interrupt, agent.guard_lost, agent.restart)
    others = Inquiry(loop, node.id, session.status.packed, lambda *how: session.ranks.tell(*how))
    options = joining.meeting_options(session, host, node)
    requests = Requests(
        loop,
        node.id,
        session.spec.name,
        session.companions,
        options.token,
        interrupts.stop,
        interrupts.restart,
    )
    spares = Spares(agent, session) if settings.warm and settings.spares > 0 else None
    meeting = None
    try:
        listed = spares.listed if spares is not None else None
        reach = Reach(others, partial(ask_ranks, others, agent), listed)
        session.open(reach, *filter(None, (nodes, spares, runner.victims)))
        meeting = open_meeting(options, loop, ports)
        if session.notices is not None:  # this holds until the nodes have joined
            session.notices.at_end(settings.rank == 0 if settings.rank >= 0 else meeting.hosted)
        joining.tell_meeting(session, host, meeting)
        node = replace(node, has_store=meeting.hosted or meeting.member)
        policy = joining.policy(settings, host, meeting)
        membership = Membership(meeting.store, loop, node, policy, agent)
        others.membership = requests.membership = membership
        membership.when_looked += [others.look, requests.look]
        membership.lingers = requests.lingers
        url = f"{meeting.endpoint}/{settings.job_id}"
        session.set_store(joining.store_address(options, meeting), url)
        if spares is not None:
            spares.membership = membership
            spares.trusted = joining.only_nodes_write(meeting.endpoint, options.token)
            membership.when_looked.append(spares.look)
        outcome = agent.run(membership, start_checks=meeting.start_checks, serves=meeting.hosted)
        runner.over()
        session.over(nodes.report_end(outcome, pods.last, served="://" not in meeting.endpoint))
    finally:
        requests.close()
        if meeting is not None:
            meeting.close()
        session.close()
    return outcome.code
