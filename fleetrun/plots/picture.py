"""A picture of a record as a file: read, drawn, and put in its place whole."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fleetrun.errors import UsageError
from fleetrun.plots.course import Course, course
from fleetrun.record.history import History, events_of

KINDS = ("png", "svg", "pdf")
_WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Source Han Sans SC", "SimHei")
"""Fonts for names that the first font has no letters for, where they are installed."""


def check_name(name: str) -> Path:
    """Where to. Raises UsageError for a name that says no kind of picture, or no place for one."""
    path = Path(name)
    if path.suffix.lower().removeprefix(".") not in KINDS:
        kinds = ", ".join(f".{kind}" for kind in KINDS)
        raise UsageError(f"--output {name}: the name must end in one of {kinds}")
    if path.is_dir():
        raise UsageError(f"--output {name} is a folder")
    if not path.parent.is_dir():
        raise UsageError(f"--output {name}: there is no folder {path.parent}")
    return path


def paint(history: History, to: Path, now: float | None, *, dpi: int = 150) -> Course:
    """Write the picture; what is in it. `now` is given while the job runs. Raises UsageError."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of its caches
    import matplotlib

    found = course(events_of(history.path), now)
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that no font has is a box
        from fleetrun.plots.figure import STYLE, draw

        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        matplotlib.rcParams["font.family"] = ["DejaVu Sans", *_fonts(), "sans-serif"]
        figure = draw(found, _title(history), _subtitle(history, found))
        kind = to.suffix.lower().removeprefix(".")
        try:
            _put(to, lambda aside: figure.savefig(aside, format=kind, dpi=dpi))
        except OSError as error:
            raise UsageError(f"the picture cannot be written to {to}: {error.strerror}") from None
    return found


def _put(to: Path, write: Callable[[Path], object]) -> None:
    """A reader sees the old picture or the new one, never a part."""
    fd, name = tempfile.mkstemp(prefix=f".{to.name}.", dir=to.parent)
    os.close(fd)
    aside = Path(name)
    try:
        write(aside)
        aside.chmod(0o666 & ~_umask())
        aside.replace(to)
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _umask() -> int:
    """It can be asked for only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _fonts() -> list[str]:
    from matplotlib import font_manager

    there = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in _WIDE_FONTS if name in there]


def _title(history: History) -> str:
    return _one_line(f"{history.job}  ({history.pod})" if history.pod else history.job)


def _subtitle(history: History, found: Course) -> str:
    """`collective on node1 · 2 restarts · exit code 1: trainer 1 failed`"""
    launch = history.launch
    said = [f"{launch.get('mode', 'job')} on {launch.get('host', '?')}"]
    count = len(found.restarts)
    if count:
        said.append("1 restart" if count == 1 else f"{count} restarts")
    if found.code is not None:
        reason = f": {found.reason}" if found.code and found.reason else ""
        said.append(f"exit code {found.code}{reason}")
    elif history.running:
        said.append("running")
    else:
        said.append("its end is not known")
    if not found.curves:
        said.append("no process reported progress")
    return _one_line("  ·  ".join(said))


def _one_line(text: str, longest: int = 140) -> str:
    clean = "".join(each if each.isprintable() else " " for each in text)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"
