"""When a job hangs: from looks at its trainers to a verdict. Knows no clock, no file and no process."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

LOOKS = 4
"""In so many looks, one after the other at equal distances, a hang is seen."""


class Silence:
    """Counts looks that found no sign of life, not time: while nobody could look (the launcher was stopped
    with Ctrl-Z, or the machine slept) nobody was silent.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._seen: dict[str, Hashable] = {}

    def look(self, seen: Mapping[str, Hashable]) -> bool:
        """`seen` has for each trainer that runs a value that changes with its signs of life. True when none
        of them has given one in `LOOKS` looks; one that goes on is enough, and one that has ended is not
        waited for.
        """
        alive = not seen or any(
            name not in self._seen or self._seen[name] != value for name, value in seen.items()
        )
        self._quiet = 0 if alive else self._quiet + 1
        self._seen = dict(seen)
        return self._quiet >= LOOKS
