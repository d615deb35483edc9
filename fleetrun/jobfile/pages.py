"""Job files as they are read from disk: regular files of a bounded size, TOML, with those that they include.
Knows no key but `include`.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetrun.errors import UsageError
from fleetrun.jobfile.positions import nearest, positions

LARGEST = 256 << 10
MOST_FILES = 32

_NOTHING_SAID = "fleetrun init writes a job file to begin with."


@dataclass(frozen=True, slots=True)
class Page:
    """One file: `name` as messages call it, its folder, what is in it, and on which line."""

    name: str
    folder: Path
    tree: dict[str, Any]
    lines: dict[tuple[str, ...], int] = field(repr=False)

    def where(self, path: tuple[str, ...]) -> str:
        """`job.toml:7`."""
        return f"{shown(self.name)}:{nearest(self.lines, path)}"


def shown(name: str) -> str:
    """A name out of a file, without what a terminal would obey."""
    return name if name.isprintable() else ascii(name)[1:-1]


def pages(name: str, origin: str = "--config") -> list[Page]:
    """The file and all that it includes, the weakest first: each file counts more than those that it
    includes, and of these a later one more than an earlier one.

    Raises UsageError, which names the file, and the line where there is one.
    """
    found: list[Page] = []
    _read_with_included(name, origin, (), found)
    return found


def _read_with_included(name: str, origin: str, outer: tuple[str, ...], found: list[Page]) -> None:
    if "\0" in name:
        raise UsageError(f"{origin} {name!r} is no file name")
    real = os.path.realpath(name)
    if real in outer:
        raise UsageError(f"{origin}: {shown(name)} includes itself")
    if len(outer) + len(found) >= MOST_FILES:
        raise UsageError(f"{origin}: more than {MOST_FILES} job files include each other")
    page = read(name, origin)
    for other in _included(page):
        path = str(Path(name).parent / other)
        _read_with_included(path, f"{page.where(('include',))}: include", (*outer, real), found)
    found.append(page)


def _included(page: Page) -> list[str]:
    value = page.tree.get("include", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"{page.where(('include',))}: include must be a list of file names",
            hint='include = ["common.toml"]',
        )
    return names


def read(name: str, origin: str = "--config") -> Page:
    """One file. Raises UsageError."""
    text = _text(name, origin)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(_no_toml(shown(name), str(error), text)) from None
    except (RecursionError, ValueError) as error:  # brackets without end; a number of thousands of digits
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{origin} {shown(name)} cannot be read: {why}") from None
    return Page(name, Path(name).absolute().parent, tree, positions(text))


def _no_toml(name: str, error: str, text: str) -> str:
    match = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", error)
    if match is None:
        return f"{name}: no valid TOML: {error}"
    line = match[1] or str(max(1, len(text.splitlines())))
    what = error[: match.start()]
    return f"{name}:{line}: no valid TOML: {what[:1].lower()}{what[1:]}"


def _text(name: str, origin: str) -> str:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hold us up
    except OSError as error:
        hint = _NOTHING_SAID if isinstance(error, FileNotFoundError) else None
        raise UsageError(f"{origin} {shown(name)} cannot be read: {error.strerror}", hint=hint) from None
    try:
        data = _bytes(fd, f"{origin} {shown(name)}")
    except OSError as error:
        raise UsageError(f"{origin} {shown(name)} cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(data) > LARGEST:
        raise UsageError(f"{origin} {shown(name)} is too large for a job file: more than {LARGEST >> 10} KiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{shown(name)}:{line}: it is not UTF-8") from None


def _bytes(fd: int, what: str) -> bytes:
    kind = os.fstat(fd).st_mode
    if not stat.S_ISREG(kind):
        raise UsageError(f"{what} is {'a directory' if stat.S_ISDIR(kind) else 'no regular file'}")
    data = b""
    while len(data) <= LARGEST and (more := os.read(fd, LARGEST + 1)):
        data += more
    return data
