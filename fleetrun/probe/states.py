"""Where one rank stood when it was asked, or when it ended: what its probe said, and what the launcher knows
of its process. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetrun.pod.policy import is_symptom
from fleetrun.pod.process import Exit

MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""What reading other people's JSON raises."""


_OURS = Path(__file__).parents[2]
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python", f"{_OURS}/trainers/", f"{_OURS}/fleetrun/")


@dataclass(frozen=True, slots=True)
class Frame:
    """`code` is the text of the line, empty if unknown."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def installed(self) -> bool:
        """Whether it belongs to a library, as far as its path tells."""
        return self.file[:1] == "<" or any(part in self.file for part in _LIBRARIES)


@dataclass(frozen=True, slots=True)
class Group:
    """`ranks` of the job; `entered` is the number of the last collective that was entered, from 1."""

    ranks: tuple[int, ...]
    entered: int


@dataclass(frozen=True, slots=True)
class Call:
    """Of a collective; `number` counts those of its group from 1. `entered` in seconds since the epoch."""

    group: str
    operation: str
    number: int
    sizes: str
    dtypes: str
    entered: float
    done: bool

    @property
    def title(self) -> str:
        return f"{self.operation} #{self.number}"

    @property
    def signature(self) -> str:
        """Operation, sizes and types, as far as all ranks must agree on them."""
        if self.operation not in _SAME_SIZES:
            return self.operation
        return f"{self.operation} of {self.dtypes} {self.sizes}"


_SAME_SIZES = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "reduce_scatter"}
)


@dataclass(frozen=True, slots=True)
class Served:
    """What a trainer of parameter servers waits in, for `seconds`, at server number `server`. `ranks` have
    not come to it; none: it is the server that is waited for, `why` says what it does if that is known.
    """

    server: int
    what: str
    ranks: tuple[int, ...]
    why: str
    seconds: float


_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Of a trainer, or of a server (`role` is `ps`). `alive` is False for a process that has ended, `how` it
    did in words, `ok` with success. `note` says what is unusual about a process that lives (stopped by a
    signal). `node` is where it runs, empty for the node that asks. `answered`: its probe has, now or at its
    end; without that `stack` may still be known from outside. `symptom`: it failed because of a collective,
    not of itself. `joining`: it is in init_process_group. `said`: the exception of C++ that has ended it.
    """

    rank: int
    title: str
    role: str = "trainer"
    node: str = ""
    alive: bool = True
    ok: bool = False
    how: str = ""
    symptom: bool = False
    said: str = ""
    note: str = ""
    answered: bool = False
    now: float = 0.0
    stack: tuple[Frame, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    peer: tuple[str, int] | None = None
    """`("recv", 2)`: it waits in recv for rank 2."""
    served: Served | None = None
    arrivals: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """When it entered the last collectives of each group, by their numbers; seconds since the epoch."""
    ahead: float = 0.0
    """Seconds by which the clock of its node is ahead of the asking one's, give or take `unsure`."""
    unsure: float = 0.0

    @property
    def waits_in(self) -> Call | None:
        """The oldest collective that it has entered and not completed; torch takes one that failed for
        completed.
        """
        if not self.alive:
            return self.calls[-1] if self.symptom and self.calls else None
        return next((each for each in self.calls if not each.done), None)

    @property
    def joining(self) -> bool:
        return (
            self.answered
            and not self.groups
            and any(each.function == "init_process_group" for each in self.stack)
        )

    def entered(self, group: str) -> int:
        """How many collectives of this group; 0 if it has none, or that is not known."""
        return self.groups[group].entered if group in self.groups else 0

    def call(self, group: str, number: int) -> Call | None:
        return next((each for each in self.calls if (each.group, each.number) == (group, number)), None)

    @property
    def stack_lines(self) -> tuple[str, ...]:
        """Its innermost calls."""
        return tuple(
            f"{each.file}:{each.line} in {each.function}{f': {each.code}' if each.code else ''}"
            for each in self.stack[:_SHOWN]
        )

    @property
    def place(self) -> str:
        """`train.py:31 in load: time.sleep(60)`: the innermost frame of the user's own code."""
        frames = [each for each in self.stack if not each.installed] or list(self.stack)
        if not frames:
            return ""
        own = frames[0]
        code = f": {own.code}" if own.code else ""
        return f"{own.file.rpartition('/')[2]}:{own.line} in {own.function}{code}"


def read_state(said: Mapping[str, Any]) -> RankState:
    """What `fleetrun.stacks` writes of one rank. Raises MALFORMED."""
    probe = said.get("probe") or {}
    peer = probe.get("peer")
    error = str(probe.get("error", ""))
    ending = bool(said["alive"]) and bool(error)  # it exits at the moment
    return RankState(
        rank=int(said["rank"]),
        title=str(said["title"]),
        role=str(said.get("role", "trainer")),
        node=str(said.get("node", "")),
        alive=bool(said["alive"]) and not ending,
        ok=bool(said.get("ok")),
        how=f"failed ({error.splitlines()[0]})" if ending else str(said.get("how", "")),
        symptom=bool(said.get("symptom")) or (ending and is_symptom(Exit(1), error)),
        said=str(said.get("said", "")),
        note=str(said.get("note", "")),
        answered=bool(probe),
        now=probe.get("time_ns", 0) / 1e9,
        stack=tuple(
            Frame(str(file), int(line or 0), str(function), str(code))
            for file, line, function, code in said.get("stack", ())
        ),
        groups={
            str(name): Group(tuple(map(int, each["ranks"])), int(each.get("entered", 0)))
            for name, each in probe.get("groups", {}).items()
            if name and "ranks" in each
        },
        calls=tuple(_call(each) for each in probe.get("calls", ()) if not each["point_to_point"]),
        peer=(str(peer[0]), int(peer[1])) if peer else None,
        served=_served(probe.get("ps")),
        arrivals={
            str(group): {int(number): int(entered) / 1e6 for number, entered in each}
            for group, each in probe.get("arrivals", {}).items()
        },
        ahead=float(said.get("ahead", 0.0)),
        unsure=float(said.get("unsure", 0.0)),
    )


def _served(said: Mapping[str, Any] | None) -> Served | None:
    if not said:
        return None
    return Served(
        server=int(said["server"]),
        what=str(said["what"]),
        ranks=tuple(map(int, said["trainers"])),
        why=str(said["why"]),
        seconds=float(said["seconds"]),
    )


def _call(said: Mapping[str, Any]) -> Call:
    return Call(
        group=str(said["group"]),
        operation=str(said["operation"]),
        number=int(said["number"]),
        sizes=" ".join(map(str, said["sizes"] or ())),
        dtypes=" ".join(map(str, said["dtypes"] or ())),
        entered=said["entered_ns"] / 1e9,
        done=bool(said["done"]),
    )
