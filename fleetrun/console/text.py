"""Text for a terminal and for reports: widths and wrapping, numbers and durations, control characters, the
end of a log, and masked secrets. These functions return text, and the caller writes it.

Patterns are strings that `re` compiles on first use, because each launch loads this module and few launches
use the patterns.
"""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from fleetrun.aliases import Environ, Strings
from fleetrun.envs.channels import ASIDE
from fleetrun.envs.variables import looks_secret
from fleetrun.files import last_bytes
from fleetrun.values import frozen

# ---- Widths. Some characters take two columns of a terminal, and some take none.

_INDENT = "    "


def columns(text: str) -> int:
    """Return the width of `text` in columns of a terminal, by Unicode's East Asian Width.

    Combining marks take no column.
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )


def cut(text: str, width: int) -> str:
    """Return the start of `text`, at most `width` columns wide."""
    if text.isascii():
        return text[: max(0, width)]
    used = 0
    for position, char in enumerate(text):
        used += columns(char)
        if used > width:
            return text[:position]
    return text


def wrapped(text: str, width: int) -> list[str]:
    """Break `text` between words into rows of at most `width` columns. All rows but the first are indented.

    A word longer than `width` gets a separate row.
    """
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


# ---- Numbers and durations. The value of an option keeps the unit of the option, as in `--timeout 300 s`.

_UNITS = ("", "k", "M", "G", "T")


def format_count(number: float) -> str:
    """Format all digits, for steps and other counts, such as `12,345`."""
    return f"{number:,}"


def format_loss(number: float) -> str:
    """Format four significant digits, such as `0.02314`. Also formats `nan` and `inf`."""
    return f"{number:.4g}"


def format_short(number: float) -> str:
    """Format about three digits, for rates and amounts, such as `512`, `12.3k` or `0.25`."""
    size = number
    for unit in _UNITS:
        if abs(size) < 999.5:
            return f"{size:.3g}{unit}"
        size /= 1000
    return f"{number:.3g}" if math.isfinite(number) else str(number)


def format_speed(samples: Iterable[float | None], step_seconds: float | None) -> str:
    """Format the sum of all available rates, such as `12.3k samples/s`.

    Without rates, return `4.1 steps/s`, or an empty string.
    """
    if known := [each for each in samples if each is not None]:
        return f"{format_short(sum(known))} samples/s"
    return f"{format_short(1 / step_seconds)} steps/s" if step_seconds else ""


def format_duration(seconds: float | None) -> str:
    """Format a duration, such as `45s`, `12m34s`, `1h02m` or `3d04h`. Empty for an unknown duration."""
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


def describe_duration(seconds: float) -> str:
    """Format a duration within a sentence, with tenths below a minute, such as `4.2 s` or `12m34s`."""
    return f"{max(0.0, seconds):.1f} s" if seconds < 60 else format_duration(seconds) or "?"


def format_date(moment: float) -> str:
    """Format seconds since the epoch as local date and time, or as `?` if out of range."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (ValueError, OverflowError, OSError):
        return "?"


def format_clock(seconds: float) -> str:
    """Format a duration with constant width, for a clock that is redrawn, such as `0:00:07`, `2d 3:00:00`."""
    days, rest = divmod(int(max(0.0, seconds)), 86400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock


# ---- Control characters. A script may print any bytes, but a terminal must not act on them.

_ESCAPES = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # colours, titles
_CONTROL = rb"\x7f|\xc2[\x80-\x9f]"
_IDEOGRAPHIC_SPACE = "\u3000"

_SUSPECT = rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]"
_SEQUENCE = (
    rb"\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI: colours, moves, modes. The end of the line may cut it off.
    rb"|\x1b[\]PX^_][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?"  # OSC and the other strings: titles, links
    rb"|\x1b[ -/]*[0-~]?"
    rb"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
    rb"|\xc2[\x80-\x9f]"  # the one-character forms (C1), in UTF-8
)
_KEPT = rb"\x1b\[(?:[0-9;:]*m|[012]?K)"  # colours, and erasing within the row
_CURSOR_UP = rb"\x1b\[[1-7]?A"
_COLOUR = r"(\x1b\[[0-9;:]*m)"
_NO_TEXT = r"\x1b\[[012]?K|[\x00-\x1f\x7f]"


