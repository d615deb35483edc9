"""Lines and JSON on the standard output, as a terminal or a pipe wants them. Knows no job."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from fleetrun.control.server import plain
from fleetrun.errors import LaunchError


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
