"""Stacks as lines of text. Whatever names processes gave themselves, a terminal shows letters. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fleetrun.stacks.grouping import Group
from fleetrun.stacks.processes import STATES
from fleetrun.stacks.taken import Taken
from fleetrun.stacks.traces import Thread

_FRAMES = 40
_MOST_PIDS = 8
_LONGEST_LINE = 120


def grouped(groups: Sequence[Group]) -> Iterator[str]:
    """For a person: what stands at the same place once, the odd one first."""
    for number, group in enumerate(groups):
        if number:
            yield ""
        count = f"{len(group.members)} processes" if len(group.members) > 1 else "1 process"
        yield clean(f"{group.who}: {count}, {_pids([each.pid for each in group.members])}")
        yield from stack(group.first)


def _pids(pids: Sequence[int]) -> str:
    shown = ", ".join(map(str, pids[:_MOST_PIDS]))
    more = f" and {len(pids) - _MOST_PIDS} more" if len(pids) > _MOST_PIDS else ""
    return f"pid{'s' if len(pids) > 1 else ''} {shown}{more}"


def stack(taken: Taken) -> Iterator[str]:
    """Of one process, the innermost call first."""
    if taken.state in ("D", "T", "t"):
        yield f"  {STATES[taken.state]}"
    if not taken.threads:
        yield clean(f"  {taken.command or 'a process'}: {taken.note}")
    for thread in taken.threads:
        yield clean(f"  {thread.name}, most recent call first:")
        yield from (clean(f"    {line}") for line in _frames(thread))


def _frames(thread: Thread) -> Iterable[str]:
    lines = [str(frame) for frame in thread.frames] or ["no Python runs in it"]
    cut = thread.cut
    if len(lines) > _FRAMES:
        tail = 5
        cut += len(lines) - _FRAMES
        lines = [*lines[: _FRAMES - tail], f"... {cut} more calls ...", *lines[-tail:]]
    elif cut:
        lines.append(f"... {cut} more calls ...")
    return lines


def clean(text: str) -> str:
    """One line of it that does nothing to a terminal and can be encoded."""
    cut = text if len(text) <= 10 * _LONGEST_LINE else f"{text[: 10 * _LONGEST_LINE]} ..."
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode()
        for char in cut
    )


def as_json(taken: Taken) -> dict[str, Any]:
    """For another program. Its strings are as they are."""
    return {
        "role": taken.target.role,
        "rank": taken.target.rank,
        "title": taken.title,
        "pid": taken.pid,
        "command": taken.command,
        "state": taken.state,
        "note": taken.note,
        "threads": [
            {
                "name": thread.name,
                "frames": [
                    {"function": each.function, "file": each.file, "line": each.line}
                    for each in thread.frames
                ],
                "cut": thread.cut,
            }
            for thread in taken.threads
        ],
    }
