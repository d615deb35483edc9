"""Judge several nodes together, from their reports and measurements. All functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from fleetrun.doctor.facts import Finding, Link, Verdict, failed, figure, passed, warned
from fleetrun.doctor.node_records import NodeRecord
from fleetrun.envs.settings.parsing import plural, some
from fleetrun.host.software import differing_packages, kinds

SLOW_TRIP = 0.005
SLOW_LINK = 12.5e6  # 100 Mbit/s
UNEVEN = 4.0
"""Values that are this many times slower than the median get a warning."""

CLOCKS_APART = 1.0


def versions(cards: Sequence[NodeRecord]) -> Iterator[Finding]:
    """Check that software, devices and the script are the same on all nodes."""
    yield _same(cards, "fleetrun", lambda card: card.fleetrun, failed, "Install the same version everywhere.")
    if any(card.torch for card in cards):
        yield _same(
            cards,
            "torch",
            lambda card: card.torch.partition("+")[0],
            failed,
            "Install the same version everywhere.",
        )
    if any(card.nccl for card in cards):
        yield _same(
            cards, "NCCL", lambda card: card.nccl, failed, "Install the same build of torch everywhere."
        )
    yield _same(
        cards, "python", lambda card: ".".join(card.python.split(".")[:2]), warned,
        "One node may not be able to read the pickles of another.",
    )  # fmt: skip
    known = kinds([(card.title, card.software) for card in cards])
    if known:
        different = differing_packages(known)
        yield (
            warned("packages", different, "Install the same versions everywhere.")
            if different
            else passed("packages", "the same everywhere")
        )
    if any(card.kinds for card in cards):
        yield _same(
            cards, "devices", lambda card: _counted(card.kinds), warned, "The slowest node sets the pace."
        )
        yield _same(cards, "driver", lambda card: card.driver, warned, "Install the same driver everywhere.")
    if any(card.script for card in cards):
        yield _same(
            cards, "script", lambda card: card.script or "none", warned, "Copy the script to all nodes."
        )


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"


def _same(
    cards: Sequence[NodeRecord],
    check: str,
    of: Callable[[NodeRecord], str],
    otherwise: Callable[[str, str, str], Finding],
    mend: str,
) -> Finding:
    found: dict[str, list[str]] = {}
    for card in cards:
        found.setdefault(of(card) or "unknown", []).append(card.title)
    if len(found) == 1:
        return passed(check, f"{next(iter(found))} everywhere")
    parts = [f"{text} on {some(titles, 3)}" for text, titles in found.items()]
    return otherwise(check, "; ".join(parts), mend)


def options(cards: Sequence[NodeRecord]) -> Iterator[Finding]:
    """Check the options.

    Some must be the same everywhere, because otherwise a launch is refused. Ranks must differ.
    """
    wrong = 0
    for flag in sorted({flag for card in cards for flag in card.options}):
        texts = {card.options.get(flag, "") for card in cards}
        if len(texts) > 1:
            wrong += 1
            yield _same(cards, "options", lambda card, flag=flag: f"{flag} {card.options.get(flag, '')}",  # type: ignore[misc]
                        failed, "Start the job with the same options everywhere.")  # fmt: skip
    ranks: dict[int, list[NodeRecord]] = {}
    for card in cards:
        ranks.setdefault(card.rank, []).append(card)
    for rank, claimed in sorted(ranks.items()):
        if rank >= 0 and len(claimed) > 1:
            wrong += 1
            who = " and ".join(card.title for card in claimed)
            yield failed("options", f"{who} both use --rank {rank}", "Use a different rank for each node.")
    if not wrong:
        yield passed("options", "fit together")


def links(
    cards: Sequence[NodeRecord], found: Mapping[tuple[str, str], Link], departed: set[str]
) -> Iterator[Finding]:
    """Check reachability, round trips, speeds and clocks of all links."""
    titles = {card.id: card.title for card in cards}
    for card in cards:
        if card.id in departed:
            yield failed(
                "machines", f"{card.title} left before the end of the checks", "See the output of that node."
            )
    good: list[tuple[str, Link]] = []
    for (one, other), link in found.items():
        if one not in titles or other not in titles or {one, other} & departed:
            continue
        way = f"{titles[one]} to {titles[other]}"
        if link.error:
            yield failed("connections", f"{way}: {link.error}", _OPEN)
        else:
            good.append((way, link))
    if good:
        yield _trips(good)
        yield _speeds(good)
        yield _clocks(good)


_OPEN = "Open the ports between the nodes, or limit the job to open ports: --port_range."


def _trips(good: Sequence[tuple[str, Link]]) -> Finding:
    middle = statistics.median(link.round_trip for _, link in good)
    way, worst = max(good, key=lambda pair: pair[1].round_trip)
    found = f"{_ms(middle)}, at most {_ms(worst.round_trip)} ({way})" if len(good) > 1 else _ms(middle)
    if worst.round_trip > SLOW_TRIP:
        return warned("round trips", found, "Nodes of one network answer in less than a millisecond.")
    return passed("round trips", found)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"


def _speeds(good: Sequence[tuple[str, Link]]) -> Finding:
    speeds = [(way, speed) for way, link in good for speed in (link.there, link.back)]
    middle = statistics.median(speed for _, speed in speeds)
    way, least = min(speeds, key=lambda pair: pair[1])
    found = f"{_bits(middle)}, at least {_bits(least)} ({way})"
    if least < SLOW_LINK:
        return warned("bandwidth", found, "Check the network interface. --nic chooses another.")
    if least * UNEVEN < middle:
        return warned(
            "bandwidth", found, "One link is much slower than the others: check its cables and load."
        )
    return passed("bandwidth", found)


def _bits(speed: float) -> str:
    return f"{figure(speed * 8e-9)} Gbit/s" if speed > 125e6 else f"{figure(speed * 8e-6)} Mbit/s"


def _clocks(good: Sequence[tuple[str, Link]]) -> Finding:
    """Check the clocks. An offset is only known up to half a round trip."""
    way, worst = max(good, key=lambda pair: abs(pair[1].ahead) - pair[1].round_trip / 2)
    found = f"{_apart(worst)} apart at most" if len(good) > 1 else f"{_apart(worst)} apart"
    if abs(worst.ahead) - worst.round_trip / 2 > CLOCKS_APART:
        return warned("clocks", f"{found} ({way})", "Set the clocks by NTP, because logs are merged by time.")
    return passed("clocks", found)


def _apart(link: Link) -> str:
    amount = max(abs(link.ahead), link.round_trip / 2)
    return f"{amount:.3g} s" if amount >= 1 else _ms(amount)


_OF_THE_JOB = ("secret", "options")
"""Checks of the command line. They apply to all nodes, so the results of this node are enough."""


def others(cards: Sequence[NodeRecord], me: str) -> Iterator[Finding]:
    """Yield the findings of the other nodes. A finding that several nodes share takes one line."""
    reported: dict[Finding, list[str]] = {}
    known = {each for card in cards if card.id == me for each in card.findings if each.check in _OF_THE_JOB}
    for card in cards:
        for each in card.findings if card.id != me else ():
            if each.verdict is not Verdict.PASS and each not in known:
                reported.setdefault(each, []).append(card.title)
    for each, titles in reported.items():
        yield Finding(each.check, each.verdict, f"{some(titles, 3)}: {each.found}", each.mend)


def counted(cards: Sequence[NodeRecord], fewest: int) -> Finding:
    """Check that enough nodes have joined."""
    found = f"{plural(len(cards), 'machine')}: {some([card.title for card in cards], 3)}"
    return passed("machines", found) if len(cards) >= fewest else failed("machines", found)
