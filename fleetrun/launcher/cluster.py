"""The launch of a job on several machines, on each of them: makes its objects, and words what the user is
told about nodes.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fleetrun import __version__
from fleetrun.aliases import Callback, Strings
from fleetrun.console.console import Console, terminal_columns
from fleetrun.console.narrator import failure_headline
from fleetrun.console.text import printable, wrapped
from fleetrun.elastic.agent import Agent, Assignment, Outcome
from fleetrun.elastic.inquiry import Answers, Inquiry
from fleetrun.elastic.meeting import Meeting, MeetingOptions, check_meeting, open_meeting
from fleetrun.elastic.membership import Membership
from fleetrun.elastic.rendezvous.actions import Policy, Waiting
from fleetrun.elastic.rendezvous.checks import Measured
from fleetrun.elastic.rendezvous.records import IMPORTS_KEY, Cause, CauseKind, Node, Round
from fleetrun.elastic.requests import Requests
from fleetrun.elastic.store import Entry
from fleetrun.envs.contract import TOKEN, NodeLoss, split_endpoint
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.envs.settings.show import agreed, words
from fleetrun.errors import LaunchError, StoreLostError
from fleetrun.host.network import LOOPBACK, Ports
from fleetrun.host.software import differences, installed, kinds, packed, search_path
from fleetrun.launcher.ending import WIDE, failure_report, first_failure, tell_strays
from fleetrun.launcher.node_check import NodeCheck
from fleetrun.launcher.parts import End, Reach
from fleetrun.launcher.prepare import (
    check_followed,
    equipped,
    is_first,
    offer_of,
    patience,
    pod_name,
    print_plan,
    runs_python,
)
from fleetrun.launcher.runner import PodRunner, announce
from fleetrun.launcher.session import LaunchSession
from fleetrun.launcher.signals import Interrupts
from fleetrun.launcher.victims import Victims
from fleetrun.plan.topology import Host, Offer, check_complete, placed, pod_spec
from fleetrun.pod import logs
from fleetrun.pod.container import Ended
from fleetrun.pod.events import HUNG, Detail, JobResult, Peers, Verdict, code_of
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import Budget
from fleetrun.pod.spec import PodSpec
from fleetrun.pod.supervisor import Supervisor
from fleetrun.record.faults import MachineFaults, excluded, faults_path, keep, read_kept, said_faults

if TYPE_CHECKING:
    from fleetrun.launcher.notices import Notices
    from fleetrun.stacks.helper import State

_FRAME = 80
_MOST_NOTED = 1000  # machines, of which the record says what runs there


def run_cluster(
    resolved: Resolved,
    host: Host,
    ports: Ports,
    console: Console,
    loop: Loop,
    interrupts: Interrupts,
    show_settings: Callable[[Resolved, Host, PodSpec], str],
) -> int:
    """Take part in the job; return the exit code. `show_settings` tells what runs on this machine.

    Raises LaunchError for what cannot be started.
    """
    settings = resolved.settings
    check_meeting(host.master)
    host = equipped(host, resolved, console.warning, os.environ)
    offer = offer_of(settings, host, ports)
    pod = pod_name()
    imagined = pod_spec(
        settings, host, _imagined(host, offer), _imagined_rank(host), pod=pod, environ=os.environ
    )
    check_followed(resolved, imagined)
    if settings.dry_run:
        print_plan(settings, imagined)
        return 0
    logs.make_log_dir(Path(settings.log_dir))
    facts = show_settings(resolved, host, imagined)
    session = LaunchSession(resolved, imagined, console, loop, interrupts)
    node = _node(session, host, offer)
    runner = PodRunner(session, interrupts)
    reporter = NodeReporter(console, terminal_columns() or WIDE, facts)
    events = _NodeEvents(session, reporter, runner.victims)
    pods = PodFactory(session, host, runner)
    lease = settings.heartbeat_timeout
    agent = Agent(loop, node, pods, events, timeout=settings.timeout, lease=lease)
    interrupts.listen(agent.interrupt, agent.guard_lost, agent.restart)
    others = Inquiry(loop, node.id, session.status.packed, session.tell_ranks)
    token = os.environ.get(TOKEN, "")
    stop = partial(_stop_for, interrupts)
    requests = Requests(loop, node.id, pod, session.companions, token, stop, interrupts.restart)
    meeting = None
    try:
        warmth = SpareWarmth(agent, session, imagined)
        needed = settings.warm and settings.spares > 0
        session.open(Reach(others, OtherRanks(others, agent).ask, warmth.listed if needed else None))
        options = _meeting_options(session, host, node)
        meeting = open_meeting(options, loop, ports)
        if session.notices is not None:  # until machines have met
            session.notices.at_end(settings.rank == 0 if settings.rank >= 0 else meeting.hosted)
        _tell_meeting(session, host, meeting)
        node = replace(node, has_store=meeting.hosted or meeting.member)
        membership = Membership(meeting.store, loop, node, _policy(settings, host, meeting), agent)
        looks = [others.look, requests.look]
        others.membership = requests.membership = membership
        membership.when_looked, membership.lingers = partial(_look, looks), requests.lingers
        session.set_store(_address(options, meeting), f"{meeting.endpoint}/{settings.job_id}")
        if needed:
            warmth.membership, events.spared = membership, warmth.wait
            warmth.trusted = only_nodes_write(meeting.endpoint, token)
            looks.append(warmth.look)
        outcome = agent.run(membership, start_checks=meeting.start_checks, serves=meeting.hosted)
        runner.over()
        _report_end(outcome, events.nodes, session, pods.last or imagined)
        if session.notices is not None:
            _place_of_end(session.notices, outcome, served="://" not in meeting.endpoint)
        session.over(_end(outcome))
    finally:
        requests.close()
        if meeting is not None:
            meeting.close()
        session.close()
    return outcome.code


def tells_for_job(
    rank: int, cause: Cause | None, error: LaunchError | None = None, *, served: bool = False
) -> bool:
    """Whether the machine of this rank tells people of it: the first one, or the second where it is the first
    one that was lost; with that goes the store, if a launcher has `served` it.
    """
    lost = cause is not None and cause.why is CauseKind.LOST and cause.rank == 0
    return rank == (1 if lost or (served and isinstance(error, StoreLostError)) else 0)


def _place_of_end(notices: Notices, outcome: Outcome, *, served: bool) -> None:
    cause = outcome.cause
    where = {} if cause is None else {"node": cause.rank, "host": cause.node}
    if outcome.rank >= 0:
        notices.at_end(tells_for_job(outcome.rank, cause, outcome.error, served=served), **where)
    elif outcome.code == 0:  # a spare; else machines have never met
        notices.at_end(False)


def _address(options: MeetingOptions, meeting: Meeting) -> dict[str, str]:
    """Of the store, for commands of this user on this machine."""
    password = os.environ.get(_ETCD_PASSWORD, "")
    master = options.master or meeting.endpoint
    return {"master": master, "job": options.job_id, "token": options.token, "password": password}


_ETCD_PASSWORD = "FLEETRUN_ETCD_PASSWORD"


def _stop_for(interrupts: Interrupts, command: str, now: bool) -> None:
    """A command on another host asks."""
    interrupts.end(signal.SIGTERM, command)
    if now:
        interrupts.end(signal.SIGQUIT, command)


def _look(looks: Sequence[Callable[[Mapping[str, Entry]], None]], found: Mapping[str, Entry]) -> None:
    for look in looks:
        look(found)


def _end(outcome: Outcome) -> End:
    cause, result, error = outcome.cause, outcome.result, outcome.error
    reason = cause.headline if cause is not None else result.reason if result is not None else ""
    reports = cause is not None and bool(cause.lines)
    return End(
        code=outcome.code,
        reason=error.message if error is not None else reason,
        restarts=result.restarts if result is not None else 0,
        report=(*cause.lines, last_line(cause)) if cause is not None and reports else (),
        first=first_failure(result) if cause is not None and reports and cause.rank == outcome.rank else None,
        requested=outcome.requested or (cause is not None and cause.requested),
    )


def _read_faults(session: LaunchSession) -> MachineFaults:
    """What earlier launches have left."""
    try:
        return read_kept(faults_path(session.log_dir)).faults
    except (OSError, ValueError) as error:
        session.warn(f"nothing is known of earlier faults of machines: {error}")
        return ()


_MACHINE_NAMES = ("FLEETRUN_NODE_NAME", "SLURMD_NODENAME")
"""By which an engine knows this machine; the first is set by our own manifests for Kubernetes."""


def _software(settings: LaunchSettings) -> str:
    """What this Python has installed; empty where no process of the job is one of Python."""
    if not runs_python(settings):
        return ""
    return packed(installed(search_path(dict(settings.environment), os.environ)))


def _node(session: LaunchSession, host: Host, offer: Offer) -> Node:
    return Node(
        id=os.urandom(8).hex(),
        host=host.address,
        name=socket.gethostname(),
        rank=host.rank,
        offer=offer,
        version=__version__,
        machine=next(filter(None, map(os.environ.get, _MACHINE_NAMES)), "") or "",
        options=agreed(session.resolved),
        faults=_read_faults(session),
        software=_software(session.settings),
    )


def _meeting_options(session: LaunchSession, host: Host, node: Node) -> MeetingOptions:
    settings = session.settings
    return MeetingOptions(
        master=host.master,
        address=host.address,
        job_id=settings.job_id,
        node_id=node.id,
        lease=settings.heartbeat_timeout,
        token=os.environ.get(TOKEN, ""),
        first=is_first(host),
        patience=patience(settings, os.environ),
        urgent=session.interrupts.urgent,
        companions=session.companions,
        tell=session.console.warning,
    )


def _policy(settings: LaunchSettings, host: Host, meeting: Meeting) -> Policy:
    fewest, most = host.nnodes
    return Policy(
        fewest=fewest,
        most=most,
        spares=settings.spares,
        on_loss=settings.on_node_loss,
        elastic_timeout=settings.elastic_timeout,
        rdzv_timeout=settings.rdzv_timeout,
        lease=settings.heartbeat_timeout,
        sort_ip=settings.sort_ip,
        budget=Budget(settings.max_restart, settings.restart_window),
        exclude_after=settings.exclude_after,
        check=settings.check,
        fixed_ranks=host.machines,
        endpoint=meeting.endpoint,
    )


def _imagined_rank(host: Host) -> int:
    """A spare, whose rank is beyond those of the job, could get any."""
    return host.rank if 0 <= host.rank < max(host.nnodes[1], len(host.machines)) else 0


def _imagined(host: Host, offer: Offer) -> list[Offer]:
    """For --dry_run: as if every machine made the same offer, under its own address or, if that is not known,
    as node0, node1 and so on.
    """
    rank = _imagined_rank(host)
    machines = host.machines or tuple(f"node{number}" for number in range(host.nnodes[1]))

    def moved(endpoints: Strings, to: str) -> Strings:
        return tuple(f"{to}:{split_endpoint(each)[1]}" for each in endpoints)

    return [
        offer
        if number == rank
        else Offer(
            servers=moved(offer.servers, machine),
            trainers=moved(offer.trainers, machine),
            heter=tuple(moved(runner, machine) for runner in offer.heter),
            coordinators=moved(offer.coordinators, machine),
            service=moved((offer.service,), machine)[0],
            gloo=moved((offer.gloo,), machine)[0] if offer.gloo else "",
        )
        for number, machine in enumerate(machines)
    ]


def _tell_meeting(session: LaunchSession, host: Host, meeting: Meeting) -> None:
    console = session.console
    if meeting.hosted and host.master is None:
        console.info(f"Machines meet at {meeting.endpoint}. Run on the others:")
        line = words(session.resolved, but={"rank", "host", "nic", "master", "master_addr", "master_port"})
        console.block([f"  fleetrun --master={meeting.endpoint} {_typed(line)}"])
    if _is_loopback(meeting.endpoint.partition(",")[0]) and (meeting.hosted or meeting.member):
        console.info(f"Only nodes on this machine can come to {meeting.endpoint}")
    elif meeting.open_to_all:
        console.warning(
            f"no secret is set (--token_file or {TOKEN}): anyone who can reach {meeting.endpoint} can join "
            "or end this job"
        )


def _is_loopback(endpoint: str) -> bool:
    return "://" not in endpoint and split_endpoint(endpoint)[0] in (LOOPBACK, "::1", "localhost")


def only_nodes_write(endpoint: str, token: str) -> bool:
    """Whether a stranger cannot write into the store at `endpoint`. Who can write into an etcd of the user's
    own is not known here.
    """
    if "://" in endpoint:
        return False
    return bool(token) or all(map(_is_loopback, endpoint.split(",")))


def _typed(line: Strings) -> str:
    import shlex

    return shlex.join(line)


class PodFactory:
    """Pods of this machine, one for each generation, all with the same name and log files."""

    def __init__(self, session: LaunchSession, host: Host, runner: PodRunner) -> None:
        self.last: PodSpec | None = None
        """Of the present generation, or the last one."""
        self._session = session
        self._host = host
        self._runner = runner

    def check(
        self, round: Round, members: Sequence[Node], rank: int, then: Callable[[Measured], None]
    ) -> Callback:
        return NodeCheck(self._session, self._host, round, members, rank, then).cancel

    def supervisor(self, place: Assignment, peers: Peers) -> Supervisor:
        offers = [each.offer for each in place.members]
        settings, pod = self._session.settings, self._session.spec.name
        check_complete(settings, offers)
        spec = pod_spec(settings, self._host, offers, place.rank, pod=pod, environ=os.environ)
        self.last = spec
        if place.first:
            announce(spec, self._session.console)
        return self._runner.supervisor(
            spec, peers=peers, restarts=place.restarts, spent=place.spent, attempt=place.attempts
        )

    def describe(self, ended: Ended, verdict: Verdict | None, why: str) -> tuple[str, Strings, str]:
        alone = JobResult(code=code_of(ended), cause=ended, verdict=verdict, reason=why)
        _, *lines, log, summary = failure_report(alone, self._session.log_dir, WIDE)
        log = f"{log.partition(':')[0]}: {ended.spec.log}"  # the others' logs are on other machines
        headline = failure_headline(ended) if verdict is None else verdict.sentence
        return headline, (*lines, log), summary


class OtherRanks:
    """Where the ranks of the other nodes are."""

    def __init__(self, inquiry: Inquiry, agent: Agent) -> None:
        self._inquiry = inquiry
        self._agent = agent

    def ask(self, detail: Detail, then: Callable[[list[State], str], None]) -> None:
        """`AskOthers` of `stacks.helper`. The ranks of a node that does not answer are told as that."""
        place = self._agent.place
        if place is None:
            then([], "")
            return
        here = _place(place.members[place.rank].name, place.rank)
        self._inquiry.ask_ranks(detail, lambda found: then(_states(found, place), here))


class SpareWarmth:
    """What standbys of spares import, from the node that runs to those that wait, through the store."""

    def __init__(self, agent: Agent, session: LaunchSession, spec: PodSpec) -> None:
        """`spec`: a place like that of this spare."""
        self._agent = agent
        self._session = session
        self._spec = spec
        self.trusted = False
        """Only nodes of this job write into the store."""
        self._waits = False
        self.membership: Membership | None = None
        """Of this node; None: no spare needs anything."""

    def listed(self, imports: bytes) -> None:
        """By the last node: what its last trainer has imported. The first one often imports more."""
        place, membership = self._agent.place, self.membership
        if place is None or membership is None or membership.closed or not imports:
            return
        if place.rank == len(place.members) - 1:
            membership.store.put(IMPORTS_KEY, imports, leased=True)

    def wait(self) -> None:
        """This node is a spare from now on."""
        if self.membership is not None and not self._waits:
            self._waits = True
            self.membership.store.watch(IMPORTS_KEY)

    def look(self, others: Mapping[str, Entry]) -> None:
        assert self.membership is not None
        if self._waits and (IMPORTS_KEY in others or self.membership.members):
            self._waits = False
            self.membership.store.unwatch(IMPORTS_KEY)
            if not self.membership.members and self._session.warm is not None:
                self._session.warm.prepare(self._spec, others[IMPORTS_KEY].value, self.trusted)


def _states(found: Answers, place: Assignment) -> list[State]:
    from fleetrun.stacks.helper import unpack_states  # late: few jobs need it

    states: list[State] = []
    first = 0
    for number, member in enumerate(place.members):
        ranks = range(first, first + len(member.offer.trainers))
        first = ranks.stop
        if number not in found:
            continue
        node, answer = _place(member.name, number), found[number]
        if answer is not None:
            states += unpack_states(*answer, node)
        else:
            silent = {"alive": True, "node": node, "note": "on a node that does not answer"}
            states += [{**silent, "rank": rank, "title": f"trainer {rank}"} for rank in ranks]
    return states


class NodeReporter:
    """What the console shows about the nodes of a job, one line per event. `width` is that of reports,
    `facts` tell what runs on this one.
    """

    def __init__(self, console: Console, width: int, facts: str = "") -> None:
        self._console = console
        self._width = width
        self._facts = facts
        self._store_down = False
        self._reached = False

    def waiting(self, note: Waiting) -> None:
        self._reached = True
        self._console.info(self.missed(note))

    def missed(self, note: Waiting) -> str:
        """How many nodes there are, and which are missing."""
        nodes = "1 node" if note.present == 1 else f"{note.present} nodes"
        if note.spare:
            return f"the job runs on {nodes}; this node is a spare, and waits"
        missing = f"; missing: {_listed(note.missing)}" if note.missing else ""
        if note.fewest <= note.present < note.most:
            joined = f"{nodes} {'has' if note.present == 1 else 'have'} joined"
            text = f"{joined}; waiting {note.left:.0f} s for more, up to {note.most}"
        elif note.present >= note.most:
            text = f"all {note.present} nodes have joined"
        else:
            wanted = str(note.most) if note.fewest == note.most else f"{note.fewest} to {note.most}"
            text = f"{note.present} of {wanted} nodes have joined; waiting up to {note.left:.0f} s more"
        return f"{text}{missing}"

    def met(self, generation: int, size: int, rank: int, hosts: Sequence[str]) -> None:
        self._reached = True
        again = "" if generation == 1 else f" (generation {generation})"
        here, self._facts = f"; here {self._facts}" if self._facts else "", ""
        self._console.info(f"Node {rank} of {size}{again}: {_listed(hosts)}{here}")

    def differ(self, serious: Sequence[str], other: Sequence[str]) -> None:
        """In what the machines have installed."""
        if serious:
            what = printable("; ".join(serious))
            self._console.error(f"the machines differ: {what}. The job may hang or fail")
        if other:
            self._console.warning(f"the machines differ: {printable('; '.join(other))}")

    def stopping(self, node: str, rank: int, headline: str, answer: str, requested: bool = False) -> None:
        tell = self._console.info if requested else self._console.warning
        tell(f"{headline_on_node(node, rank, headline)}; {answer}")

    def store_down(self, why: str) -> None:
        self._store_down = True
        self._console.warning(f"the rendezvous store cannot be reached: {why}; still trying")

    def store_up(self) -> None:
        if self._store_down:
            self._console.info(f"{'reconnected to' if self._reached else 'reached'} the rendezvous store")
        self._store_down = False

    def ending(self, why: str, requested: bool = False) -> None:
        tell = self._console.info if requested else self._console.warning
        tell(printable(why))

    def final(self, cause: Cause) -> None:
        """The report of the node that failed, or of a failure of no node; every node shows the same."""
        node, rank, lines = cause.node, cause.rank, cause.lines
        known = bool(node) and " ".join(cause.headline.split()) in " ".join(" ".join(lines).split())
        head = f"On {_place(node, rank)}:" if known else headline_on_node(node, rank, cause.headline)
        rows = [row for line in (head, *lines) for row in wrapped(printable(line), self._width)]
        if not lines:
            rows = []
        self._console.report(["=" * min(self._width, _FRAME), *rows, last_line(cause)])


def _place(node: str, rank: int) -> str:
    node = printable(node)  # the name comes from another machine
    return f"node {rank}, {node}" if rank >= 0 else f"node {node}"


def headline_on_node(node: str, rank: int, headline: str) -> str:
    """`node 1, h2: trainer 3 exited with code 1`; a node that the headline begins with is not repeated."""
    headline = printable(headline)
    if not node:
        return headline
    if headline.startswith(f"{node} "):
        return f"{_place(node, rank)}{headline.removeprefix(node)}"
    return f"{_place(node, rank)}: {headline}"


def last_line(cause: Cause) -> str:
    """The cause in one line, and where it was."""
    return headline_on_node(cause.node, cause.rank, cause.summary or cause.headline)


def _listed(names: Sequence[str]) -> str:
    names = [printable(name) for name in names]
    if len(names) <= 8:
        return ", ".join(names)
    return f"{', '.join(names[:7])} and {len(names) - 7} more"


class _NodeEvents:
    """What happens to the nodes, for the console, the job's status and the record."""

    def __init__(self, session: LaunchSession, nodes: NodeReporter, victims: Victims) -> None:
        self.nodes = nodes
        self.victims = victims
        self._session = session
        self._note = partial(session.journal.write, "node")
        self._settings = session.settings
        self._job_status = session.status
        self._known: MachineFaults = ()
        self._differences: tuple[list[str], list[str]] = [], []
        self._has_met = False
        self._rank, self._restarts = -1, 0
        self.spared: Callback = lambda: None
        """Called when this node begins to wait as a spare."""

    def noted(self, faults: MachineFaults) -> None:
        """Written for the next launch; a machine that is left out from now on is told."""
        before, self._known = self._known, faults
        after = self._settings.exclude_after
        for node, own in excluded(faults, after).items():
            if node not in excluded(before, after):
                text = f"{node} has {said_faults(own)}: it is left out where there are enough others"
                self.nodes.ending(text)
                self._note(text=text, faults=[fault.what for fault in own])
        try:
            keep(faults_path(self._session.log_dir), faults, after)
        except (OSError, ValueError) as error:
            self.nodes.ending(f"the faults of machines cannot be kept for the next launch: {error}")

    def waiting(self, note: Waiting) -> None:
        self._job_status.waiting(note.present, note.fewest, note.missing, left=note.left, spare=note.spare)
        if note.spare:
            self.spared()
        self.nodes.waiting(note)
        if self._has_met and (note.spare or note.present < note.most):
            self._has_met = False  # a record begins with the wait for the first meeting: that is not noted
            self._note(text=self.nodes.missed(note), present=note.present)

    def met(self, place: Assignment) -> None:
        self._has_met, self._rank, self._restarts = True, place.rank, place.restarts
        hosts = [each.title for each in place.members]
        if self._session.notices is not None:
            self._session.notices.node = place.rank
        self._job_status.met(hosts, place.rank)
        self.nodes.met(place.generation, len(hosts), place.rank, hosts)
        self._compare(place)
        text = f"node {place.rank} of {len(hosts)}: {', '.join(hosts)}"
        there = placed(self._settings, [each.offer for each in place.members[:_MOST_NOTED]])
        self._note(text=text, generation=place.generation, rank=place.rank, nodes=hosts, processes=there)

    def _compare(self, place: Assignment) -> None:
        """What the machines have installed: node 0 says in what they differ, once."""
        if place.rank != 0:
            return
        titled = [(_place(each.name, rank), each.software) for rank, each in enumerate(place.members)]
        same = len({text for _, text in titled}) == 1
        serious, other = ([], []) if same else differences(kinds(titled))
        if (serious, other) != self._differences:
            self._differences = serious, other
            self.nodes.differ(serious, other)
            for text in (*serious, *other):
                self._note(text=f"the machines differ: {text}")

    def stopping(self, cause: Cause, restart: bool) -> None:
        self.victims.elsewhere = cause.rank not in (self._rank, -1)
        answer = self._answer(cause.why, restart)
        self._job_status.stopping(cause.headline, restart)
        self.nodes.stopping(cause.node, cause.rank, cause.headline, answer, cause.requested)
        self._note(text=f"{headline_on_node(cause.node, cause.rank, cause.headline)}; {answer}")
        tells = restart and cause.why is not CauseKind.JOINED and tells_for_job(self._rank, cause)
        if self._session.notices is not None and tells:
            self._session.notices.restarting(
                last_line(cause),
                hang=HUNG in cause.headline,
                node=cause.rank,
                host=cause.node,
                code=cause.code,
                restarts=self._restarts + cause.counts,
            )

    def _answer(self, why: CauseKind, restart: bool) -> str:
        if not restart:
            return "stopping the job"
        if why in (CauseKind.LEFT, CauseKind.LOST):
            return "the other nodes start again"
        if why is CauseKind.FAILED and self._settings.on_node_loss is NodeLoss.WAIT:
            return "that node leaves, and the others wait for another in its place"
        return "all nodes start again"

    def store_down(self, why: str) -> None:
        self.nodes.store_down(why)
        self._job_status.store_down(_store_name(self._settings), self._settings.rdzv_timeout)
        self._note(text=f"the rendezvous store cannot be reached: {why}")

    def store_up(self) -> None:
        self.nodes.store_up()
        self._job_status.store_up()
        self._note(text="reconnected to the rendezvous store")

    def ending(self, why: str, requested: bool = False) -> None:
        self.nodes.ending(why, requested)
        self._note(text=why)


