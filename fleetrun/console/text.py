"""Text for a person: wrapping, numbers and durations, the end of a log, control characters, and masked
secrets.

Everything here turns values or bytes into text; nothing here writes it.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from fleetrun.files import open_plain
from fleetrun.values import dataclass

# ---- Text into rows of a terminal, broken between words. Some characters take two columns, and some none.

_INDENT = "    "


def columns(text: str) -> int:
    """How many columns of a terminal `text` takes (Unicode's East Asian Width; marks take none)."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def wrapped(text: str, width: int) -> list[str]:
    """Rows of at most `width` columns, after the first indented; a longer word has a row of its own."""
    if columns(text) <= width:
        return [text]
    rows: list[str] = []
    row = text[: len(text) - len(text.lstrip(" "))]
    for gap, word in re.findall(r"(\s*)(\S+)", text):
        joint = "" if not row or row.isspace() else gap
        if joint and columns(row + joint + word) > width:
            rows.append(row)
            row, joint = _INDENT, ""
        row += joint + word
    return [*rows, row]


# ---- Numbers and lengths of time for a person: the foot of a terminal, lines, reports and tables write them
# alike. Pure.
#
# What is an option's value stays in the unit of the option: `--timeout 300 s`.

_UNITS = ("", "k", "M", "G", "T")


def count(number: float) -> str:
    """What is counted, such as steps, to the last one: `12,345`."""
    return f"{number:,}"


def loss(number: float) -> str:
    """Four digits that count: `0.02314`. What is no number says so."""
    return f"{number:.4g}"


def short(number: float) -> str:
    """A pace or an amount, in three digits or so: `512`, `12.3k`, `0.25`."""
    size = number
    for unit in _UNITS:
        if abs(size) < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{number:.3g}" if math.isfinite(number) else str(number)


def duration(seconds: float | None) -> str:
    """`45s`, `12m34s`, `1h02m`, `3d04h`; empty for what is not known."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def lasted(seconds: float) -> str:
    """The same within a sentence about what is over, where tenths of a second matter: `4.2 s`, `12m34s`."""
    return f"{max(0.0, seconds):.1f} s" if seconds < 60 else duration(seconds) or "?"


def clock(seconds: float) -> str:
    """The same where it ticks, so that it stays as wide: `0:00:07`, `2d 3:00:00`."""
    days, rest = divmod(int(max(0.0, seconds)), 86400)
    time = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {time}" if days else time


# ---- The end of a log: its last lines, and the Python traceback in it. Any bytes, any length, newline at the
# end or not.

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


# ---- Which variables look like secrets, and how they are shown. Everything that prints an environment goes
# through here.

MASK = "******"
_LOOKS_SECRET = (
    r"(?i)(?:^|_)(?:API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|PWD|CREDENTIALS?|AUTH|COOKIE|DSN)(?:_|\d|$)"
    r"|SECRET|PASSW|TOKEN|CREDENTIAL|APIKEY"
)
_NOT_SECRET = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM"})
_URL_PASSWORD = r"(://[^/\s:@]*:)[^/\s@]+@"


def masked(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy to show: values of secret-looking names are replaced, passwords inside URLs too."""
    return {
        name: MASK if _is_secret(name) and value else re.sub(_URL_PASSWORD, rf"\1{MASK}@", value)
        for name, value in environ.items()
    }


def _is_secret(name: str) -> bool:
    return name not in _NOT_SECRET and re.search(_LOOKS_SECRET, name) is not None
