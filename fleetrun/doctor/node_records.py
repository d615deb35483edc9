"""The records that nodes exchange through the store, converted to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field

from fleetrun.aliases import Strings, Texts
from fleetrun.decoding import finite, of_bytes, of_fields, texts
from fleetrun.doctor.facts import Finding, Link, Verdict
from fleetrun.envs.settings import parsing
from fleetrun.frozen import frozen_by_name

_MOST_FINDINGS = 40
_LONGEST_TEXT = 600


@frozen_by_name
class NodeRecord:
    """One node."""

    id: str
    name: str
    address: str
    rank: int = -1
    port: int = 0
    """Port and ticket let another node measure the link to this node."""
    ticket: str = ""
    fleetrun: str = ""
    python: str = ""
    torch: str = ""
    nccl: str = ""
    driver: str = ""
    kinds: Strings = ()
    """Names of its devices."""
    trainers: int = 0
    script: str = ""
    """Digest of the script's file."""
    software: str = ""
    """Installed packages (`host.software`)."""
    options: Texts = field(default_factory=dict)
    """As on the command line."""
    findings: tuple[Finding, ...] = ()

    @property
    def title(self) -> str:
        """Its name in findings, such as `h1 (10.0.0.1)`."""
        return self.address if self.name in ("", self.address) else f"{self.name} ({self.address})"


def pack(card: NodeRecord) -> bytes:
    """Encode a record. Only problems are sent to the others, without the checks that passed."""
    listed = [each for each in card.findings if each.verdict is not Verdict.PASS][:_MOST_FINDINGS]
    rows = [[_cut(text) for text in (each.check, each.verdict, each.found, each.mend)] for each in listed]
    return json.dumps({**asdict(card), "findings": rows}).encode()


def pack_links(links: Mapping[str, Link]) -> bytes:
    return json.dumps({id_: asdict(link) for id_, link in links.items()}).encode()


def pack_members(ids: Sequence[str]) -> bytes:
    return json.dumps(list(ids)).encode()


# ---- Each function raises BadRecordError for a record of another version.


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is not a string")
    return _cut(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def _number(value: object) -> int:
    if type(value) is not int or not -1 <= value <= 1 << 32:
        raise ValueError(f"{value!r:.40} is not a number")
    return value


def _texts(value: object) -> Strings:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.40} is not a list")
    return tuple(map(_text, value))


def _options(fields: Texts) -> Texts:
    return {_cut(name): _text(text) for name, text in fields.items()}


def _findings(rows: Sequence[object]) -> tuple[Finding, ...]:
    return tuple(
        Finding(check, Verdict(verdict), found, mend)
        for check, verdict, found, mend in map(_texts, rows[:_MOST_FINDINGS])
    )


_TEXTS = ("id", "name", "ticket", "fleetrun", "python", "torch", "nccl", "driver", "script")
unpack = of_bytes(
    of_fields(
        NodeRecord, **dict.fromkeys(_TEXTS, _text), address=lambda value: parsing.host(_text(value)),
        port=lambda value: parsing.port(str(value)), rank=_number, trainers=_number, kinds=_texts,
        software=str, options=_options, findings=_findings,
    )
)  # fmt: skip
_link = of_fields(Link, round_trip=finite, there=finite, back=finite, ahead=finite, error=_text)
unpack_links = of_bytes(lambda rows: {str(id_): _link(row) for id_, row in rows.items()})
"""Decode links, by the ID of the other node."""
unpack_members = of_bytes(texts)
"""Decode the IDs of the members."""
