"""Shorten tracebacks for the author of a script.

The frames of the script stay, and each run of library frames becomes one line. All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from fleetrun.aliases import Strings
from fleetrun.values import frozen

_FRAME = re.compile(r'([ |]*)File "([^"]+)", line (\d+)(?:, in (.+))?$')
_REPEATED = re.compile(r" *\[Previous line repeated \d+ more times?\]$")
_STANDARD_LIBRARY = re.compile(r".*/lib(?:64)?/python3[^/]*/(?:lib-dynload/)?")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")
_CELL = re.compile(r".*/ipykernel_\d+/\d+\.py")
"""File name of a notebook cell in Jupyter, which its user never sees."""
_OURS = str(Path(__file__).parents[2])
_MOST_NAMES = 3


@frozen
class Frame:
    """One frame of a traceback."""

    lines: Strings
    path: str
    line: str
    function: str
    library: str
    """The package or module of the frame. Empty for the script's own code."""


def frames_of(traceback: Sequence[str]) -> Iterator[Frame | str]:
    """Yield the frames of a traceback and the lines between them, in order."""
    position = 0
    while position < len(traceback):
        found = _FRAME.match(traceback[position])
        if found is None:
            yield traceback[position]
            position += 1
            continue
        end = position + 1
        while end < len(traceback) and _continues(traceback[end], found[1]):
            end += 1
        path = found[2]
        yield Frame(tuple(traceback[position:end]), path, found[3], found[4] or "", library_of(path))
        position = end


def _continues(line: str, indent: str) -> bool:
    deeper = line.startswith(f"{indent} ") and not _FRAME.match(line)
    return deeper or _REPEATED.match(line) is not None


def library_of(path: str) -> str:
    """Return the library of an installed file or of a file of Python, such as `torch` or `runpy`.

    Empty for other files.
    """
    if path.startswith("<frozen "):
        return path[len("<frozen ") :].rstrip(">").partition(".")[0]
    inside = _inside(path)
    return "" if inside is None else inside.partition("/")[0].removesuffix(".py")


def _inside(path: str) -> str | None:
    """Return the path of a library's file within the directory that holds all libraries."""
    for folder in (_INSTALLED, _STANDARD_LIBRARY):
        if found := folder.match(path):
            return path[found.end() :]
    inside = path.removeprefix(f"{_OURS}/")
    ours = inside != path and inside.startswith(("trainers/", "fleetrun/"))
    return inside if ours and not inside.startswith("trainers/examples/") else None


def folded(traceback: Sequence[str]) -> list[str]:
    """Fold the library frames of a traceback. A traceback without a frame of the script stays as it is."""
    parts = list(frames_of(traceback))
    if not any(isinstance(each, Frame) and not each.library for each in parts):
        return list(traceback)
    lines: list[str] = []
    run: list[Frame] = []
    for each in [*parts, ""]:
        if isinstance(each, Frame) and each.library:
            run.append(each)
            continue
        if run:
            lines.append(_folded(run))
            run = []
        lines += [each] if isinstance(each, str) else each.lines
    return lines[:-1]


def _folded(run: Sequence[Frame]) -> str:
    names = list(dict.fromkeys(each.library for each in run))
    more = " and others" if len(names) > _MOST_NAMES else ""
    last = run[-1]
    where = f": {last.function} in {_inside(last.path)}:{last.line}" if _inside(last.path) else ""
    number = "1 frame" if len(run) == 1 else f"{len(run)} frames"
    return f"  ... {number} of {', '.join(names[:_MOST_NAMES])}{more}{where}"


def place_of(traceback: Sequence[str]) -> str:
    """Return the last place in the script, such as `train.py:36`.

    If all frames are in libraries, return the last frame.
    """
    frames = [each for each in frames_of(traceback) if isinstance(each, Frame)]
    own = [each for each in frames if not each.library]
    if not frames:
        return ""
    last = (own or frames)[-1]
    if _CELL.match(last.path):
        return f"line {last.line} of the cell of {last.function}"
    return f"{_short(last.path)}:{last.line}"


def _short(path: str) -> str:
    """Return the path below the current directory. For other paths, return only the name."""
    try:
        inside = path.removeprefix(f"{Path.cwd()}/")
    except OSError:  # the directory was deleted
        inside = path
    return inside.rpartition("/")[2] if inside.startswith("/") else inside
