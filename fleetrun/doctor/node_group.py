"""Several nodes that check themselves together.

They join in a store, measure the links between them, and exchange their results. Imported only for several
nodes.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fleetrun.aliases import Callback, Environ, ShowText, Strings
from fleetrun.console.text import printable
from fleetrun.decoding import BadRecordError
from fleetrun.doctor import judge_group
from fleetrun.doctor import node_records as cards
from fleetrun.doctor.facts import Finding, Link, Machine, failed
from fleetrun.doctor.links import ALLOWED, Surveyor, open_door, partners
from fleetrun.doctor.node_records import NodeRecord
from fleetrun.doctor.requirements import Plan
from fleetrun.elastic.meeting import Meeting, MeetingOptions, StartCheck, check_meeting, open_meeting
from fleetrun.elastic.store import ABSENT, Entries, Store
from fleetrun.envs.contract import TOKEN, split_endpoint
from fleetrun.envs.settings.options import Resolved
from fleetrun.envs.settings.parsing import plural
from fleetrun.envs.settings.show import agreed, words
from fleetrun.errors import LaunchError
from fleetrun.host.network import Ports
from fleetrun.host.software import installed, packed
from fleetrun.launcher.prepare import is_first, patience
from fleetrun.plan.topology import Host
from fleetrun.pod.loop import Loop, Timer

# ---- Nodes that check themselves together join in a store, measure the links between them, and exchange
# their results. This part handles the keys, and `judge_group` interprets the results.
#
#     nodes/ID     a node's record            as soon as it has joined
#     set          the members                by the first node that sees enough nodes; never changes
#     tried/ID     its results so far         when it could not reach another node, which then does not wait
#     results/ID   its results                when its turns have ended
#     seen/ID      it has all results         then it may leave
# All keys are leased, so the store is empty afterwards.

NODES, SET, RESULTS, SEEN = "nodes/", "set", "results/", "seen/"
LAST_WORDS = 3.0
"""Seconds that a node with all results waits until the others have them."""

_OTHER_PORT = "If another job or check uses this port, choose another port in --master."

LATE = 10.0
"""Seconds beyond the last visit for the results of others."""


@dataclass(slots=True, kw_only=True)
class NodeGroup:
    """The result of a group check."""

    members: tuple[NodeRecord, ...] = ()
    """In the order of their ranks."""
    waiting: tuple[NodeRecord, ...] = ()
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    """By the IDs of both ends."""
    departed: set[str] = field(default_factory=set)
    """Nodes that left before they sent their results."""
    error: str = ""
    """The reason why this node could not take part until the end."""
    hint: str = ""


def chosen(
    here: Mapping[str, NodeRecord], arrival: Mapping[str, int], fewest: int, most: int, *, waited: bool
) -> Strings:
    """Return the members in order, or an empty tuple while more nodes are expected.

    The first nodes to join are taken, up to `most`, and sorted by the rank that they request. `waited`: the
    time for nodes beyond the fewest is up.
    """
    if len(here) < (fewest if waited else most):
        return ()
    first = sorted(here, key=lambda id_: arrival[id_])[:most]
    return tuple(sorted(first, key=lambda id_: (here[id_].rank < 0, here[id_].rank, arrival[id_])))


class Gathering:
    """A Listener of a store. When it calls `when_over`, its `group` is final."""

    def __init__(
        self,
        store: Store,
        loop: Loop,
        card: NodeRecord,
        surveyor: Surveyor,
        nnodes: tuple[int, int],
        *,
        show_present: Callable[[Sequence[NodeRecord]], None],
        show_outage: ShowText,
    ) -> None:
        """`show_present` is called with the present nodes whenever they change.

        `show_outage` is called with the reason if the store is down.
        """
        self._store = store
        self._loop = loop
        self._card = card
        self._surveyor = surveyor
        self._fewest, self._most = nnodes
        self._show_present = show_present
        self._show_outage = show_outage
        self._own: dict[str, bytes] = {}
        self._cards: dict[str, NodeRecord] = {}
        self._results: dict[str, dict[str, Link]] = {}
        self._seen: set[str] = set()
        self._here = 0
        self._members: Strings = ()
        self._patience: Timer | None = None
        self._waited = False
        self._proposed = False
        self._over = False
        self._between = 0.0
        self._limit = Timer()
        self.when_over: Callback = lambda: None
        self.reached = False
        self.group = NodeGroup()

    def join(
        self, patience: float, timeout: float, start_checks: Sequence[tuple[float, StartCheck]] = ()
    ) -> None:
        """Join the check.

        `patience`: seconds to wait for nodes beyond the fewest. `timeout`: seconds to wait for the fewest.
        """
        self._between = patience
        self._loop.add(self._surveyor.news, self._measured)
        self._limit = self._loop.after(timeout, partial(self._missing, timeout))
        for seconds, check in start_checks:
            self._loop.after(seconds, partial(self._check_start, check))
        for prefix in (NODES, SET, RESULTS, SEEN):
            self._store.watch(prefix)
        self._post(NODES + self._card.id, cards.pack(self._card))
        self._store.open(self)

    def _check_start(self, check: StartCheck) -> None:
        error = None if self.reached else check()
        if error is not None:
            self.lost(error)

    def _missing(self, timeout: float) -> None:
        """End the check. Some of the nodes that joined may have given up."""
        self._end(f"{len(self._cards)} of {self._fewest} nodes joined within {timeout:g} s")

    def _end(self, error: str = "", hint: str = "") -> None:
        """End the check. Only the first call counts."""
        if self._over:
            return
        self._over = True
        self.group.error, self.group.hint = error, hint
        self.group.waiting = tuple(self._cards.values())
        self._limit.cancel()
        self._loop.remove(self._surveyor.news)
        self._store.close()
        self.when_over()

    def _post(self, key: str, value: bytes) -> None:
        self._own[key] = value
        self._store.put(key, value, leased=True)

    # ---- events of the store

    def up(self, *, fresh: bool) -> None:
        if fresh and self.reached:
            for key, value in self._own.items():
                self._store.put(key, value, leased=True)
        self.reached = True

    def down(self, why: str) -> None:
        self._show_outage(why)

    def lost(self, error: LaunchError) -> None:
        self._end(error.message, error.hint or _OTHER_PORT)

    def changed(self) -> None:
        if self._over:
            return
        mirror = self._store.mirror
        try:
            self._note(mirror)
            if self._members:
                self._compare(mirror)
            else:
                self._gather(mirror)
        except BadRecordError as error:
            self._end(f"this fleetrun does not understand another node: {error}")

    def _note(self, mirror: Entries) -> None:
        """Store the results of other nodes, because a node may leave once it has sent everything.

        Raises BadRecordError.
        """
        for key, entry in mirror.items():
            id_ = key.partition("/")[2]
            if key.startswith(NODES) and id_ not in self._cards:
                self._cards[id_] = cards.unpack(entry.value)
            elif key.startswith(RESULTS):
                self._results[id_] = cards.unpack_links(entry.value)
            elif key.startswith(SEEN):
                self._seen.add(id_)

    def _gather(self, mirror: Entries) -> None:
        if SET in mirror:
            self._begin(cards.unpack_members(mirror[SET].value))
            return
        arrival = {
            key.removeprefix(NODES): entry.created for key, entry in mirror.items() if key.startswith(NODES)
        }
        here = {id_: self._cards[id_] for id_ in arrival}
        if len(here) != self._here:
            self._here = len(here)
            self._show_present(list(here.values()))
        if len(here) >= self._fewest and self._patience is None:
            self._patience = self._loop.after(self._between, self._others_had_their_time)
        members = chosen(here, arrival, self._fewest, self._most, waited=self._waited)
        if members and not self._proposed:
            self._proposed = True
            self._store.put(SET, cards.pack_members(members), expect=ABSENT, leased=True)

    def _others_had_their_time(self) -> None:
        self._waited = True
        self.changed()

    def _begin(self, members: Strings) -> None:
        if self._card.id not in members:
            self._end(
                f"{len(members)} nodes already run a check there, without this node",
                "Wait until their check has ended.",
            )
            return
        if not all(id_ in self._cards for id_ in members):
            # a node has joined and left before its record arrived, and the set will vanish with its lease
            return
        self._members = members
        self._limit.cancel()
        self.group.members = tuple(self._cards[id_] for id_ in members)
        self._surveyor.survey(self.group.members, members.index(self._card.id))
        self._loop.after(ALLOWED * len(partners(len(members), 0)) + LATE, self._end)
        self.changed()

    def _measured(self) -> None:
        os.eventfd_read(self._surveyor.news)
        self._post(RESULTS + self._card.id, cards.pack_links(self._surveyor.links))

    def _compare(self, mirror: Entries) -> None:
        """Leave once all present nodes have all results."""
        for id_, links in self._results.items():
            self.group.links |= {(id_, other): each for other, each in links.items()}
        self.group.departed = {
            id_ for id_ in self._members if id_ not in self._results and NODES + id_ not in mirror
        }
        own = SEEN + self._card.id
        if own not in self._own and self._results.keys() | self.group.departed >= set(self._members):
            self._post(own, b"")
            self._loop.after(LAST_WORDS, self._end)
        here = {id_ for id_ in self._members if NODES + id_ in mirror}
        if own in self._own and self._seen >= here:
            self._end()


# ---- The part of a visit that needs the other nodes: the store, the record of this node, and the results. It
# only builds objects, and decisions are made elsewhere.


_LARGEST_SCRIPT = 64 << 20


def compare(
    resolved: Resolved,
    plan: Plan,
    machine: Machine,
    findings: tuple[Finding, ...],
    ports: Ports,
    environ: Environ,
    show: ShowText,
) -> tuple[NodeGroup, list[Finding]]:
    """Join the other nodes, and return their group with its findings."""
    settings, site = resolved.settings, plan.site
    assert site is not None
    loop = Loop()
    try:
        # The port is one that the job would use. Anything that blocks this port would also block the job.
        port = split_endpoint(plan.offer.service)[1] if plan.offer is not None else ports.any()
        door = open_door(site.address, port)
    except (OSError, LaunchError) as error:
        return NodeGroup(), [failed("connections", f"this node cannot listen: {error}")]
    card = _card(resolved, plan, machine, findings, door.getsockname()[1])
    surveyor = Surveyor(door, card.ticket)
    try:
        check_meeting(site.master)
        options = MeetingOptions(
            master=site.master,
            address=site.address,
            job_id=f"{settings.job_id[:120]}.doctor",
            node_id=card.id,
            lease=settings.heartbeat_timeout,
            token=environ.get(TOKEN, ""),
            first=is_first(site),
            patience=patience(settings, environ),
        )
        meeting = open_meeting(options, loop, ports)
    except LaunchError as error:
        surveyor.close()
        return NodeGroup(), [failed("rendezvous", error.message, error.hint or "")]
    try:
        group = _meet(resolved, plan, card, meeting, loop, surveyor, show)
    finally:
        meeting.close()
        surveyor.close()
        loop.close()
    return group, list(_judged(group, card, site))


def _meet(
    resolved: Resolved,
    plan: Plan,
    card: NodeRecord,
    meeting: Meeting,
    loop: Loop,
    surveyor: Surveyor,
    show: ShowText,
) -> NodeGroup:
    settings, site = resolved.settings, plan.site
    assert site is not None
    fewest, most = site.nnodes
    if meeting.hosted and site.master is None:
        show(f"Nodes join at {meeting.endpoint}. Run this command on the other nodes:")
        show(f"  fleetrun doctor --master={meeting.endpoint} {shlex.join(_elsewhere(resolved, plan))}")
    wanted = str(fewest) if fewest == most else f"{fewest} to {most}"

    def here(cards: Sequence[NodeRecord]) -> None:
        if len(cards) < most:
            others = _missing(site, cards) or "others"
            show(f"{len(cards)} of {wanted} nodes have joined; waiting for {others} at {meeting.endpoint}")

    reported: set[str] = set()

    def down(why: str) -> None:
        if why not in reported:
            reported.add(why)
            show(f"waiting for the rendezvous store: {printable(why)}")

    gathering = Gathering(
        meeting.store, loop, card, surveyor, site.nnodes, show_present=here, show_outage=down
    )
    gathering.when_over = loop.stop
    gathering.join(settings.elastic_timeout, settings.rdzv_timeout, meeting.start_checks)
    loop.run()
    return gathering.group


def _elsewhere(resolved: Resolved, plan: Plan) -> Strings:
    """Return the command line for other nodes, without a script if the user has named none."""
    line = words(resolved, but={"rank", "host", "nic", "master", "master_addr", "master_port", "json"})
    return line if plan.names_script else line[:-1]


def _missing(site: Host, cards: Sequence[NodeRecord]) -> str:
    """List the missing nodes. Return "" if there is no list of nodes."""
    there = {card.rank for card in cards}
    return ", ".join(each for rank, each in enumerate(site.machines) if rank not in there)


def _card(
    resolved: Resolved, plan: Plan, machine: Machine, findings: tuple[Finding, ...], port: int
) -> NodeRecord:
    assert plan.site is not None
    driver, torch = machine.driver, machine.torch
    return NodeRecord(
        id=os.urandom(8).hex(),
        name=os.uname().nodename,
        address=plan.site.address,
        rank=plan.site.rank,
        port=port,
        ticket=secrets.token_hex(16),
        fleetrun=machine.fleetrun,
        python=machine.python,
        torch=torch.version if torch is not None else "",
        nccl=torch.nccl if torch is not None else "",
        driver=driver.version if driver is not None else "",
        kinds=tuple(gpu.name for gpu in driver.gpus) if driver is not None else (),
        trainers=plan.wanted.trainers,
        script=_digest(resolved.settings.script),
        software=packed(installed()) if torch is not None else "",
        options=agreed(resolved),
        findings=findings,
    )


def _digest(script: str) -> str:
    """Return a few characters that differ if the files differ.

    Return "" if the script is not a file, or is too large.
    """
    path = Path(script)
    try:
        if path.is_file() and path.stat().st_size <= _LARGEST_SCRIPT:
            return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
    except OSError:
        pass
    return ""


def _judged(group: NodeGroup, card: NodeRecord, site: Host) -> Iterator[Finding]:
    if group.members:
        yield judge_group.counted(group.members, site.nnodes[0])
        yield from judge_group.options(group.members)
        yield from judge_group.versions(group.members)
        yield from judge_group.links(group.members, group.links, group.departed)
        yield from judge_group.others(group.members, card.id)
    if group.error:
        found = group.error
        if not group.members:
            here, missing = ", ".join(each.title for each in group.waiting[:8]), _missing(site, group.waiting)
            found += f": {here}" if here else ""
            found += f"; {missing} did not" if missing else ""
        yield failed("rendezvous", found, group.hint or _START.format(plural(site.nnodes[0], "machine")))


_START = "Run fleetrun doctor on all {}, with the same --master."
