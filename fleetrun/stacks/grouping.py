"""Equal stacks together, the odd one first; ranks in few words. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from fleetrun.stacks.taken import Taken
from fleetrun.stacks.traces import place

_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "deaf in the kernel"}


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that stand at the same place."""

    members: tuple[Taken, ...]

    @property
    def first(self) -> Taken:
        return self.members[0]

    @property
    def who(self) -> str:
        """`trainers 0-2, 5 and server 0`."""
        own: dict[tuple[str, str], list[int]] = {}
        for each in self.members:
            what = each.target.title.rpartition(" ")[0] or each.target.title
            own.setdefault((what, each.command if each.below else ""), []).append(each.target.rank)
        return " and ".join(_named(what, below, numbers) for (what, below), numbers in own.items())

    @property
    def where(self) -> str:
        """In a few words."""
        said = place(self.first.threads) if self.first.threads else self.first.note
        return f"{_STOPPED[self.first.state]}, in {said}" if self.first.state in _STOPPED else said


def groups(taken: Sequence[Taken]) -> list[Group]:
    """The smallest first: of many that wait for one, that one is told first; and before them what is stopped.
    Those of one size in the order in which they came.
    """
    together: dict[Hashable, list[Taken]] = {}
    for each in taken:
        together.setdefault(_key(each), []).append(each)
    found = (Group(tuple(each)) for each in together.values())
    return sorted(found, key=lambda group: (group.first.state not in _STOPPED, len(group.members)))


def _key(each: Taken) -> Hashable:
    """A stopped process is never the same as one that waits at that place."""
    stopped = each.state if each.state in _STOPPED else ""
    return each.below, stopped, each.note, tuple((thread.frames, thread.cut) for thread in each.threads)


def _named(what: str, below: str, numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    several = "s" if len(found) > 1 else ""
    name = f"{what}{several} {in_words(found)}"
    return f"{below} of {name}" if below else name


def in_words(numbers: Sequence[int]) -> str:
    """`0-2, 5` of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