def printable(line: str) -> str:
    """Return one line that has no effect on a terminal and can be encoded."""
    return "".join(
        char if char.isprintable() or char == _IDEOGRAPHIC_SPACE else char.encode("unicode_escape").decode()
        for char in re.sub(_ESCAPES, "", line).replace("\t", "    ")
    )


def printable_json(line: bytes) -> bytes:
    """Escape DEL and the C1 control characters in JSON. JSON itself requires only the escaping of C0."""
    return re.sub(_CONTROL, lambda found: b"\\u%04x" % ord(found.group().decode()), line)


def sanitize(data: bytes, *, cursor_up: bool = False) -> bytes:
    """Remove control sequences from the output of a script, except for colours and erasing within the row.

    With `cursor_up`, moves up by a few rows stay too, for a caller that draws those rows itself.
    """
    if not re.search(_SUSPECT, data):
        return data

    def kept(found: re.Match[bytes]) -> bytes:
        sequence = found.group()
        keep = re.fullmatch(_KEPT, sequence) or (cursor_up and re.fullmatch(_CURSOR_UP, sequence))
        return sequence if keep else b""

    return re.sub(_SEQUENCE, kept, data)


def visible_row(data: bytes, width: int) -> bytes:
    """Return the visible part of an unfinished line of sanitized output, in one row of `width` columns."""
    text = data.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").replace("\t", "    ")
    row, left = "", width
    for number, piece in enumerate(re.split(_COLOUR, text)):
        if number % 2 == 0:  # the odd pieces are colours
            piece = cut(re.sub(_NO_TEXT, "", piece), left)
            left -= columns(piece)
        row += piece
    return (f"{row}\x1b[0m" if "\x1b" in row else row).encode()


# ---- The end of a log, with the Python traceback in it.

_TAIL_BYTES = 64 * 1024
_READ_BYTES = 4 << 20  # one line may be much longer than the tail
_LONGEST_LINE = 16 * 1024
_TRACEBACK = "Traceback (most recent call last):"
_CONTINUES = (
    r"\s*(?:The above exception was the direct cause of the following exception"
    r"|During handling of the above exception, another exception occurred):|[ |]+\+(?:-\+)?-{16} \d"
)


@frozen
class Tail:
    """The end of a log, split at its last traceback."""

    before: Strings
    """Lines before the last traceback."""
    traceback: Strings = ()
    """Lines of the traceback. Empty if the log has none."""
    after: Strings = ()
    """Lines after the traceback."""


def read_tail(path: Path) -> Tail:
    """Read the last 64 KiB of `path` since the last restart, without the middle of long lines.

    The tail of an unreadable file is empty.
    """
    try:
        data, _ = last_bytes(path, _READ_BYTES)
    except OSError:
        return Tail(())
    lines: list[str] = []
    room = _TAIL_BYTES
    data = data.rstrip(b"\r\n\0 ")
    for line in reversed(data.rsplit(b"\n", _TAIL_BYTES) if data else ()):
        text = _decoded(line)
        if room <= 0 or text.startswith("--- fleetrun: restart "):
            break
        lines.append(text)
        room -= len(text) + 1
    return parse_tail(lines[::-1])


