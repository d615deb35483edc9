"""The end of a log: its last lines, and the Python traceback in it. Any bytes, any length, newline at the end
or not.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from fleetrun.frozen import dataclass
from fleetrun.plainfile import open_plain

_LOOK_BACK = 64 * 1024
_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # colours, titles
_CONTROL = re.compile(rb"\x7f|\xc2[\x80-\x9f]")
_WIDE_SPACE = "\u3000"  # of Chinese text
_TRACEBACK = "Traceback (most recent call last):"
_CONTINUES = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)


@dataclass(frozen=True, slots=True)
class Tail:
    """`before` are the lines ahead of the traceback, `traceback` its lines (empty: none found), `after` what
    followed.
    """

    before: tuple[str, ...]
    traceback: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def read_tail(path: Path) -> Tail:
    """The last 64 KiB of `path`, taken apart. A file that cannot be read has an empty tail."""
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOOK_BACK))
            data = file.read(_LOOK_BACK)
    except OSError:
        return Tail(())
    lines = _decoded(data, cut=size > _LOOK_BACK)
    last_start = max(
        (i for i, line in enumerate(lines) if line.startswith("--- fleetrun: restart ")), default=-1
    )
    return parse(lines[last_start + 1 :])


def _decoded(data: bytes, *, cut: bool) -> list[str]:
    """Lines of text. A piece cut out of a file may begin within a line, and within a character."""
    lines = data.split(b"\n")
    if cut and len(lines) > 1:
        lines = lines[1:]
    while lines and not lines[-1].strip(b"\r\0 "):
        lines.pop()
    shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)  # of a progress bar its last state
    return [printable(line.lstrip(b"\0").decode("utf-8", "backslashreplace")) for line in shown]


def printable(line: str) -> str:
    """One line as text that does nothing to a terminal and can be encoded."""
    return "".join(
        char if char.isprintable() or char == _WIDE_SPACE else char.encode("unicode_escape").decode()
        for char in re.sub(_ESCAPES, "", line).replace("\t", "    ")
    )


def printable_json(line: bytes) -> bytes:
    """The same JSON without control characters, of which JSON itself escapes only those of ASCII."""
    return _CONTROL.sub(lambda found: b"\\u%04x" % ord(found.group().decode()), line)


def parse(lines: list[str]) -> Tail:
    """Find the last traceback, with those that it was raised from."""
    starts = [i for i, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not starts:
        return Tail(tuple(lines))
    first = starts[-1]
    prefix = _prefix(lines, first)
    bare = [line.removeprefix(prefix) for line in lines]
    end = _end_of_traceback(bare, first)
    for start in reversed(starts[:-1]):
        if not any(line.strip() in _CONTINUES for line in bare[start:first]):
            break
        first = start
    return Tail(tuple(lines[:first]), tuple(bare[first:end]), tuple(lines[end:]))


def _prefix(lines: list[str], start: int) -> str:
    """What stands before every line of a traceback: torch.distributed prints them with `[rank0]: `."""
    prefix = lines[start].removesuffix(_TRACEBACK)
    return prefix if start + 1 < len(lines) and lines[start + 1].startswith(prefix) else ""


def _end_of_traceback(lines: list[str], start: int) -> int:
    """One past the line that names the exception."""
    end = start + 1
    while end < len(lines) and (lines[end].startswith(" ") or not lines[end]):
        end += 1
    return min(len(lines), end + 1)
