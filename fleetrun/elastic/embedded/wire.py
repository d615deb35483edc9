"""Encode the messages between nodes and the embedded store as frames, and decode them with every field
checked. `client.py` and `server.py` act on the messages.

A message is one frame of JSON: an object with `is` (the kind) and the kind's fields. Kinds with values have
another frame of raw bytes. It holds one value, or the values of several entries one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetrun.decoding import read_object
from fleetrun.elastic.store import Entry

PROTOCOL = 1
MAX_FRAME_BYTES = 64 << 20
MAX_REQUEST_BYTES = 16 << 10
"""Limit for the JSON of a client. The store's JSON may be longer, because it may list many keys."""

GUEST = "guest-"
"""The start of the id of a client that takes no part in the job."""

_LONGEST_NAME = 1024
_LARGEST = 1 << 62

Row = Sequence[Any]
"""An entry without its value: key, created, revision, size of the value. The key alone means deleted."""


class WireError(Exception):
    """The bytes are not a message of this protocol."""


class OtherProtocolError(WireError):
    """A Hello uses another version of this protocol."""

    def __init__(self, protocol: object) -> None:
        super().__init__(f"protocol {protocol}; this side uses {PROTOCOL}")
        self.protocol = protocol


# ---- Messages of a client. `n` is the number of a request, and its answer has the same number.


class Hello(NamedTuple):
    """Open a connection, as its first message. A client that keeps its lease keeps its `session`."""

    protocol: int
    version: str
    job: str
    node: str
    session: str


class Put(NamedTuple):
    """Write a key. The value follows in the second frame."""

    n: int
    key: str
    expect: int | None
    leased: bool


class Delete(NamedTuple):
    """Delete a key."""

    n: int
    key: str
    expect: int | None


class Clear(NamedTuple):
    """Delete all keys that a prefix covers."""

    n: int
    prefix: str


class Read(NamedTuple):
    """Read a key once."""

    n: int
    key: str


class Watch(NamedTuple):
    """List the keys that a prefix covers, and send all their changes from then on."""

    n: int
    prefix: str


class Unwatch(NamedTuple):
    """Stop sending the changes under a prefix."""

    prefix: str


class Alive(NamedTuple):
    """Renew the lease. `got` is the number of bytes received over this connection. It lets the store detect a
    client that does not read.
    """

    got: int


class Bye(NamedTuple):
    """End the lease."""


# ---- Messages of the store


class Welcome(NamedTuple):
    """Answer a Hello."""

    store: str  # a unique id of this store
    lease: float  # seconds
    fresh: bool  # True if the lease is new


class Refused(NamedTuple):
    """Answer a Hello with a permanent refusal."""

    text: str


class Done(NamedTuple):
    """Answer a Put, Delete or Clear."""

    n: int
    ok: bool


class Found(NamedTuple):
    """Answer a Read. The value follows in the second frame. A `row` without numbers means that the key does
    not exist.
    """

    n: int
    row: Row


class Listing(NamedTuple):
    """Answer a Watch with all entries that the prefix covers, and their values."""

    n: int
    prefix: str
    rows: Sequence[Row]


class News(NamedTuple):
    """Report changes of watched keys, with their values."""

    rows: Sequence[Row]


class Living(NamedTuple):
    """Answer an Alive. With `asks`, request an Alive."""

    asks: bool


class Stranger(NamedTuple):
    """Answer any message except Hello over a connection without a session. The client must reconnect and send
    Hello.
    """


class Wrong(NamedTuple):
    """Answer an invalid message."""

    text: str


REQUESTS = {
    kind.__name__.lower(): kind for kind in (Hello, Put, Delete, Clear, Read, Watch, Unwatch, Alive, Bye)
}
ANSWERS = {
    kind.__name__.lower(): kind
    for kind in (Welcome, Refused, Done, Found, Listing, News, Living, Stranger, Wrong)
}
Kinds = Mapping[str, type[Any]]
_WITH_BODY = frozenset({Put, Found, Listing, News})
_encode = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Any) -> bytes:
    """Return the JSON frame of a message."""
    return _encode({"is": type(message).__name__.lower(), **message._asdict()}).encode()


def decode(frames: Sequence[bytes], kinds: Kinds, longest: int = MAX_FRAME_BYTES) -> tuple[Any, bytes]:
    """Decode a message of one of these kinds, and return it with its bytes. Raises WireError."""
    if not frames or len(frames[0]) > longest:
        raise WireError("a message too large")
    fields = read_object(frames[0])
    if fields is None:
        raise WireError("not a JSON object")
    name = fields.pop("is", None)
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError("an unknown kind")
    if kind is Hello and fields.get("protocol") != PROTOCOL:
        raise OtherProtocolError(fields.get("protocol"))
    if fields.keys() != set(kind._fields):
        raise WireError(f"{name} with other fields")
    for field, value in fields.items():
        if not _CHECKS[field](value):
            raise WireError(f"{name} with a wrong {field}")
    if len(frames) != 1 + (kind in _WITH_BODY):
        raise WireError(f"{name} in {len(frames)} frames")
    return kind(**fields), frames[1] if kind in _WITH_BODY else b""


def row_of(key: str, entry: Entry | None) -> Row:
    """Return the row of an entry."""
    return (key,) if entry is None else (key, entry.created, entry.revision, len(entry.value))


def pack(entries: Mapping[str, Entry | None]) -> tuple[list[Row], bytes]:
    """Return the rows of entries, and all their values one after the other."""
    rows = [row_of(key, entry) for key, entry in entries.items()]
    return rows, b"".join([entry.value for entry in entries.values() if entry is not None])


def unpack(rows: Sequence[Row], body: bytes) -> dict[str, Entry | None]:
    """Reverse `pack`. Raises WireError if the sizes do not match."""
    entries: dict[str, Entry | None] = {}
    start = 0
    for row in rows:
        if len(row) == 1:
            entries[row[0]] = None
            continue
        key, created, revision, size = row
        entries[key] = Entry(body[start : start + size], created, revision)
        start += size
    if start != len(body):
        raise WireError(f"values of {start} bytes in {len(body)}")
    return entries


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def check_entry(key: str, value: bytes) -> None:
    """Check that a key and value can be sent. Raises ValueError if not."""
    if not is_name(key):
        raise ValueError(f"{key!r} cannot be a key")
    if len(value) > MAX_FRAME_BYTES:
        raise ValueError(f"the value of {key} has {len(value)} bytes; it may have {MAX_FRAME_BYTES}")


def is_name(value: object) -> bool:
    """Return True for a printable text, without control characters or lone surrogates."""
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and value.isprintable()


def _is_row(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) in (1, 4)
        and is_name(value[0])
        and all(_is_number(each) for each in value[1:])
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("n", "got", "protocol"), _is_number),
    **dict.fromkeys(("version", "job", "node", "session", "key", "prefix", "store"), is_name),
    **dict.fromkeys(("leased", "fresh", "ok", "asks"), lambda value: isinstance(value, bool)),
    "expect": lambda value: value is None or _is_number(value),
    "lease": lambda value: type(value) in (int, float) and 0 < value < 1e9,
    "text": lambda value: isinstance(value, str),
    "row": _is_row,
    "rows": lambda value: isinstance(value, list) and all(map(_is_row, value)),
}
