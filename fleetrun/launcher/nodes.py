"""Show and record what happens between the nodes of a job, and notify people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetrun.aliases import Document
from fleetrun.console.console import terminal_columns
from fleetrun.console.text import printable, wrapped
from fleetrun.elastic.agent import Assignment, Departing, Outcome, Paused, Stopping
from fleetrun.elastic.membership import FaultsKnown, StoreDown, StoreUp
from fleetrun.elastic.rendezvous.actions import Waiting
from fleetrun.elastic.rendezvous.records import Cause, CauseKind
from fleetrun.envs.contract import NodeLoss
from fleetrun.errors import LaunchError, StoreLostError
from fleetrun.host.software import differences, kinds
from fleetrun.launcher.ending import WIDE, first_failure, report_strays
from fleetrun.launcher.parts import End, Event, Part
from fleetrun.launcher.runner import PodRunner
from fleetrun.launcher.session import LaunchSession
from fleetrun.plan.topology import placed
from fleetrun.pod.container import Pod
from fleetrun.pod.events import HUNG
from fleetrun.record.faults import MachineFaults, describe_faults, excluded, faults_path, keep

if TYPE_CHECKING:
    from fleetrun.launcher.notices import Notices

_FRAME = 80
_MOST_NOTED = 1000  # most nodes whose processes the event log lists


class Nodes(Part):
    """A part of every launch with several nodes. `facts` describes the processes of this node."""

    def __init__(self, session: LaunchSession, runner: PodRunner, facts: str = "") -> None:
        self._session = session
        self._runner = runner
        self._console = session.console
        self._settings = session.settings
        self._facts = facts
        self._width = terminal_columns() or WIDE
        self._known: MachineFaults = ()
        self._differences: tuple[list[str], list[str]] = [], []
        self._store_down = self._reached = self._has_met = False
        self._rank, self._restarts = -1, 0
        self._last = session.spec
        self._paused: Outcome | None = None

    def _note(self, text: str, **fields: object) -> None:
        self._session.journal.write("node", text=text, **fields)

    def set_pod(self, pod: Pod, restarts: int) -> None:
        self._last, self._paused = pod.spec, None

    def handle(self, event: Event) -> None:
        match event:
            case Waiting():
                self._waiting(event)
            case Assignment():
                self._met(event)
            case Stopping():
                self._stopping(event.cause, event.restart)
            case Departing():
                self._report(event.why, event.requested)
                self._note(event.why)
            case Paused():
                self._runner.drain()
                self._show_end(event.outcome)
                self._paused = event.outcome
                self._runner.pause()
            case FaultsKnown():
                self._keep(event.faults)
            case StoreDown():
                self._store_down = True
                master = self._settings.master or ""
                text = f"the rendezvous store cannot be reached: {event.why}"
                self._console.warning(f"{text}; still trying")
                of_etcd = master.startswith("etcd://") or "," in master
                store = "etcd" if of_etcd else f"the rendezvous store at {master}"
                self._note(text, store=store, limit=self._settings.rdzv_timeout)
            case StoreUp():
                if self._store_down:
                    self._console.info(
                        f"{'reconnected to' if self._reached else 'reached'} the rendezvous store"
                    )
                self._store_down = False
                self._note("reconnected to the rendezvous store", store=None)

    def _report(self, text: str, requested: bool = False) -> None:
        show = self._console.info if requested else self._console.warning
        show(printable(text))

    def _waiting(self, note: Waiting) -> None:
        self._reached = True
        text, now = missed(note), self._session.wall()
        self._console.info(text)
        line: Document = {
            "text": text,
            "present": note.present,
            "wanted": note.fewest,
            "missing": list(note.missing),
            "until": None if note.spare else now + note.left,
            "spare": note.spare,
        }
        if self._has_met and (note.spare or note.present < note.most):
            self._has_met = False  # the first wait, at the start of an event log, is not recorded
            self._note(**line)
        else:
            self._session.status.handle({"time": now, "event": "waiting", **line})

    def _met(self, place: Assignment) -> None:
        self._has_met = self._reached = True
        self._rank, self._restarts = place.rank, place.restarts
        hosts = [each.title for each in place.members]
        if self._session.notices is not None:
            self._session.notices.node = place.rank
        again = "" if place.generation == 1 else f" (generation {place.generation})"
        here, self._facts = f"; here {self._facts}" if self._facts else "", ""
        self._console.info(f"Node {place.rank} of {len(hosts)}{again}: {_listed(hosts)}{here}")
        if place.rank == 0:
            self._compare(place)
        text = f"node {place.rank} of {len(hosts)}: {', '.join(hosts)}"
        there = placed(self._settings, [each.offer for each in place.members[:_MOST_NOTED]])
        self._note(text, generation=place.generation, rank=place.rank, nodes=hosts, processes=there)

    def _compare(self, place: Assignment) -> None:
        """Show once how the installed packages of the nodes differ."""
        titled = [(place_name(each.name, rank), each.software) for rank, each in enumerate(place.members)]
        same = len({text for _, text in titled}) == 1
        serious, other = found = ([], []) if same else differences(kinds(titled))
        if found == self._differences:
            return
        self._differences = found
        if serious:
            what = printable("; ".join(serious))
            self._console.error(f"the nodes differ: {what}. The job may hang or fail")
        if other:
            self._report(f"the nodes differ: {'; '.join(other)}")
        for text in (*serious, *other):
            self._note(f"the nodes differ: {text}")

    def _stopping(self, cause: Cause, restart: bool) -> None:
        if cause.rank not in (self._rank, -1):
            self._runner.victims.blame_another_node()
        answer = self._answer(cause.why, restart)
        text = f"{headline_on_node(cause.node, cause.rank, cause.headline)}; {answer}"
        self._report(text, cause.requested)
        self._note(text, why=cause.headline, restart=restart)
        notifies = restart and cause.why is not CauseKind.JOINED and notifies_for_job(self._rank, cause)
        if self._session.notices is not None and notifies:
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
            return "the other nodes restart"
        if why is CauseKind.FAILED and self._settings.on_node_loss is NodeLoss.WAIT:
            return "this node leaves, and the other nodes wait for a replacement"
        return "all nodes restart"

    def _keep(self, faults: MachineFaults) -> None:
        """Save the faults for the next launch, and report newly excluded nodes."""
        before, self._known = self._known, faults
        after = self._settings.exclude_after
        for node, own in excluded(faults, after).items():
            if node not in excluded(before, after):
                text = (
                    f"{node} has {describe_faults(own)}: jobs exclude this node if enough other nodes remain"
                )
                self._report(text)
                self._note(text, faults=[fault.what for fault in own])
        try:
            keep(faults_path(self._session.log_dir), faults, after)
        except (OSError, ValueError) as error:
            self._report(f"cannot save the faults of nodes for the next run: {error}")

    # ---- the end

    def report_end(self, outcome: Outcome, *, served: bool) -> End:
        """Show how the job ended for this node. `served`: a launcher served the store."""
        if self._paused is None or outcome.error or outcome.cause != self._paused.cause:
            self._show_end(outcome)
        else:
            self._console.info("the job was ended while it waited")
        if self._session.notices is not None:
            _place_of_end(self._session.notices, outcome, served=served)
        return _end(outcome)

    def _show_end(self, outcome: Outcome) -> None:
        console, last = self._console, self._last
        pod = last.name
        if outcome.result is not None:
            report_strays(outcome.result, console)
        cause = outcome.cause
        asked = cause is not None and cause.why in (CauseKind.LEFT, CauseKind.TIMEOUT) and not cause.lines
        if outcome.code == 0 and outcome.rank < 0:
            console.info("the job completed without this spare")
        elif outcome.code == 0:
            console.info(f"Pod completed: {pod}, {self._session.summary(last)}")
        elif cause is not None and asked:
            why = headline_on_node(cause.node, cause.rank, cause.headline)
            show = console.info if outcome.requested or cause.requested else console.error
            show(f"Pod stopped: {pod}, {why}, exit code {outcome.code}, {self._session.summary(last)}")
        else:
            console.error(f"Pod failed: {pod}, exit code {outcome.code}")
        if cause is not None and outcome.code and not asked:
            self._final(cause)
        if outcome.error is not None:
            hint = f" ({outcome.error.hint})" if outcome.error.hint else ""
            console.error(printable(outcome.error.message + hint))

    def _final(self, cause: Cause) -> None:
        """Show the report of the node that failed, or of a failure without a node. All nodes show
        the same.
        """
        node, rank, lines = cause.node, cause.rank, cause.lines
        known = bool(node) and " ".join(cause.headline.split()) in " ".join(" ".join(lines).split())
        head = f"On {place_name(node, rank)}:" if known else headline_on_node(node, rank, cause.headline)
        rows = [row for line in (head, *lines) for row in wrapped(printable(line), self._width)]
        if not lines:
            rows = []
        self._console.report(["=" * min(self._width, _FRAME), *rows, last_line(cause)])


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


def notifies_for_job(
    rank: int, cause: Cause | None, error: LaunchError | None = None, *, served: bool = False
) -> bool:
    """Return True if the node of this rank sends the notifications of the job.

    Usually the first node sends them. The second node does if the first node is lost. It also does if the
    store is lost and a launcher has `served` the store, because the store is lost with the first node.
    """
    lost = cause is not None and cause.why is CauseKind.LOST and cause.rank == 0
    return rank == (1 if lost or (served and isinstance(error, StoreLostError)) else 0)


def _place_of_end(notices: Notices, outcome: Outcome, *, served: bool) -> None:
    cause = outcome.cause
    where = {} if cause is None else {"node": cause.rank, "host": cause.node}
    if outcome.rank >= 0:
        notices.at_end(notifies_for_job(outcome.rank, cause, outcome.error, served=served), **where)
    elif outcome.code == 0:  # a spare; with another code, the nodes never joined
        notices.at_end(False)


def missed(note: Waiting) -> str:
    """Describe how many nodes have joined, and which nodes are missing."""
    nodes = "1 node" if note.present == 1 else f"{note.present} nodes"
    if note.spare:
        return f"the job runs on {nodes}; this node waits as a spare"
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


def place_name(node: str, rank: int) -> str:
    node = printable(node)  # the name comes from another node
    return f"node {rank}, {node}" if rank >= 0 else f"node {node}"


def headline_on_node(node: str, rank: int, headline: str) -> str:
    """Return `node 1, h2: trainer 3 exited with code 1`. A headline that starts with the node does not repeat
    the node.
    """
    headline = printable(headline)
    if not node:
        return headline
    if headline.startswith(f"{node} "):
        return f"{place_name(node, rank)}{headline.removeprefix(node)}"
    return f"{place_name(node, rank)}: {headline}"


def last_line(cause: Cause) -> str:
    """Return the cause in one line, with its node."""
    return headline_on_node(cause.node, cause.rank, cause.summary or cause.headline)


def _listed(names: Sequence[str]) -> str:
    names = [printable(name) for name in names]
    if len(names) <= 8:
        return ", ".join(names)
    return f"{', '.join(names[:7])} and {len(names) - 7} more"
