"""Merge the stacks of many ranks into one tree.

Common calls appear once, and the tree branches where ranks part. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetrun.aliases import Strings
from fleetrun.envs.settings.parsing import ranks_in_words
from fleetrun.probe.states import Frame, RankState

MOST_LINES = 40


def merged(states: Sequence[RankState]) -> Strings:
    """Show the position of each rank, outermost calls first. The smallest branch comes first.

    Only the innermost library frame is shown. Library frames below a recognized collective are hidden.
    """
    together: dict[Strings, list[RankState]] = {}
    for state in states:
        if state.role == "ps" and state.alive and not (state.stack or state.note):
            continue  # servers are examined when a trainer waits for them
        together.setdefault(_path(state), []).append(state)
    lines = list(_lines(list(together.items()), 0, ""))
    more = len(lines) - MOST_LINES
    return tuple([*lines[:MOST_LINES], f"and {more} lines more"] if more > 0 else lines)


_Paths = Sequence[tuple[Strings, list[RankState]]]


def _path(state: RankState) -> Strings:
    """Return the path from the outermost call to the current activity of the rank."""
    call = state.waits_in
    what = f"in {call.title}" if call is not None else _other(state)
    frames = [each for each in state.stack if not each.installed]
    known = call is not None or (state.served is not None and state.alive)
    inner = () if known or not state.stack or not state.stack[0].installed else state.stack[:1]
    path = [_words(each) for each in [*reversed(frames), *inner]]
    if not path and not what:
        what = "at an unknown place"
    return (*path, what) if what else tuple(path)


def _other(state: RankState) -> str:
    if not state.alive:
        return state.how
    return f"in {state.served.what}" if state.served is not None and not state.note else state.note


def _words(frame: Frame) -> str:
    code = f": {frame.code}" if frame.code else ""
    return f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line}){code}"


def _lines(paths: _Paths, depth: int, indent: str) -> Iterator[str]:
    for there in _parts(paths, depth):
        end = _common(there, depth)
        ranks = _titles([state for _, states in there for state in states])
        yield f"{indent}{ranks}: {_calls(there, depth, end)}"
        deeper = [(path, states) for path, states in there if len(path) > end]
        yield from _lines(deeper, end, indent + "  ")


def _parts(paths: _Paths, depth: int) -> list[_Paths]:
    """Split paths by their call at this depth, the smallest branch first."""
    parts: dict[str, list[tuple[Strings, list[RankState]]]] = {}
    for path, states in paths:
        parts.setdefault(path[depth], []).append((path, states))
    return sorted(parts.values(), key=_order)


def _order(part: _Paths) -> tuple[int, int]:
    ranks = [state.rank for _, states in part for state in states]
    return len(ranks), min(ranks)


def _common(there: _Paths, depth: int) -> int:
    """Return the depth up to which all paths are the same."""
    first = there[0][0]
    end = depth
    while end < len(first) and all(len(path) > end and path[end] == first[end] for path, _ in there):
        end += 1
    return end


def _calls(there: _Paths, depth: int, end: int) -> str:
    """Format calls. If there are several, only the innermost shows the code of its line."""
    *outer, inner = there[0][0][depth:end]
    return " > ".join([*(each.partition(": ")[0] for each in outer), inner])


def _titles(states: Sequence[RankState]) -> str:
    """Name the ranks, such as `trainers 0, 2-7`, and their node if the job has several."""
    nodes = {state.node for state in states}
    where = f" on {nodes.pop()}" if len(nodes) == 1 and states[0].node else ""
    together: dict[str, list[int]] = {}
    for state in states:
        together.setdefault(state.title.rpartition(" ")[0], []).append(state.rank)
    return " and ".join(_named(what, sorted(ranks)) for what, ranks in together.items()) + where


def _named(what: str, ranks: Sequence[int]) -> str:
    return f"{what}{'s' if len(ranks) > 1 else ''} {ranks_in_words(ranks)}"