def _store_name(settings: LaunchSettings) -> str:
    master = settings.master or ""
    return "etcd" if master.startswith("etcd://") or "," in master else f"the rendezvous store at {master}"


def _report_end(outcome: Outcome, nodes: NodeReporter, session: LaunchSession, last: PodSpec) -> None:
    console, pod = session.console, last.name
    if outcome.result is not None:
        tell_strays(outcome.result, console)
    cause = outcome.cause
    asked = cause is not None and cause.why in (CauseKind.LEFT, CauseKind.TIMEOUT) and not cause.lines
    if outcome.code == 0 and outcome.rank < 0:
        console.info("the job has completed, and this spare was not needed")
    elif outcome.code == 0:
        console.info(f"Pod completed: {pod}, {session.summary(last)}")
    elif cause is not None and asked:
        why = headline_on_node(cause.node, cause.rank, cause.headline)
        tell = console.info if outcome.requested or cause.requested else console.error
        tell(f"Pod stopped: {pod}, {why}, exit code {outcome.code}, {session.summary(last)}")
    else:
        console.error(f"Pod failed: {pod}, exit code {outcome.code}")
    if cause is not None and outcome.code and not asked:
        nodes.final(cause)
    if outcome.error is not None:
        hint = f" ({outcome.error.hint})" if outcome.error.hint else ""
        console.error(printable(outcome.error.message + hint))
