"""State: what a server knows besides its tables - members, the step, the pushes that wait for others - as
bytes and back, for snapshots. Knows the parts; leaves files to `durable`.

    blob   I length of the JSON | JSON | for each message: I frames | I length, bytes of each frame
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from trainers.ps.net.wire import Field, Kind, Message, Part, WireError, decode, encode
from trainers.ps.server.members import Applied, Member, Members
from trainers.ps.server.overlay import Overlay
from trainers.ps.server.rounds import Gradient, Round
from trainers.ps.server.steps import Steps, SyncSteps
from trainers.ps.server.store import Store

_LENGTH = struct.Struct("<I")
_VERSION = 2
_PLAIN = ("rank", "incarnation", "restart_count", "step", "resumed", "barrier", "finished", "left")


class StateError(ValueError):
    """Bytes that are no state of this version."""


def dump(members: Members, store: Store, steps: Steps) -> bytes:
    """Everything that `restore` needs."""
    about = {
        "version": _VERSION,
        "ready": store.ready,
        "skipped": store.skipped,
        "step": steps.step,
        "tables": {number: table.spec.name for number, table in store.tables.items()},
        "start": members.start,
        "members": [_dump_member(member) for member in members],
    }
    text = json.dumps(about).encode()
    messages = _dump_sync(steps) if isinstance(steps, SyncSteps) else []
    return b"".join([_LENGTH.pack(len(text)), text, *map(_packed, messages)])


def table_names(blob: bytes) -> dict[int, str]:
    """The name of each table by its number. Raises StateError."""
    return {int(number): str(name) for number, name in _about(blob)["tables"].items()}


def restore(blob: bytes, members: Members, store: Store, steps: Steps) -> None:
    """Put back what `dump` saw; the tables are loaded apart from this. Raises StateError."""
    about = _about(blob)
    try:
        members.restore([_load_member(each) for each in about["members"]], about["start"])
        store.ready, store.skipped, steps.step = about["ready"], about["skipped"], about["step"]
        (length,) = _LENGTH.unpack_from(blob)
        messages = list(_unpacked(blob[_LENGTH.size + length :]))
        if isinstance(steps, SyncSteps):
            _load_sync(steps, messages)
    except (struct.error, KeyError, TypeError, ValueError, WireError) as error:
        raise StateError(f"a state that cannot be read: {error!r}") from error


def _about(blob: bytes) -> dict[str, Any]:
    try:
        (length,) = _LENGTH.unpack_from(blob)
        about: dict[str, Any] = json.loads(blob[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, ValueError) as error:
        raise StateError(f"a state that cannot be read: {error!r}") from error
    if about.get("version") != _VERSION:
        raise StateError(f"state of version {about.get('version')}; this fleetrun reads {_VERSION}")
    return about


def _dump_member(member: Member) -> dict[str, Any]:
    plain = {name: getattr(member, name) for name in _PLAIN}
    return {**plain, "applied": _dump_numbers(member.applied), "counted": _dump_numbers(member.counted)}


def _dump_numbers(applied: Applied) -> list[Any]:
    return [applied.floor, sorted(applied.numbers)]


def _load_numbers(content: list[Any]) -> Applied:
    floor, numbers = content
    return Applied(set(numbers), floor)


def _load_member(content: dict[str, Any]) -> Member:
    plain = {name: content[name] for name in _PLAIN if name != "rank"}
    return dataclasses.replace(
        Member(content["rank"]),
        applied=_load_numbers(content["applied"]),
        counted=_load_numbers(content["counted"]),
        **plain,
    )


def _dump_sync(steps: SyncSteps) -> list[Message]:
    """The values before the last step, then each waiting push."""
    before = [Part(table, Field.VALUES, values) for table, values in steps.before.dense.items()]
    for table, (keys, rows) in steps.before.rows.items():
        before += [Part(table, Field.KEYS, keys), Part(table, Field.ROWS, rows)]
    waiting = [
        Message(kind=Kind.PUSH, rank=rank, parts=tuple(part for each in push for part in _parts(each)))
        for rank, push in steps.round.pushes.items()
    ]
    return [Message(kind=Kind.DATA, parts=tuple(before)), *waiting]


def _load_sync(steps: SyncSteps, messages: Sequence[Message]) -> None:
    before, *waiting = messages
    gradients = _gradients(before.parts)
    steps.before = Overlay(
        {each.table: each.values for each in gradients if each.keys is None},
        {each.table: (each.keys, each.values) for each in gradients if each.keys is not None},
    )
    steps.round = Round()
    for message in waiting:
        steps.round.add(message.rank, _gradients(message.parts))


def _parts(gradient: Gradient) -> list[Part]:
    if gradient.keys is None:
        return [Part(gradient.table, Field.VALUES, gradient.values, gradient.lr)]
    parts = [
        Part(gradient.table, Field.KEYS, gradient.keys),
        Part(gradient.table, Field.ROWS, gradient.values, gradient.lr),
    ]
    return parts if gradient.stats is None else [*parts, Part(gradient.table, Field.STATS, gradient.stats)]


def _gradients(parts: Sequence[Part]) -> list[Gradient]:
    """What `_parts` made: one block in each VALUES part."""
    found: list[Gradient] = []
    keys: Part | None = None
    for part in parts:
        if part.field is Field.VALUES:
            found.append(Gradient(part.table, part.data, None, part.lr))
        elif part.field is Field.KEYS:
            keys = part
        elif part.field is Field.ROWS and keys is not None:
            found.append(Gradient(part.table, part.data, keys.data, part.lr))
        elif part.field is Field.STATS and found:
            found[-1] = found[-1]._replace(stats=part.data)
    return found


def _packed(message: Message) -> bytes:
    frames = encode(message)
    lengths = (_LENGTH.pack(len(frame)) + bytes(frame) for frame in frames)
    return b"".join([_LENGTH.pack(len(frames)), *lengths])


def _unpacked(content: bytes) -> Iterator[Message]:
    at = 0
    while at < len(content):
        (count,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size
        frames = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(content, at)
            at += _LENGTH.size
            frames.append(content[at : at + length])
            at += length
        yield decode(frames)
