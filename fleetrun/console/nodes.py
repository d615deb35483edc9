"""What the console shows about the nodes of a job: waiting, rendezvous, outages, and the final report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fleetrun.console.console import Console
from fleetrun.console.text import printable, wrapped

_FRAME = 80


class NodeReporter:
    """Writes one line per event; `width` is the width of reports."""

    def __init__(self, console: Console, width: int) -> None:
        self._console = console
        self._width = width
        self._store_down = False
        self._reached = False

    def waiting(self, note: WaitingNote) -> None:
        self._reached = True
        missing = f"; missing: {_listed(note.missing)}" if note.missing else ""
        if note.fewest <= note.present < note.most:
            joined = "1 node has joined" if note.present == 1 else f"{note.present} nodes have joined"
            text = f"{joined}; waiting {note.left:.0f} s for more, up to {note.most}"
        elif note.present >= note.most:
            text = f"all {note.present} nodes have joined"
        else:
            wanted = str(note.most) if note.fewest == note.most else f"{note.fewest} to {note.most}"
            text = f"{note.present} of {wanted} nodes have joined; waiting up to {note.left:.0f} s more"
        self._console.info(f"{text}{missing}")

    def met(self, generation: int, size: int, rank: int, hosts: Sequence[str]) -> None:
        self._reached = True
        again = "" if generation == 1 else f" (generation {generation})"
        self._console.info(f"Node {rank} of {size}{again}: {_listed(hosts)}")

    def stopping(self, node: str, rank: int, headline: str, answer: str) -> None:
        self._console.warning(f"{headline_on_node(node, rank, headline)}; {answer}")

    def store_down(self, why: str) -> None:
        self._store_down = True
        self._console.warning(f"the rendezvous store cannot be reached: {why}; still trying")

    def store_up(self) -> None:
        if self._store_down:
            self._console.info(f"{'reconnected to' if self._reached else 'reached'} the rendezvous store")
        self._store_down = False

    def ending(self, why: str) -> None:
        self._console.warning(printable(why))

    def final(self, node: str, rank: int, headline: str, lines: Sequence[str]) -> None:
        """The report of the node that failed, or of a failure of no node; every node shows the same."""
        frame = "=" * min(self._width, _FRAME)
        known = bool(node) and any(headline in line for line in lines)
        head = f"On {_place(node, rank)}:" if known else headline_on_node(node, rank, headline)
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
    node = printable(node)  # the name comes from another machine
    return f"node {rank}, {node}" if rank >= 0 else f"node {node}"


def headline_on_node(node: str, rank: int, headline: str) -> str:
    """`node 1, h2: trainer 3 exited with code 1`; a node that the headline begins with is not repeated."""
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
