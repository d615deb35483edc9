"""Define the address of an etcd, a job's keys in it, and the JSON of requests and answers.

This module does not import the library for etcd, so that an address can be checked without it.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from urllib.parse import parse_qsl, quote

from fleetrun.aliases import Document, Environ, Fields, Strings
from fleetrun.elastic.store import Entry
from fleetrun.envs.settings.parsing import InvalidValue, closest, endpoint_list, parts_of, with_port
from fleetrun.errors import UsageError
from fleetrun.frozen import frozen

# ---- A job's keys are under `/fleetrun/<job id>/`. The slash at the end separates two jobs if the id of one
# starts with the id of the other.

Body = Document


@frozen
class Change:
    """A change of one key at one revision of the store."""

    key: str
    entry: Entry | None  # None if the key was deleted
    revision: int


class Keys:
    """Convert between keys of the job and keys of etcd. Prefixes are as in `store.covers`."""

    def __init__(self, job_id: str) -> None:
        self.root = f"/fleetrun/{quote(job_id, safe='')}/"

    def one(self, key: str) -> str:
        """Return a key of the job in the form of etcd's JSON."""
        return _base64((self.root + key).encode())

    def span(self, prefix: str) -> Body:
        """Return the keys that a prefix covers, as a range of etcd."""
        if prefix and not prefix.endswith("/"):
            return {"key": self.one(prefix)}
        end = self.root + prefix[:-1] if prefix else self.root[:-1]
        return {"key": self.one(prefix), "range_end": _base64((end + "0").encode())}  # "0" comes after "/"

    def name(self, key: str) -> str:
        """Return the job's key for a key in etcd's JSON."""
        return b64decode(key).decode().removeprefix(self.root)


def _base64(data: bytes) -> str:
    return b64encode(data).decode()


# ---- Requests


def put(keys: Keys, key: str, value: bytes, expect: int | None, lease: str | None) -> Body:
    """Write a key. The answer has the key's new state, or its present state if it was not written."""
    write = {"key": keys.one(key), "value": _base64(value), **({} if lease is None else {"lease": lease})}
    look = {"request_range": {"key": keys.one(key), "keys_only": True}}
    return _guarded(keys, key, expect, [{"request_put": write}, look])


def delete(keys: Keys, key: str, expect: int | None) -> Body:
    """Delete a key."""
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
    """Read all prefixes at one revision."""
    return {"success": [{"request_range": keys.span(prefix)} for prefix in prefixes]}


def read_one(keys: Keys, key: str) -> Body:
    """Read one key, even if its name has the form of a prefix."""
    return {"success": [{"request_range": {"key": keys.one(key)}}]}


def watches(keys: Keys, prefixes: Iterable[str]) -> list[Body]:
    """Watch all prefixes in one stream, so that changes under different prefixes arrive in order."""
    return [{"create_request": keys.span(prefix)} for prefix in prefixes]


# ---- A cluster that nodes of a job run (`member.py`) has one key outside of the job's keys. The key holds
# the id of the cluster's job, and is written when nodes may use the cluster.

_COMPLETE_KEY = _base64(b"/fleetrun-members")
COMPLETE: Body = {"key": _COMPLETE_KEY}


def complete(job_id: str) -> Body:
    """Write the key with the id of the cluster's job."""
    return {"key": _COMPLETE_KEY, "value": _base64(job_id.encode())}


def completed_for(answer: Fields) -> str | None:
    """Return the job that may use the cluster, or None before it may be used. `answer` is the answer to a
    range of `COMPLETE`.
    """
    found = answer.get("kvs", ())
    return b64decode(found[0].get("value", "")).decode() if found else None


# ---- Answers


def revision(answer: Fields) -> int:
    """Return the revision of the store at which etcd answered."""
    return int(answer["header"]["revision"])


def entries(keys: Keys, answer: Fields) -> dict[str, Entry]:
    """Return the entries of all ranges in the answer to a transaction."""
    return {
        keys.name(kv["key"]): _entry(kv)
        for response in answer.get("responses", ())
        for kv in response.get("response_range", {}).get("kvs", ())
    }


def written(keys: Keys, answer: Fields, key: str, value: bytes | None) -> Change:
    """Return the state of a key after `put` (of this value) or `delete`."""
    entry = entries(keys, answer).get(key)
    if entry is not None and value is not None and answer.get("succeeded"):
        entry = Entry(value, entry.created, entry.revision)
    return Change(key, entry, revision(answer))


