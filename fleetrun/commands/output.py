"""Lines, tables and JSON on the standard output, as a terminal or a pipe wants them. Knows no job."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from fleetrun.console.text import printable
from fleetrun.errors import LaunchError
from fleetrun.record.journal import plain

# ---- Lines and JSON on the standard output, as a terminal or a pipe wants them. Knows no job.


def room() -> int | None:
    """Columns of the terminal that the standard output is; None: as many as it takes."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    try:
        return max(20, os.get_terminal_size(sys.stdout.fileno()).columns or 80)
    except OSError:
        return 80


def print_lines(lines: Iterable[Text]) -> None:
    """Coloured on a terminal that can, not with NO_COLOR. Raises LaunchError when it cannot be written."""
    write("".join(f"{line}\n" for line in rendered(lines, sys.stdout is not None and sys.stdout.isatty())))


def rendered(lines: Iterable[Text], terminal: bool) -> list[str]:
    """Each with the colours that the terminal has, if it is one."""
    console = Console(file=io.StringIO(), force_terminal=terminal, highlight=False, emoji=False)
    found = []
    for line in lines:
        with console.capture() as captured:
            console.print(line, end="", soft_wrap=True)
        found.append(captured.get())
    return found


def print_json(value: Any) -> None:
    """One document on one line. Numbers that JSON does not have are strings: `nan`, `inf`, `-inf`."""
    write(json.dumps(plain(value), allow_nan=False) + "\n")


def write(text: str) -> None:
    """Raises BrokenPipeError when nobody reads any more, and LaunchError."""
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"cannot write to the standard output: {error.strerror}") from None


# ---- Columns of text that fit a width, and short amounts. Knows no job.

_GAP = 2
_LEAST = 24  # columns that the last column needs to be worth it


@dataclass(frozen=True, slots=True)
class Column:
    """The smallest `need` goes first when there is no room; 9 stays. `right` is for numbers; `rest` takes
    what room there is, and is cut there.
    """

    title: str
    need: int = 9
    right: bool = False
    rest: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What a person typed or a script printed may be in `text`: it is shown, and does nothing."""

    text: str
    style: str = ""


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> list[Text]:
    """Lines of at most `width` columns; without it as wide as they are. A column of which nothing is known
    does not show, but for those that stay.
    """
    cells = [[Text(printable(each.text), each.style) for each in row] for row in rows]
    titles = [Text(each.title, "bold") for each in columns]
    shown = [
        number
        for number, each in enumerate(columns)
        if each.need == 9 or any(row[number].plain for row in cells)
    ]
    widths = [
        max((line[number].cell_len for line in (titles, *cells)), default=0) for number in range(len(columns))
    ]
    shown = _fitting(columns, shown, widths, width)
    return [_line(columns, line, shown, widths, width) for line in (titles, *cells)]


def _fitting(
    columns: Sequence[Column], shown: list[int], widths: Sequence[int], width: int | None
) -> list[int]:
    def taken(numbers: list[int]) -> int:
        wide = [min(widths[each], _LEAST) if columns[each].rest else widths[each] for each in numbers]
        return sum(wide) + _GAP * (len(numbers) - 1)

    while width is not None and taken(shown) > width:
        least = min(shown, key=lambda each: columns[each].need)
        if columns[least].need == 9:
            break
        shown = [each for each in shown if each != least]
    return shown


def _line(
    columns: Sequence[Column],
    cells: Sequence[Text],
    shown: Sequence[int],
    widths: Sequence[int],
    width: int | None,
) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    for number in shown:
        if line:
            line.append(" " * _GAP)
        pad = " " * (widths[number] - cells[number].cell_len)
        line.append_text(Text(pad) + cells[number] if columns[number].right else cells[number])
        if not columns[number].right and number != shown[-1]:
            line.append(pad)
    return cut(line, width)


def filled(parts: Sequence[Text], width: int | None) -> list[Text]:
    """Parts with commas between them, in as few lines as it takes."""
    lines = [parts[0].copy()]
    for part in parts[1:]:
        if width is None or lines[-1].cell_len + 2 + part.cell_len < width:
            lines[-1] = Text.assemble(lines[-1], ", ", part)
        else:
            lines[-1] = Text.assemble(lines[-1], ",")
            lines.append(part.copy())
    return [cut(line, width) for line in lines]


def cut(line: Text, width: int | None) -> Text:
    """Not more than `width` columns of it."""
    line.rstrip()
    if width is not None and line.cell_len > width:
        line.truncate(width, overflow="ellipsis")
    return line


def size(count: float | None) -> str:
    """Bytes: `512M`, `1.2G`"""
    if count is None:
        return ""
    for unit in "BKMGT":
        if count < 999.5 or unit == "T":
            return f"{count:.1f}{unit}" if count < 9.95 and unit not in "BK" else f"{count:.0f}{unit}"
        count /= 1024
    raise AssertionError("T is the last")


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"
