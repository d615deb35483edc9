"""A job's keys in etcd, and the JSON of its questions and answers. Pure.

All keys of a job stand under `/fleetrun/<job id>/`, with the slash at its end: a job has no part in one whose
id only begins like its own.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fleetrun.elastic.stores.store import Entry

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """Of one key at one revision of the store; no entry: it is gone."""

    key: str
    entry: Entry | None
    revision: int


class Keys:
    """Between keys of the job and keys of etcd. What covers what is said in `ledger.covers`."""

    def __init__(self, job_id: str) -> None:
        self.root = f"/fleetrun/{quote(job_id, safe='')}/"

    def one(self, key: str) -> str:
        return _base64((self.root + key).encode())

    def span(self, prefix: str) -> Body:
        """What a prefix covers, as etcd says it: from a key to before another."""
        if prefix and not prefix.endswith("/"):
            return {"key": self.one(prefix)}
        end = self.root + prefix[:-1] if prefix else self.root[:-1]
        return {"key": self.one(prefix), "range_end": _base64((end + "0").encode())}  # "0" comes after "/"

    def name(self, key: str) -> str:
        return b64decode(key).decode().removeprefix(self.root)


# ---- questions


def put(keys: Keys, key: str, value: bytes, expect: int | None, lease: str | None) -> Body:
    """The answer tells how the key then stands, whether it was written or not."""
    write = {"key": keys.one(key), "value": _base64(value), **({} if lease is None else {"lease": lease})}
    look = {"request_range": {"key": keys.one(key), "keys_only": True}}
    return _guarded(keys, key, expect, [{"request_put": write}, look])


def delete(keys: Keys, key: str, expect: int | None) -> Body:
    return _guarded(keys, key, expect, [{"request_delete_range": {"key": keys.one(key)}}])


def _guarded(keys: Keys, key: str, expect: int | None, success: list[Body]) -> Body:
    one = keys.one(key)
    compare = {"key": one, "target": "MOD", "result": "EQUAL", "mod_revision": str(expect)}
    return {
        "compare": [] if expect is None else [compare],
        "success": success,
        "failure": [{"request_range": {"key": one}}],
    }


def read(keys: Keys, prefixes: Iterable[str]) -> Body:
    """All of them as they were at one moment."""
    return {"success": [{"request_range": keys.span(prefix)} for prefix in prefixes]}


def read_one(keys: Keys, key: str) -> Body:
    """A key, whatever it looks like."""
    return {"success": [{"request_range": {"key": keys.one(key)}}]}


def watches(keys: Keys, prefixes: Iterable[str]) -> list[Body]:
    """For one stream: so what happens under different prefixes arrives in the order in which it happened."""
    return [{"create_request": keys.span(prefix)} for prefix in prefixes]


# ---- answers


def revision(answer: Mapping[str, Any]) -> int:
    return int(answer["header"]["revision"])


def entries(keys: Keys, answer: Mapping[str, Any]) -> dict[str, Entry]:
    """Of all ranges in the answer to a transaction."""
    return {
        keys.name(kv["key"]): _entry(kv)
        for response in answer.get("responses", ())
        for kv in response.get("response_range", {}).get("kvs", ())
    }


def written(keys: Keys, answer: Mapping[str, Any], key: str, value: bytes | None) -> Change:
    """How a key stands after `put` (of this value) or `delete`."""
    entry = entries(keys, answer).get(key)
    if entry is not None and value is not None and answer.get("succeeded"):
        entry = Entry(value, entry.created, entry.revision)
    return Change(key, entry, revision(answer))


def changes(keys: Keys, message: Mapping[str, Any]) -> list[Change]:
    """In one message of a watch."""
    return [_change(keys, event) for event in message.get("events", ())]


def _change(keys: Keys, event: Mapping[str, Any]) -> Change:
    kv = event["kv"]
    entry = None if event.get("type") == "DELETE" else _entry(kv)
    return Change(keys.name(kv["key"]), entry, int(kv["mod_revision"]))


def _entry(kv: Mapping[str, Any]) -> Entry:
    return Entry(b64decode(kv.get("value", "")), int(kv["create_revision"]), int(kv["mod_revision"]))


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


_PIECE = 512  # bytes that the gateway's decoder reads first; each further reading is twice as large


def in_one_reading(questions: Sequence[Body]) -> str:
    """The text of a stream of questions, so that etcd's gateway reads all of it before it answers any.

    It is a Go server for HTTP/1.1: once it has begun to answer, what it has not yet read of the request is
    thrown away. Its decoder reads by pieces and decodes an object as soon as it has the whole of it. So the
    first object is made long enough, by blanks, to end only in the piece that also brings all the others.
    """
    first, *others = (json.dumps(each, separators=(",", ":")) for each in questions)
    rest = "".join(others)
    before, end = 0, _PIECE
    while max(len(first), before + 1) + len(rest) > end:
        before, end = end, 2 * end + _PIECE
    padding = " " * max(0, before + 1 - len(first))
    return f"{first[:-1]}{padding}}}{rest}"
