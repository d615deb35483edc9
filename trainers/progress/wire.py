"""A report as the launcher reads it: JSON objects of at most 8 KiB. Knows names and sizes; no socket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 8192
"""Bytes of a datagram."""
LONGEST_NAME = 100
LONGEST_WHAT = 120


def datagrams(said: Mapping[str, Any], values: Mapping[str, float]) -> Iterator[bytes]:
    """`said` once for as many values as fit beside it; once without any, if there are none."""
    head = json.dumps(said, separators=(",", ":"))[:-1] + ',"values":{'
    items: list[str] = []
    size = len(head) + 2
    for name, value in values.items():
        item = f"{json.dumps(name)}:{json.dumps(value)}"
        if items and size + len(item) + 1 > LARGEST:
            yield f"{head}{','.join(items)}}}}}".encode()
            items, size = [], len(head) + 2
        items.append(item)
        size += len(item) + 1
    yield f"{head}{','.join(items)}}}}}".encode()


def shown(text: object, longest: int) -> str:
    """What the launcher takes as a name: not too long, no control characters, not empty."""
    line = "".join(letter if letter.isprintable() else "?" for letter in str(text)[:longest])
    return line or "?"
