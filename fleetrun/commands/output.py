"""Print lines, tables and JSON on standard output, for a terminal or a pipe."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from fleetrun.aliases import Document, Fields, Strings
from fleetrun.console.text import printable
from fleetrun.envs.settings.parsing import either
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen
from fleetrun.record.journal import plain


def output_width() -> int | None:
    """Return the width of the terminal at stdout, or None if stdout is not a terminal.

    Lines then have any width.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    try:
        return max(20, os.get_terminal_size(sys.stdout.fileno()).columns or 80)
    except OSError:
        return 80


def print_lines(lines: Iterable[Text]) -> None:
    """Print lines, with colours if the terminal supports them and NO_COLOR is not set. Raises LaunchError."""
    write_lines(rendered(lines, sys.stdout is not None and sys.stdout.isatty()))


def rendered(lines: Iterable[Text], terminal: bool) -> list[str]:
    """Render each line as text, with colour codes for a terminal that supports them."""
    console = Console(file=io.StringIO(), force_terminal=terminal, highlight=False, emoji=False)
    found = []
    for line in lines:
        with console.capture() as captured:
            console.print(line, end="", soft_wrap=True)
        found.append(captured.get())
    return found


def print_json(value: object) -> None:
    """Print one document on one line. JSON lacks `nan`, `inf` and `-inf`, so they are written as strings."""
    write(json.dumps(plain(value), allow_nan=False) + "\n")


def picked(document: Fields, *names: str) -> Document:
    """Return the fields with these names, with None for missing fields."""
    return {name: document.get(name) for name in names}


def write_lines(lines: Iterable[str]) -> None:
    """Write lines, with the errors of `write`."""
    write("".join(f"{line}\n" for line in lines))


def write(text: str) -> None:
    """Write text to stdout.

    Raises BrokenPipeError if the reader has closed the pipe, LaunchError for other failures.
    """
    if sys.stdout is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"cannot write to standard output: {error.strerror}") from None


def output_path(name: str, endings: Strings) -> Path:
    """Return the path for --output.

    Raises UsageError if the name lacks one of the endings, or cannot be written.
    """
    path = Path(name)
    if not path.name.lower().endswith(endings) or path.name in endings:
        raise UsageError(f"--output {name}: the name must end in {either(endings)}")
    if path.is_dir():
        raise UsageError(f"--output {name} is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"--output {name}: the directory {path.parent} does not exist")
    return path


def print_file(to: Path, what: str) -> None:
    """Print the absolute path of a file, usable from any directory. Describe the file as `what` on stderr."""
    remark(what)
    write(f"{printable(str(to.absolute()))}\n")


def remark(text: str) -> None:
    """Print a remark on stderr, outside the answer on stdout."""
    click.echo(text, err=True)


# ---- Tables.

_GAP = 2
_STAYS = 9  # priority of columns that are never dropped
_SMALLEST_REST = 24  # smallest useful width of a `rest` column, in columns of the terminal


@frozen
class Column:
    """A column of a table."""

    title: str
    priority: int = _STAYS
    """If the width is too small, columns with the lowest priority are dropped first. Priority 9 is never
    dropped.
    """
    right: bool = False
    """Align to the right, for numbers."""
    rest: bool = False
    """Take the remaining width, and cut off text beyond it."""
    least: int = 0
    """Smallest width, in columns of the terminal."""


def columns(*formats: str) -> list[Column]:
    """Return the columns of a table from their titles, such as `STEP:>8.6` or `LAST LINE:1*`.

    After a colon, a title may have `>` for numbers, a priority, a dot with the smallest width, and `*` for
    the rest of the width.
    """
    found = []
    for each in formats:
        title, _, form = each.partition(":")
        right, rest = form.startswith(">"), form.endswith("*")
        priority, _, least = form.strip(">*").partition(".")
        found.append(Column(title, int(priority or _STAYS), right, rest, int(least or 0)))
    return found


Cell = str | tuple[str, str]
"""A text, or a text and its style. The text may come from a user or a script, see `cell_text`."""


def cell_text(cell: Cell) -> Text:
    """Return the text of a cell. Control characters become visible and have no effect."""
    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(printable(text), style)


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> list[Text]:
    """Lay out a line of titles and one line per row, at most `width` columns wide (None: unlimited).

    Empty columns are dropped unless their priority is 9.
    """
    cells = [list(map(cell_text, row)) for row in rows]
    titles = [Text(each.title, "bold") for each in columns]
    shown = [
        number
        for number, each in enumerate(columns)
        if each.priority == _STAYS or any(row[number].plain for row in cells)
    ]
    widths = [
        max((each.least, *(line[number].cell_len for line in (titles, *cells))))
        for number, each in enumerate(columns)
    ]
    shown = _columns_that_fit(columns, shown, widths, width)
    return [_line(columns, line, shown, widths, width) for line in (titles, *cells)]


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table as wide as the terminal. Raises LaunchError."""
    print_lines(table(columns, rows, output_width()))


def _columns_that_fit(
    columns: Sequence[Column], shown: list[int], widths: Sequence[int], width: int | None
) -> list[int]:
    def taken(numbers: list[int]) -> int:
        wide = [min(widths[each], _SMALLEST_REST) if columns[each].rest else widths[each] for each in numbers]
        return sum(wide) + _GAP * (len(numbers) - 1)

    while width is not None and taken(shown) > width:
        least = min(shown, key=lambda each: columns[each].priority)
        if columns[least].priority == _STAYS:
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
    """Join the parts by commas, in as few lines as possible."""
    lines = [parts[0].copy()]
    for part in parts[1:]:
        if width is None or lines[-1].cell_len + 2 + part.cell_len < width:
            lines[-1] = Text.assemble(lines[-1], ", ", part)
        else:
            lines[-1] = Text.assemble(lines[-1], ",")
            lines.append(part.copy())
    return [cut(line, width) for line in lines]


def cut(line: Text, width: int | None) -> Text:
    """Cut the line off after `width` columns."""
    line.rstrip()
    if width is not None and line.cell_len > width:
        line.truncate(width, overflow="ellipsis")
    return line


def size(count: float | None) -> str:
    """Format bytes, such as `512M` or `1.2G`."""
    if count is None:
        return ""
    for unit in "BKMGT":
        if count < 999.5 or unit == "T":
            return f"{count:.1f}{unit}" if count < 9.95 and unit not in "BK" else f"{count:.0f}{unit}"
        count /= 1024
    raise AssertionError("T is the last")


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"
