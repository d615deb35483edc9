"""Slurm's short way to write hosts: `n[1-2,07],m3` is n1, n2, n07 and m3. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_MOST = 1_000_000
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


class HostlistError(ValueError):
    """The text is no host list."""


def hosts(text: str) -> Iterator[str]:
    """The hosts of a list, in its order, without expanding what is not asked for. Raises HostlistError."""
    for item in _items(text):
        yield from _expanded(item)


def _items(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    items, depth, item = [], 0, ""
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise HostlistError(f"{text!r} is no list of hosts: its brackets do not match")
        if letter == "," and depth == 0:
            items.append(item)
            item = ""
        else:
            item += letter
    if depth:
        raise HostlistError(f"{text!r} is no list of hosts: a bracket is open")
    return [each for each in (*items, item) if each]


def _expanded(item: str) -> Iterator[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    ranges, _, tail = rest.partition("]")
    for number in _counted(ranges, item):
        for end in _expanded(tail):
            yield f"{head}{number}{end}"


def _counted(ranges: str, item: str) -> Iterator[str]:
    for part in ranges.split(","):
        found = _NUMBERS.fullmatch(part)
        if found is None:
            raise HostlistError(f"{item!r} is no list of hosts: {part!r} is no range")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) > _MOST:
            raise HostlistError(f"{item!r} is no list of hosts: {part!r} is no range")
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
