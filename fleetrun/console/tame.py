"""What a script prints, without what a terminal would do of it: above a footer text may have colours and move
within its row, and no more. Knows no terminal.
"""

from __future__ import annotations

import re

from fleetrun.console.footer import cut
from fleetrun.console.wrapping import columns

_SUSPECT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")
_SEQUENCE = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]?"  # CSI: colours, moves, modes; cut off by the end of the line too
    rb"|\x1b[\]PX^_][^\x07\x1b\r\n]*(?:\x07|\x1b\\)?"  # titles, links, and whatever else has a text
    rb"|\x1b[ -/]*[0-~]?"
    rb"|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]"
    rb"|\xc2[\x80-\x9f]"  # the same by one character, in UTF-8
)
_KEPT = re.compile(rb"\x1b\[(?:[0-9;:]*m|[012]?K)")  # colours; erasing within the row
_UP = re.compile(rb"\x1b\[[1-7]?A")


def tame(data: bytes, *, up: bool = False) -> bytes:
    """Lines without everything but colours, and erasing within a row. With `up` moves to a row above stay
    too, a few: they are for whoever draws those rows.
    """
    if not _SUSPECT.search(data):
        return data

    def kept(found: re.Match[bytes]) -> bytes:
        sequence = found.group()
        return sequence if _KEPT.fullmatch(sequence) or (up and _UP.fullmatch(sequence)) else b""

    return _SEQUENCE.sub(kept, data)


_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_NO_TEXT = re.compile(r"\x1b\[[012]?K|[\x00-\x1f\x7f]")


def row(data: bytes, width: int) -> bytes:
    """What one row of a terminal shows of an unfinished line of tame text: so many columns at most."""
    text = data.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").replace("\t", "    ")
    made, left = "", width
    for number, piece in enumerate(_COLOUR.split(text)):
        if number % 2 == 0:
            piece = cut(_NO_TEXT.sub("", piece), left)
            left -= columns(piece)
        made += piece
    return (f"{made}\x1b[0m" if "\x1b" in made else made).encode()