def _decoded(line: bytes) -> str:
    """Decode a printable line. Keep the final state of a progress bar, and the two ends of a long line."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2].lstrip(b"\0").decode("utf-8", "backslashreplace")
    if len(shown) > _LONGEST_LINE:
        shown = f"{shown[: _LONGEST_LINE // 2]} ... {shown[-_LONGEST_LINE // 2 :]}"
    return printable(shown)


_NATIVE_FRAME = (
    r"(?:\[rank\d+\]: ?)?"
    r"(?:frame #\d+: .*\(0x[0-9a-f]+ in .+\)$|Exception raised from .* \(most recent call first\):$)"
)


def without_native_frames(lines: Iterable[str]) -> list[str]:
    """Drop the C++ frames that torch adds to an exception, because dozens of rows hide its message."""
    found = re.compile(_NATIVE_FRAME).match  # compiled here, because only a failed run needs the pattern
    return [line for line in lines if not found(line)]


def parse_tail(lines: list[str]) -> Tail:
    """Find the last traceback, with the tracebacks that led to it. C++ frames are dropped."""
    lines = without_native_frames(lines)
    starts = [i for i, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    starts = [i for i in starts if not i or not re.match(ASIDE, lines[i - 1])] or starts
    if not starts:
        return Tail(tuple(lines))
    first = starts[-1]
    # Every line of the traceback may have a prefix, such as `[rank0]: ` of torch.distributed.
    prefix = lines[first].removesuffix(_TRACEBACK)
    if not prefix.strip(" |") or not "".join(lines[first + 1 : first + 2]).startswith(prefix):
        prefix = ""
    bare = [line.removeprefix(prefix) for line in lines]
    # Find the end of the line that names the exception, or of the whole exception group.
    end = first + 1
    while end < len(bare) and (bare[end].startswith(" ") or not bare[end]):
        end += 1
    end = min(len(bare), end + (bare[first][0] != " "))
    for start in reversed(starts[:-1]):
        if not any(re.match(_CONTINUES, line) for line in bare[start:first]):
            break
        first = start
    return Tail(tuple(lines[:first]), tuple(bare[first:end]), tuple(bare[end:]))


# ---- Secrets in environment variables. Every listing of an environment goes through `masked`.

MASK = "******"
_URL_PASSWORD = r"(://[^/\s:@]*:)[^/\s@]+@"


def masked(environ: Environ) -> dict[str, str]:
    """Return a copy for display, with masks for values whose names look secret and for passwords in URLs."""
    return {
        name: MASK if looks_secret(name) and value else re.sub(_URL_PASSWORD, rf"\1{MASK}@", value)
        for name, value in environ.items()
    }


_NUMBER = r"[\d.,]+(?:[eE][+-]?\d+)?%?(?![^\s\"',;&}\])\\])"
_NAMED = (
    r"(?<![\w-])(?P<dashes>-{0,2})(?P<name>[A-Za-z_][\w-]{0,80}+)"
    r"(?P<between>\\*[\"']?[ \t]{0,9}(?:=>|:=|[=:])[ \t]{0,9}|\\*[\"']?(?:,\s{1,40}|[ \t]{1,9}))"
    r"b?(?P<quote>\\*[\"']|)"
)
_PLAIN_VALUE = r"[^\s\"',;&}\])\\]+"
_NO_SECRET = rf"{_NUMBER}|(?:null|None|true|True|false|False|NaN)\b|[\[{{(]"
_KEYS = (
    r"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----(?:(?!-----)[\s\S])*(?:-----END [A-Z ]{0,20}PRIVATE KEY-----)?"
    r"|(?i:\b(?:bearer|basic) )[\w.~+/=-]{8,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\b(?:ghp|gho|ghs|github_pat|glpat|hf|sk|xox[abp])[-_][\w-]{16,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+"
)


def without_secrets(text: str, environ: Environ) -> str:
    """Mask secrets in a text before it leaves the node. JSON stays valid.

    Masked are passwords inside URLs, private keys, and tokens of known forms. Values that are assigned to a
    name that looks secret, or that follow an option with such a name, are masked unless they are numbers. The
    values of such names in `environ` are masked everywhere.
    """
    text = re.sub(_KEYS, MASK, re.sub(_URL_PASSWORD, rf"\1{MASK}@", text))
    text = _without_named(text)
    values = {value for name, value in environ.items() if looks_secret(name) and len(value) >= _SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, MASK)
    return text


def _without_named(text: str) -> str:
    pieces: list[str] = []
    done = 0
    for found in re.finditer(_NAMED, text):
        if found.start() < done or not looks_secret(found["name"].replace("-", "_")):
            continue
        assigned = found["between"].strip(" \t\n\\\"',") != ""
        if not assigned and not found["dashes"]:
            continue  # two words in a row
        start = found.end()
        end = _end_of_value(text, start, found["quote"])
        if end == start or (not assigned and text[start] == "-"):
            continue
        pieces += [text[done:start], MASK]
        done = end
    return "".join([*pieces, text[done:]])


def _end_of_value(text: str, start: int, quote: str) -> int:
    """Return the end of a secret value, or `start` if the value is not secret."""
    if not quote:
        plain = re.compile(_PLAIN_VALUE).match(text, start)
        return plain.end() if plain and not re.compile(_NO_SECRET).match(text, start) else start
    end = text.find(quote, start, start + _LONGEST_SECRET)
    line = text.find("\n", start, start + _LONGEST_SECRET)
    if end < 0 or 0 <= line < end:  # not closed
        end = line if line >= 0 else min(len(text), start + _LONGEST_SECRET)
    return end


_LONGEST_SECRET = 20_000  # characters
_SHORTEST = 6  # characters of a secret value, because shorter values occur in any text
