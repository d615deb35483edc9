"""The console of a terminal that somebody looks at: lines, and a foot below them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fleetrun.console.console import Console, terminal_columns
from fleetrun.console.facts import Facts
from fleetrun.console.foot import Foot, in_foreground, terminal_size
from fleetrun.console.sink import Sink
from fleetrun.console.wrapping import wrapped
from fleetrun.pod.loop import Loop

_WIDE = 100


class LiveConsole(Console):
    stands = True

    def __init__(self, foot: Foot, level: str, *, colour: bool) -> None:
        super().__init__(foot, foot, level, colour=colour)
        self._foot = foot

    def drain(self, interrupted: int) -> None:
        self._foot.end()
        super().drain(interrupted)

    def begin(self, loop: Loop, facts: Callable[[], Facts]) -> None:
        self._foot.begin(loop, facts)

    def end(self) -> None:
        self._foot.end()

    def pause(self) -> None:
        self._foot.hide()

    def resume(self) -> None:
        self._foot.unhide()

    def follower(
        self, name: str, width: int, number: int, *, alone: bool
    ) -> tuple[Callable[[bytes], None], bool]:
        return (self._foot.move, True) if alone else super().follower(name, width, number, alone=alone)

    def _fitted(self, line: str) -> list[str]:
        """The terminal may have another width by now."""
        return wrapped(line, terminal_columns() or _WIDE)


def live_console(sink: Sink, level: str, *, colour: bool) -> LiveConsole:
    """`sink` is stdout, which is stderr too, and a terminal."""
    foot = Foot(sink, partial(terminal_size, 1), partial(in_foreground, 1), colour=colour)
    return LiveConsole(foot, level, colour=colour)
