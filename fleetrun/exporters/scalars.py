"""Which numbers of a report belong into an event file, and at which step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fleetrun.exporters.lines import Line
from fleetrun.exporters.standing import bounded

LOSS = "loss"
RATE = "throughput/samples_per_second"


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers of one step by their tags. `again`: the process begins anew, later steps of before are void."""

    step: int
    scalars: dict[str, float]
    again: bool


class Scalars:
    """Of one process over all its attempts. A number is written once for a step, unless it changes."""

    def __init__(self) -> None:
        self.refused = False
        """Whether there were too many names."""
        self._again = True
        self._count = 0
        self._written: dict[str, tuple[int, float]] = {}

    def begins(self) -> None:
        """Another attempt. Its steps may be those of the one before."""
        self._again = True
        self._count = 0
        self._written = dict.fromkeys(self._written, (-1, 0.0))

    def take(self, line: Line) -> Point | None:
        """None when it says nothing new. Reports without a step are counted."""
        self._count += 1
        step = int(line["step"]) if line["step"] is not None else self._count
        found = self._named(line)
        new = {tag: value for tag, value in found.items() if self._written.get(tag) != (step, value)}
        if not new:
            return None
        self._written |= {tag: (step, value) for tag, value in new.items()}
        again, self._again = self._again, False
        return Point(step, new, again)

    def _named(self, line: Line) -> dict[str, float]:
        values = bounded(line["values"], {name: None for name in self._written if name not in (LOSS, RATE)})
        self.refused |= len(values) < len(line["values"])
        if line["loss"] is not None:
            values[LOSS] = line["loss"]
        known = self._written.get(RATE)
        stands = line["step"] is not None and known is not None and known[0] == line["step"]
        if line["rate"] is not None and not stands:  # it changes by the clock while a step takes its time
            values[RATE] = line["rate"]
        return values
