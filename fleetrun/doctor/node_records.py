"""The records that nodes exchange through the store, converted to and from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import Any

from fleetrun.aliases import Document, Fields, Strings, Texts
from fleetrun.doctor.facts import Finding, Verdict
from fleetrun.envs.settings import parsing
from fleetrun.envs.settings.parsing import InvalidValue
from fleetrun.frozen import frozen_by_name
from fleetrun.host import software

MOST_BYTES = 1 << 20
_MOST_FINDINGS = 40
_LONGEST_TEXT = 600


class BadNodeRecordError(ValueError):
    """The record was not written by this version of the doctor."""


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


@frozen_by_name
class Link:
    """The network link from one node to another."""

    round_trip: float = 0.0
    """Seconds of a round trip."""
    there: float = 0.0
    """Bytes/s to the other node."""
    back: float = 0.0
    """Bytes/s back."""
    ahead: float = 0.0
    """Seconds by which the other clock is ahead."""
    error: str = ""
    """The reason why the measurement failed. Empty: no error."""


def pack(card: NodeRecord) -> bytes:
    """Encode a record. Only problems are sent to the others, without the checks that passed."""
    told = [each for each in card.findings if each.verdict is not Verdict.PASS][:_MOST_FINDINGS]
    rows = [[_cut(text) for text in (each.check, each.verdict, each.found, each.mend)] for each in told]
    return json.dumps({**asdict(card), "findings": rows}).encode()


def unpack(data: bytes) -> NodeRecord:
    """Decode a record. Raises BadNodeRecordError."""
    row = _object(data)
    options = row.get("options")
    findings = row.get("findings")
    if not isinstance(options, dict) or not isinstance(findings, list):
        raise BadNodeRecordError("it lacks options or findings")
    port = _number(row, "port")
    try:
        parsing.host(_text(row, "address"))
        parsing.port(str(port))
    except InvalidValue as error:
        raise BadNodeRecordError(f"where it is: {error}") from None
    return NodeRecord(
        **{name: _text(row, name) for name in _TEXTS},
        rank=_number(row, "rank"),
        port=port,
        trainers=_number(row, "trainers"),
        kinds=tuple(_cut(str(each)) for each in _list(row, "kinds")[:64]),
        software=str(row.get("software", ""))[: software.MOST],
        options={_cut(str(name)): _cut(str(text)) for name, text in options.items()},
        findings=tuple(_finding(each) for each in findings[:_MOST_FINDINGS]),
    )


_TEXTS = ("id", "name", "address", "ticket", "fleetrun", "python", "torch", "nccl", "driver", "script")


def _finding(row: Any) -> Finding:
    try:
        check, verdict, found, mend = (_cut(str(each)) for each in row)
        return Finding(check, Verdict(verdict), found, mend)
    except (ValueError, TypeError) as error:
        raise BadNodeRecordError(f"a finding is {error}") from None


def pack_links(links: Mapping[str, Link]) -> bytes:
    return json.dumps({id_: asdict(link) for id_, link in links.items()}).encode()


def unpack_links(data: bytes) -> dict[str, Link]:
    """Decode links, by the ID of the other node. Raises BadNodeRecordError."""
    found = {}
    for id_, row in _object(data).items():
        if not isinstance(row, dict):
            raise BadNodeRecordError("a link is not an object")
        numbers = {name: _amount(row, name) for name in ("round_trip", "there", "back", "ahead")}
        found[id_] = Link(**numbers, error=_text(row, "error"))
    return found


def pack_members(ids: Sequence[str]) -> bytes:
    return json.dumps(list(ids)).encode()


def unpack_members(data: bytes) -> Strings:
    """Decode the IDs of the members. Raises BadNodeRecordError."""
    row = _json(data)
    if not isinstance(row, list) or not all(isinstance(each, str) for each in row):
        raise BadNodeRecordError("it is not a list of machines")
    return tuple(row)


def _object(data: bytes) -> Document:
    row = _json(data)
    if not isinstance(row, dict):
        raise BadNodeRecordError("it is not an object")
    return row


def _json(data: bytes) -> Any:
    if len(data) > MOST_BYTES:
        raise BadNodeRecordError(f"it has {len(data)} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadNodeRecordError(str(error)) from None


def _list(row: Fields, name: str) -> list[Any]:
    value = row.get(name)
    if not isinstance(value, list):
        raise BadNodeRecordError(f"{name} is not a list")
    return value


def _text(row: Fields, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise BadNodeRecordError(f"{name} is not a string")
    return _cut(value)


def _number(row: Fields, name: str) -> int:
    value = row.get(name)
    if not isinstance(value, int) or not -1 <= value <= 1 << 32:
        raise BadNodeRecordError(f"{name} is not a number")
    return value


def _amount(row: Fields, name: str) -> float:
    value = row.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise BadNodeRecordError(f"{name} is not a number")
    return float(value)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
