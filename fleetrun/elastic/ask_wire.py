"""Define the messages with which nodes and commands ask the nodes of a job, through the rendezvous store.

    state/requests/NAME    a request, with the nodes that it addresses    all nodes watch `state/` anyway
    answers/NAME/ID        a piece of the answer of node ID               only the asker watches all answers

A short answer is one piece. The output of a command is many pieces: the asker deletes a piece after it has
read it, and the node then writes the next one. The store therefore holds at most one piece of each node. The
asker deletes all keys of a request when it has all answers. All keys are leased, so the keys of a lost node
or command disappear too.

In a job with a token, the token signs each request. Without a token, anyone who can reach the store can write
requests, and could also join the job and end it. A node then answers only the verbs of `ALWAYS`. For `logs`
it reads only the last `MOST_BYTES_OPEN` bytes, and new lines.
"""

from __future__ import annotations

import hmac
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, replace

from fleetrun.aliases import Fields, Strings
from fleetrun.decoding import WRONG, of_fields, optional, texts
from fleetrun.envs.contract import derive_key
from fleetrun.frozen import frozen_by_name

MOST_BYTES, MOST_BYTES_OPEN = 16 << 20, 256 << 10
"""Bytes of older log lines: most bytes that a node sends with a token, and most bytes that it reads without
one.
"""

LARGEST = 32 << 10
"""Most bytes of the answer to `state` or `ranks`."""

LONGEST_NAME, LONGEST_REQUEST = 64, 16 << 10
_UNPACKED = 1 << 20

VERBS: Mapping[str, Mapping[str, type]] = {
    "state": {"brief": bool, "most": int},
    "ranks": {"detail": str, "most": int},
    "stop": {"now": bool},
    "restart": {"name": str},
    "type": {"into": str, "line": str},
    "logs": {"follow": bool, "lines": int, "role": str, "rank": str, "since": str, "grep": str},
    "stacks": {"role": str, "rank": str, "timeout": float},
    "why": {"json": bool},
    "status": {"json": bool, "watch": bool, "interval": float},
    "report": {"record": bool},
    "bundle": {},
    "debug": {"role": str, "rank": str, "now": bool},
}
"""The permitted requests, with their options and the types of their values. Anything else is kept out of
command lines. The launcher answers the first five by itself. It runs a command for the others.
"""

ALWAYS = VERBS.keys() - {"report", "bundle", "debug", "type"}
"""The requests that a node answers without a token."""


@frozen_by_name
class Request:
    """A request of a command or a node to the nodes of a job."""

    verb: str
    options: Fields
    nodes: Strings = ()  # the ids of the addressed nodes; empty: all nodes except the asker
    by: str = ""  # `USER on HOST`, for the message of a stop

    def check(self, *, secret: bool) -> None:
        """Raise ValueError for anything outside `VERBS`. `secret`: the job has a token."""
        kinds = VERBS.get(self.verb)
        if kinds is None:
            raise ValueError(f"this version of fleetrun has no command {self.verb[:40]!r}")
        for name, value in self.options.items():
            if type(value) is not kinds.get(name):
                raise ValueError(f"{self.verb} on another node takes no {name[:40]!r} such as {value!r:.40}")
            if isinstance(value, str) and _is_no_word(value):
                raise ValueError(f"the {name[:40]!r} of {self.verb} has control characters, or is not text")
        if not secret and self.verb not in ALWAYS:
            raise ValueError(f"the job has no secret (FLEETRUN_TOKEN), so its nodes refuse {self.verb}")

    def words(self, pod: str, *, secret: bool) -> list[str]:
        """Return the command line after `fleetrun`. Raises ValueError, as `check` does."""
        self.check(secret=secret)
        words = [self.verb, pod, "--here"]
        for name, value in self.options.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not False:
                words.append(f"--{name}={value}")
        if self.verb == "logs":
            words += ("--most_bytes", str(MOST_BYTES)) if secret else ("--most_read", str(MOST_BYTES_OPEN))
        return words


def _is_no_word(value: str) -> bool:
    """Return True if a shell cannot pass the value to a command, or no user would type it."""
    try:
        return any(byte < 32 and byte != 9 for byte in os.fsencode(value))
    except UnicodeEncodeError:
        return True


_request = of_fields(Request, verb=str, options=dict, nodes=texts, by=str)


def pack_request(name: str, request: Request, token: str) -> bytes:
    """Pack a request, signed with the token if there is one."""
    text = json.dumps(asdict(request), separators=(",", ":"))
    return json.dumps({"request": text, "signed": _signature(name, text, token)}).encode()


def unpack_request(name: str, data: bytes, token: str) -> Request | None:
    """Read a request. Return None if it lacks the token's signature, or if this version cannot read it."""
    try:
        envelope = json.loads(data)
        text = envelope["request"]
        if not hmac.compare_digest(str(envelope["signed"]), _signature(name, text, token)):
            return None
        return _request(json.loads(text))
    except WRONG:
        return None


def _signature(name: str, text: str, token: str) -> str:
    if not token:
        return ""
    return hmac.new(derive_key(token, b"requests"), f"{name}\n{text}".encode(), "sha256").hexdigest()


@frozen_by_name
class Piece:
    """A piece of a node's answer."""

    number: int  # if more pieces follow, piece 0 is empty and confirms the request
    data: bytes = b""  # compressed
    code: int | None = None  # in the last piece, the exit code of the command
    error: str = ""  # in the last piece, the reason of a failure, or the end of the command's stderr


_head = of_fields(Piece, number=int, code=optional(int), error=str)


def pack_piece(piece: Piece) -> bytes:
    head = {"number": piece.number, "code": piece.code, "error": piece.error}
    return json.dumps(head).encode() + b"\n" + piece.data


def unpack_piece(value: bytes) -> Piece | None:
    """Read a piece. Return None for an invalid value."""
    head, _, data = value.partition(b"\n")
    try:
        return replace(_head(json.loads(head)), data=data)
    except WRONG:
        return None


def decompressed(data: bytes) -> bytes | None:
    """Return the output in a piece, or None if it cannot be decompressed."""
    try:
        return zlib.decompressobj().decompress(data, _UNPACKED) if data else b""
    except zlib.error:
        return None
