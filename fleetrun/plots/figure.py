"""The plot of a job as a file.

It shows loss, speed, named values and tables over time. It marks restarts, hangs, and the start and end of
each process. matplotlib takes a second to import, so others import this module only when they plot.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import localtime, strftime
from typing import Any

import numpy as np
from matplotlib import colormaps, style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fleetrun.errors import UsageError
from fleetrun.files import replacing
from fleetrun.plots.course import LATE, LOSS, SAMPLES, STEPS, Course, Line, RoleAndRank, process_title
from fleetrun.record.goodput import Kind
from fleetrun.record.history import History

ENDINGS = (".png", ".svg", ".pdf")
FATES = {
    "completed": "lightsteelblue",
    "failed": "firebrick",
    "stopped by fleetrun": "darkgrey",
    "running": "lightskyblue",
    "end not known": "gainsboro",
}
"""Colours of processes by their ends."""
FEW = 8
"""Up to this many lines of a panel have a name each. More are thin lines from dark to bright."""
MOST_NAMED = 8
"""Most panels of named values."""
_POINTS = 2000  # of a line
_NAMED_ROWS = 24
_MANY_MARKS = 50  # more marks are paler
_WIDEST_LEGEND = 96  # letters
_LONGEST_LABEL = 34  # letters that fit beside a panel
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_FEWEST_UNITS = 3  # of the time axis
_WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Source Han Sans SC", "SimHei")
"""Fonts for Chinese and Japanese names, if they are installed."""
STYLE: Any = {
    "font.family": ["DejaVu Sans", *_WIDE_FONTS, "sans-serif"],
    "font.size": 9.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.xmargin": 0.0,
    "grid.color": "gainsboro",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
}
"""Settings for `matplotlib.style.context`, around `draw` and saving."""

At = Callable[[Any], Any]
"""Converts times to positions on the axis."""
Lines = Mapping[str, Line]
"""Lines of a panel by their names."""


def write_plot(history: History, to: Path, now: float | None, *, others: Sequence[Path] = ()) -> Course:
    """Write the plot to the file `to`, and return its data. Raises UsageError.

    `now` is given while the job runs. `others` are the event logs of the job's other nodes.
    """
    found = Course(history, now, others)
    with style.context(["default", STYLE]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides warnings about letters without a font
        title = f"{history.job}  ({history.pod})" if history.pod else history.job
        figure = draw(found, _one_line(title), _subtitle(history, found))
        try:
            with replacing(to) as aside:
                figure.savefig(aside, format=to.suffix[1:].lower(), dpi=150)
        except OSError as error:
            raise UsageError(f"cannot write {to}: {error.strerror}") from None
    return found


def _subtitle(history: History, found: Course) -> str:
    """Build the subtitle, such as `train.py · collective on node1 · 2 restarts · exit code 1: trainer 1
    failed`.
    """
    launch, over = history.launch, history.over
    parts = [str(launch["script"]).rpartition("/")[2]] if launch.get("script") else []
    parts.append(f"{launch.get('mode', 'job')} on {launch.get('host', '?')}")
    if count := len(found.restarts):
        parts.append("1 restart" if count == 1 else f"{count} restarts")
    if over is not None:
        reason = f": {over['reason']}" if over.get("code") and over.get("reason") else ""
        parts.append(f"exit code {over.get('code')}{reason}")
    else:
        parts.append("running" if history.running else "end not known")
    if not (found.curves or found.values or found.tables):
        parts.append("no process reported progress")
    return _one_line("  ·  ".join(parts))


def _one_line(text: str, longest: int = 140) -> str:
    clean = "".join(each if each.isprintable() else " " for each in text)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


def draw(course: Course, title: str, subtitle: str) -> Figure:
    """Draw the figure in memory."""
    duration = course.end - course.begin
    scale, unit = next((each for each in _UNITS if duration >= _FEWEST_UNITS * each[0]), _UNITS[-1])

    def at(times: Any) -> Any:
        return (np.array(times) - course.begin) / scale

    curves = _curves(course)
    bars = [_spent] * (Kind.STEPS in course.seconds) + [_lives]
    heights = [2.2] * len(curves) + [0.5, min(5.0, max(0.9, 0.24 * len(course.lives) + 0.5))][-len(bars) :]
    figure = Figure(figsize=(10.0, 1.3 + sum(heights)), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    for panel, (label, lines) in zip(panels, curves, strict=False):
        _draw_lines(panel, label, lines, at)
    for panel, fill in zip(panels[len(curves) :], bars, strict=True):
        fill(panel, course, at)
    for name, times, dashes in (("restart", course.restarts, "--"), ("hang", course.hangs, ":")):
        look = {
            "linestyle": dashes,
            "color": "black",
            "alpha": max(0.1, min(0.7, _MANY_MARKS / (len(times) or 1))),
        }
        for panel in panels if times else ():
            panel.vlines(at(times), 0, 1, transform=panel.get_xaxis_transform(), label=name, **look)
    panels[-1].set_xlim(0, max(duration / scale, 1e-3))
    panels[-1].set_xlabel(f"{unit} since {strftime('%Y-%m-%d %H:%M:%S', localtime(course.begin))}")
    figure.suptitle(f"{title}\n{subtitle}", x=0.01, ha="left", fontsize=10)
    meanings = [panel.get_legend_handles_labels() for panel in panels[-len(bars) :]]
    handles = {label: handle for found in meanings for handle, label in zip(*found, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower left", ncols=5)
    return figure


def _curves(course: Course) -> list[tuple[str, Lines]]:
    """Return the title and the lines of each panel that has lines."""
    titles = [each for each in (LOSS, SAMPLES, STEPS, LATE) if each in course.curves]
    if SAMPLES in titles and STEPS in titles:
        titles.remove(STEPS)
    tables = []
    for title, lines in course.tables.items():
        largest = sorted(lines, key=lambda table: -lines[table][-1][1])[:FEW]
        note = f"\n{FEW} largest of {len(lines)} tables" if len(lines) > FEW else ""
        tables.append((title + note, {table: lines[table] for table in sorted(largest)}))
    return [
        *((title, _by_title(course.curves[title])) for title in titles),
        *named_panels(course)[:MOST_NAMED],
        *tables,
    ]


def _by_title(lines: Mapping[RoleAndRank, Line]) -> Lines:
    return {process_title(*key): line for key, line in sorted(lines.items())}


def named_panels(course: Course) -> list[tuple[str, Lines]]:
    """Return a panel for each named value, with a line for each process.

    Names with the same words before a / share a panel.
    """
    panels: dict[str, dict[str, Line]] = {}
    for name, by_process in course.values.items():
        title, _, end = name.rpartition("/") if "/" in name.strip("/") else (name, "", "")
        for process, line in _by_title(by_process).items():
            label = f"{end}, {process}" if end and len(by_process) > 1 else end or process
            panels.setdefault(_one_line(title, _LONGEST_LABEL), {})[label] = line
    return list(panels.items())


def _draw_lines(panel: Axes, label: str, lines: Lines, at: At) -> None:
    panel.set_ylabel(label)
    count, shown = len(lines), []
    for row, line in enumerate(lines.values()):
        # each of few lines is thinner than the line below it, so that equal lines look like stripes
        few = {"color": f"C{row}", "linewidth": 1.2 + 0.8 * (count - row - 1)}
        many = {"color": colormaps["viridis"](0.9 * row / count), "linewidth": 0.7}
        shown.append(_draw_line(panel, line, at, many if count > FEW else few))
    names = [_one_line(name, 40) for name in lines]
    step = math.ceil(count / FEW)
    panel.legend(
        shown[::step], names[::step], loc="lower left", bbox_to_anchor=(0, 0.98), borderaxespad=0.1,
        ncols=max(1, min(FEW, _WIDEST_LEGEND // (4 + max(map(len, names))))),
    )  # fmt: skip
    if label == LOSS and 0 < 50 * panel.dataLim.y0 < panel.dataLim.y1:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
    elif label in (SAMPLES, STEPS, LATE):
        panel.update_datalim([(0, 0)])
        panel.set_ylim(bottom=0)


def _draw_line(panel: Axes, line: Line, at: At, look: dict[str, Any]) -> Artist:
    """Draw a line, with dots for single points, and a cross at the top for the first NaN or infinity."""
    times, values = np.array(line).T
    times = at(times)
    for broken in np.flatnonzero(np.isinf(values))[:1]:
        panel.plot(
            times[broken],
            0.97,
            "x",
            color=look["color"],
            transform=panel.get_xaxis_transform(),
            clip_on=False,
        )
    known = np.isfinite(values)
    kept = ~known | (np.arange(len(values)) % math.ceil(len(values) / _POINTS) == 0)
    around = np.pad(known[kept], 1)
    alone = np.flatnonzero(around[1:-1] & ~(around[:-2] | around[2:]))
    (drawn,) = panel.plot(
        times[kept], np.where(known, values, math.nan)[kept], marker=".", markevery=alone.tolist(), **look
    )
    return drawn


def _spent(panel: Axes, course: Course, at: At) -> None:
    """Draw the use of the time as one bar."""
    whole = sum(course.seconds.values())
    for kind, seconds in course.seconds.items():
        times = at([(begin, end) for each, begin, end in course.spans if each is kind])
        name = f"{kind} {100 * seconds / whole:.0f} %" if seconds >= 0.005 * whole else None
        colour = colormaps["Set3"](list(Kind).index(kind))
        panel.broken_barh([(begin, end - begin) for begin, end in times], (0, 1), color=colour, label=name)
    panel.set_yticks([0.5], ["time"])


def _lives(panel: Axes, course: Course, at: At) -> None:
    """Draw a bar for each attempt of each process. A cross marks the end of a failed attempt."""
    lives = [(row, life) for row, each in enumerate(course.lives.values()) for life in each]
    for fate, colour in FATES.items():
        found = [(row, *at([life.begin, life.end])) for row, life in lives if life.fate == fate]
        if found:
            rows, begins, ends = np.array(found).T
            panel.barh(rows, ends - begins, 0.7, begins, color=colour, label=fate)
            if fate == "failed":
                panel.plot(ends, rows, "kx", clip_on=False)
    titles = [course.titles.get(name, name) for name in course.lives]
    step = math.ceil(len(titles) / _NAMED_ROWS) or 1
    panel.set_yticks(range(0, len(titles), step), titles[::step])
    panel.set_ylim(max(1, len(titles)) - 0.4, -0.6)
