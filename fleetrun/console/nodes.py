"""Tells what happens between the nodes of a job. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fleetrun.console.console import Console
from fleetrun.console.text import printable, wrapped

_FRAME = 80


class NodesVoice:
    """One line for each thing that happens; `width` is that of reports."""

    def __init__(self, console: Console, width: int) -> None:
        self._console = console
        self._width = width
        self._down = False
        self._been = False

    def waiting(self, note: WaitingNote) -> None:
        self._been = True
        missing = f"; missing: {_listed(note.missing)}" if note.missing else ""
        if note.fewest <= note.present < note.most:
            enough = "1 node is here" if note.present == 1 else f"{note.present} nodes are here"
            here = f"{enough}; waiting {note.left:.0f} s for more, up to {note.most}"
        elif note.present >= note.most:
            here = f"all {note.present} nodes are here"
        else:
            wanted = str(note.most) if note.fewest == note.most else f"{note.fewest} to {note.most}"
            here = f"{note.present} of {wanted} nodes are here; waiting at most {note.left:.0f} s more"
        self._console.info(f"{here}{missing}")

    def met(self, generation: int, size: int, rank: int, hosts: Sequence[str]) -> None:
        self._been = True
        where = _listed(hosts)
        again = "" if generation == 1 else f" (generation {generation})"
        self._console.info(f"Node {rank} of {size}{again}: {where}")

    def stopping(self, node: str, rank: int, headline: str, answer: str) -> None:
        self._console.warning(f"{told(node, rank, headline)}; {answer}")

    def store_down(self, why: str) -> None:
        self._down = True
        self._console.warning(f"the meeting point cannot be reached: {why}; still trying")

    def store_up(self) -> None:
        if self._down:
            self._console.info(f"the meeting point is there{' again' if self._been else ''}")
        self._down = False

    def ending(self, why: str) -> None:
        self._console.warning(printable(why))

    def final(self, node: str, rank: int, headline: str, lines: Sequence[str]) -> None:
        """The report of the node where it went wrong, or of what no node did; the same on every node."""
        frame = "=" * min(self._width, _FRAME)
        known = bool(node) and any(headline in line for line in lines)
        head = f"On {_place(node, rank)}:" if known else told(node, rank, headline)
        body = [row for line in lines for row in wrapped(printable(line), self._width)]
        self._console.block([frame, *wrapped(head, self._width), *body, frame], level="ERROR")


class WaitingNote(Protocol):
    @property
    def present(self) -> int: ...
    @property
    def fewest(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def missing(self) -> tuple[str, ...]: ...
    @property
    def left(self) -> float: ...


def _place(node: str, rank: int) -> str:
    node = printable(node)  # other machines say what they are called
    return f"node {rank}, {node}" if rank >= 0 else f"node {node}"


def told(node: str, rank: int, headline: str) -> str:
    """What happened, and on which node; one that the headline begins with is not named twice."""
    headline = printable(headline)
    if not node:
        return headline
    if headline.startswith(f"{node} "):
        return f"{_place(node, rank)}{headline.removeprefix(node)}"
    return f"{_place(node, rank)}: {headline}"


def _listed(names: Sequence[str]) -> str:
    names = [printable(name) for name in names]
    if len(names) <= 8:
        return ", ".join(names)
    return f"{', '.join(names[:7])} and {len(names) - 7} more"
