"""Every line a person sees. Two outputs: what fleetrun says goes to stderr, what the containers print to
stdout.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fleetrun.console.wrapping import wrapped
from fleetrun.pod.loop import Loop

if TYPE_CHECKING:
    from fleetrun.console.facts import Facts

LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
_RED, _YELLOW, _RESET = "\033[31m", "\033[33m", "\033[0m"
_LABEL_COLOURS = tuple(f"\033[{code}m" for code in (36, 32, 35, 34, 33, 96, 92, 95, 94, 93))


class Output(Protocol):
    """Where lines go: a `Sink`, or what stands before one."""

    @property
    def room(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def attach(self, loop: Loop, emptied: Callable[[], None]) -> None: ...
    def drain(self, interrupted: int | None = None) -> None: ...


class Console:
    """`level` is the least that is said, `columns` the width of the terminal that stderr is (None: none)."""

    def __init__(
        self,
        out: Output,
        err: Output,
        level: str = "INFO",
        *,
        colour: bool = False,
        columns: int | None = None,
    ) -> None:
        self.out = out
        self.err = err
        self._least = LEVELS[level]
        self._colour = colour
        self._columns = columns

    def attach(self, loop: Loop, room: Callable[[], None]) -> None:
        """From now on output that cannot go out at once waits for the loop; `room` is called when stdout is
        free again.
        """
        self.out.attach(loop, room)
        if self.err is not self.out:
            self.err.attach(loop, lambda: None)

    def drain(self, interrupted: int) -> None:
        """Wait until everything is written or its reader is gone, or `interrupted` becomes readable."""
        self.out.drain(interrupted)
        self.err.drain(interrupted)

    # ---- what displays differ in

    follows = True
    """Whether the output of containers is shown."""
    stands = False
    """Whether it shows how the job stands, once `begin` has told it."""

    @property
    def listener(self) -> Callable[[bytes], None] | None:
        """Who wants every event of the record, as a line of JSON without its end."""
        return None

    def begin(self, loop: Loop, facts: Callable[[], Facts]) -> None:
        """A pod is about to run; from now on `facts` tells how the job stands."""

    def end(self) -> None:
        """Nothing runs any more, and all that it printed is shown."""

    def pause(self) -> None:
        """This process is about to stop: the terminal is somebody else's until `resume`."""

    def resume(self) -> None: ...

    def follower(
        self, name: str, width: int, number: int, *, alone: bool
    ) -> tuple[Callable[[bytes], None], bool]:
        """What takes the output of a container, and whether it wants the states of lines too that end in a
        carriage return. One that is followed alone has no label.
        """
        label = b"" if alone else self.label(name, width, number)
        return partial(self.show, label), alone

    # ----

    def says(self, level: str) -> bool:
        return LEVELS[level] >= self._least

    def debug(self, text: str) -> None:
        self._say("DEBUG", text)

    def info(self, text: str) -> None:
        self._say("INFO", text)

    def warning(self, text: str) -> None:
        self._say("WARNING", text, _YELLOW)

    def error(self, text: str) -> None:
        self._say("ERROR", text, _RED)

    def show(self, label: bytes, lines: bytes) -> None:
        """Whole lines of a container, each with the label before it."""
        self.out.write(label + lines[:-1].replace(b"\n", b"\n" + label) + b"\n" if label else lines)

    def block(self, lines: Iterable[str], *, level: str = "INFO") -> None:
        """Lines without the stamp: tables and reports."""
        if self.says(level):
            self.err.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))

    def _say(self, level: str, text: str, colour: str = "") -> None:
        if not self.says(level):
            return
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now % 1 * 1000):03d}"
        head = f"LAUNCH {level} {stamp} "
        lines = [piece for line in text.splitlines() or [""] for piece in self._fitted(head + line)]
        painted = [
            line.replace(f"LAUNCH {level}", self.paint(f"LAUNCH {level}", colour), 1) for line in lines
        ]
        self.err.write("".join(f"{line}\n" for line in painted).encode("utf-8", "surrogateescape"))

    def _fitted(self, line: str) -> list[str]:
        """On a terminal a long line goes on below, broken between words."""
        return [line] if self._columns is None else wrapped(line, self._columns)

    def paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colour and colour else text

    def label(self, name: str, width: int, number: int) -> bytes:
        """The head of a followed line: `trainer.1 | `."""
        return self.paint(f"{name:<{width}} |", _LABEL_COLOURS[number % len(_LABEL_COLOURS)]).encode() + b" "


def wants_colour(environ: Mapping[str, str]) -> bool:
    """The customs: NO_COLOR, FORCE_COLOR, TERM=dumb, and no colour into files and pipes."""
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return bool(environ.get("FORCE_COLOR")) or (sys.stderr.isatty() and sys.stdout.isatty())


def terminal_columns() -> int | None:
    """Columns of the terminal that stderr is, None where it is none."""
    try:
        return max(40, os.get_terminal_size(2).columns)
    except OSError:
        return None
