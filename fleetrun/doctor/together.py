"""The part of a visit that needs the other machines: where they meet, what this one says of itself, what came
of it. Makes everything and decides nothing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fleetrun.console.text import printable
from fleetrun.doctor import judge_party
from fleetrun.doctor.card import Card
from fleetrun.doctor.facts import Machine
from fleetrun.doctor.finding import Finding, failed, plural
from fleetrun.doctor.gathering import Gathering, Party
from fleetrun.doctor.plan import Plan
from fleetrun.doctor.surveyor import Surveyor, open_door
from fleetrun.elastic.meeting import Meeting, Wish, check_meeting, open_meeting
from fleetrun.envs.contract import TOKEN
from fleetrun.envs.settings.options import Resolved
from fleetrun.envs.settings.parsing import split_endpoint
from fleetrun.envs.settings.show import agreed, words
from fleetrun.errors import LaunchError
from fleetrun.host.network import Ports
from fleetrun.plan.site import Site
from fleetrun.pod.loop import Loop

Say = Callable[[str], None]

_LARGEST_SCRIPT = 64 << 20


def compare(
    resolved: Resolved, plan: Plan, machine: Machine, findings: tuple[Finding, ...], ports: Ports,
    environ: Mapping[str, str], say: Say,
) -> tuple[Party, list[Finding]]:  # fmt: skip
    """Meet the others; what all of them together come to."""
    site = plan.site
    assert site is not None
    loop = Loop()
    try:
        door = _door(plan, ports)
    except (OSError, LaunchError) as error:
        return Party(), [failed("connections", f"this machine cannot listen: {error}")]
    card = _card(resolved, plan, machine, findings, door.getsockname()[1])
    surveyor = Surveyor(door, card.ticket)
    try:
        check_meeting(site.master)
        meeting = open_meeting(_wish(resolved, site, card, environ), loop, ports)
    except LaunchError as error:
        surveyor.close()
        return Party(), [failed("meeting point", error.message, error.hint or "")]
    try:
        party = _meet(resolved, plan, card, meeting, loop, surveyor, say)
    finally:
        meeting.close()
        surveyor.close()
        loop.close()
    return party, list(_judged(party, card, site))


def _meet(
    resolved: Resolved, plan: Plan, card: Card, meeting: Meeting, loop: Loop, surveyor: Surveyor, say: Say
) -> Party:
    settings, site = resolved.settings, plan.site
    assert site is not None
    fewest, most = site.nnodes
    if meeting.hosted and site.master is None:
        say(f"Machines meet at {meeting.endpoint}. Run on the others:")
        say(f"  fleetrun doctor --master={meeting.endpoint} {shlex.join(_elsewhere(resolved, plan))}")
    wanted = str(fewest) if fewest == most else f"{fewest} to {most}"

    def here(cards: Sequence[Card]) -> None:
        if len(cards) < most:
            others = _missing(site, cards) or "others"
            say(f"{len(cards)} of {wanted} machines are here; waiting for {others} at {meeting.endpoint}")

    told: set[str] = set()

    def down(why: str) -> None:
        if why not in told:
            told.add(why)
            say(f"waiting for the meeting point: {printable(why)}")

    gathering = Gathering(meeting.store, loop, card, surveyor, site.nnodes, say=here, told=down)
    gathering.when_over = loop.stop
    gathering.join(settings.elastic_timeout, settings.rdzv_timeout, meeting.doubts)
    loop.run()
    return gathering.party


def _elsewhere(resolved: Resolved, plan: Plan) -> tuple[str, ...]:
    """What to type on other machines; no script where the person has named none."""
    line = words(resolved, but={"rank", "host", "nic", "master", "master_addr", "master_port", "json"})
    return line if plan.names_script else line[:-1]


def _missing(site: Site, cards: Sequence[Card]) -> str:
    """Which of the listed machines are not here; empty when there is no list."""
    there = {card.rank for card in cards}
    return ", ".join(each for rank, each in enumerate(site.machines) if rank not in there)


def _door(plan: Plan, ports: Ports) -> socket.socket:
    """At a port that the job would use: what keeps others from it would keep them from the job."""
    assert plan.site is not None
    port = split_endpoint(plan.offer.service)[1] if plan.offer is not None else ports.any()
    return open_door(plan.site.address, port)


def _wish(resolved: Resolved, site: Site, card: Card, environ: Mapping[str, str]) -> Wish:
    settings = resolved.settings
    return Wish(
        master=site.master,
        address=site.address,
        job_id=f"{settings.job_id[:120]}.doctor",
        node_id=card.id,
        lease=settings.heartbeat_timeout,
        token=environ.get(TOKEN, ""),
        late_names="KUBERNETES_SERVICE_HOST" in environ,
    )


def _card(resolved: Resolved, plan: Plan, machine: Machine, findings: tuple[Finding, ...], port: int) -> Card:
    assert plan.site is not None
    driver, torch = machine.driver, machine.torch
    return Card(
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
        options=agreed(resolved),
        findings=findings,
    )


def _digest(script: str) -> str:
    """A few characters that differ when the files do; empty for what is no file, or too large."""
    path = Path(script)
    try:
        if path.is_file() and path.stat().st_size <= _LARGEST_SCRIPT:
            return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
    except OSError:
        pass
    return ""


def _judged(party: Party, card: Card, site: Site) -> Iterator[Finding]:
    if party.members:
        yield judge_party.counted(party.members, site.nnodes[0])
        yield from judge_party.options(party.members)
        yield from judge_party.versions(party.members)
        yield from judge_party.links(party.members, party.links, party.gone)
        yield from judge_party.others(party.members, card.id)
    if party.error:
        found = party.error
        if not party.members:
            here, missing = ", ".join(each.title for each in party.waiting[:8]), _missing(site, party.waiting)
            found += f": {here}" if here else ""
            found += f"; {missing} did not" if missing else ""
        yield failed("meeting point", found, party.hint or _START.format(plural(site.nnodes[0], "machine")))


_START = "Run fleetrun doctor on all {}, with the same --master."