def changes(keys: Keys, message: Fields) -> list[Change]:
    """Return the changes in one message of a watch."""
    return [_change(keys, event) for event in message.get("events", ())]


def _change(keys: Keys, event: Fields) -> Change:
    kv = event["kv"]
    entry = None if event.get("type") == "DELETE" else _entry(kv)
    return Change(keys.name(kv["key"]), entry, int(kv["mod_revision"]))


def _entry(kv: Fields) -> Entry:
    return Entry(b64decode(kv.get("value", "")), int(kv["create_revision"]), int(kv["mod_revision"]))


_PIECE = 512  # bytes that the gateway's decoder reads first; each further read is twice as large


def in_one_read(requests: Sequence[Body]) -> str:
    """Return the JSON of a stream of requests, in a form that etcd's gateway reads completely before it
    answers.

    The gateway is a Go server for HTTP/1.1. After it has started to answer, it discards the unread rest of
    the request. Its decoder reads in pieces and decodes each object as soon as it is complete. The first
    object is therefore padded with blanks, until it ends in the same piece as all the others.
    """
    first, *others = (json.dumps(each, separators=(",", ":")) for each in requests)
    rest = "".join(others)
    before, end = 0, _PIECE
    while max(len(first), before + 1) + len(rest) > end:
        before, end = end, 2 * end + _PIECE
    padding = " " * max(0, before + 1 - len(first))
    return f"{first[:-1]}{padding}}}{rest}"


# ---- The address of an etcd: `etcd://a:2379,b:2379?cacert=ca.pem&cert=me.pem&key=me.key&user=me`

SCHEME = "etcd://"
PASSWORD_VARIABLE = "FLEETRUN_ETCD_PASSWORD"
DEFAULT_PORT = 2379

_FILES = ("cacert", "cert", "key")
_PARAMETERS = (*_FILES, "user")


@frozen
class EtcdAddress:
    """The members of one cluster, and the credentials."""

    endpoints: Strings  # as `host:port`
    cacert: str = ""  # this and the next two are paths of PEM files
    cert: str = ""
    key: str = ""
    user: str = ""

    @property
    def secure(self) -> bool:
        """True if TLS is used, which any file for it enables."""
        return bool(self.cacert or self.cert)


def parse_address(url: str) -> EtcdAddress:
    """Parse the address of an etcd. Raises UsageError. Its message leaves out any text that may be a
    password.
    """
    if not url.startswith(SCHEME):
        raise UsageError(f"the address of an etcd must start with {SCHEME}")
    where, _, query = url.removeprefix(SCHEME).partition("?")
    if "@" in where:
        raise UsageError(
            "the address of an etcd must not contain a user or password before the host",
            hint=f"name the user with '?user=NAME' and set {PASSWORD_VARIABLE}",
        )
    parameters = _parameters(query)
    if parameters.get("key") and not parameters.get("cert"):
        raise UsageError("the address of the etcd has a key without a cert")
    return EtcdAddress(_endpoints(where.removesuffix("/")), **parameters)


def _endpoints(text: str) -> Strings:
    try:
        return endpoint_list(",".join(with_port(each, DEFAULT_PORT) for each in parts_of(text)) or ",")
    except InvalidValue as error:
        raise UsageError(
            f"the address of the etcd has {text!r}: {error}", hint=f"such as {SCHEME}h1:2379,h2:2379"
        ) from None


def _parameters(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise UsageError(
            "the parameters after '?' in the address of the etcd must be NAME=VALUE&..."
        ) from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in _PARAMETERS:
            meant = closest(name, _PARAMETERS)
            password = f"set the password in {PASSWORD_VARIABLE}" if name.startswith("pass") else None
            raise UsageError(
                f"the address of the etcd has an unknown parameter {name!r}; "
                f"known are {', '.join(_PARAMETERS)}",
                hint=f"Did you mean {meant[0]}?" if meant else password,
            )
        if name in found or not value:
            raise UsageError(f"the address of the etcd must have {name} only once, with a value")
        found[name] = value
    return found


def password_for(address: EtcdAddress, environ: Environ) -> str:
    """Return the password of the address's user, or an empty text without a user. Raises UsageError if it is
    not set.
    """
    if address.user and PASSWORD_VARIABLE not in environ:
        raise UsageError(
            f"the address of the etcd names the user {address.user}, but {PASSWORD_VARIABLE} is not set"
        )
    return environ[PASSWORD_VARIABLE] if address.user else ""
