"""The end of a log: its last lines, and the Python traceback in it. Any bytes, any length, newline at the end
or not.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_LOOK_BACK = 64 * 1024
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
        with path.open("rb") as file:
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
    return [
        _printable(line.rpartition(b"\r")[2] if line.rstrip(b"\r").count(b"\r") else line) for line in lines
    ]


def _printable(line: bytes) -> str:
    """One line as text that does nothing to a terminal."""
    text = line.rstrip(b"\r").decode("utf-8", "backslashreplace").replace("\t", "    ").lstrip("\0")
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def parse(lines: list[str]) -> Tail:
    """Find the last traceback, with those that it was raised from."""
    starts = [i for i, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not starts:
        return Tail(tuple(lines))
    end = _end_of_traceback(lines, starts[-1])
    first = starts[-1]
    for start in reversed(starts[:-1]):
        if not any(line.strip() in _CONTINUES for line in lines[start:first]):
            break
        first = start
    return Tail(tuple(lines[:first]), tuple(lines[first:end]), tuple(lines[end:]))


def _end_of_traceback(lines: list[str], start: int) -> int:
    """One past the line that names the exception, and its further indented or noted lines."""
    end = start + 1
    while end < len(lines) and (lines[end].startswith((" ", "  ")) or not lines[end]):
        end += 1
    return min(len(lines), end + 1)
