"""The plot of a job as a file.

It shows loss, speed, named values and tables over time. It marks restarts, hangs, and the start and end of
each process. matplotlib takes a second to import, so functions import it only when they use it.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import localtime, strftime
from typing import TYPE_CHECKING, Any

from fleetrun.errors import UsageError
from fleetrun.files import replacing
from fleetrun.frozen import frozen
from fleetrun.plots.course import (
    Course,
    Curve,
    Fate,
    Series,
    course,
    known_paces,
    lonely,
    median,
    middle,
    pace_of_steps,
    thinned,
    thinned_series,
)
from fleetrun.record.goodput import Kind
from fleetrun.record.history import History, events_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    _Fill = Callable[[Axes, "_View"], None]

ENDINGS = (".png", ".svg", ".pdf")
_WIDE_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Source Han Sans SC", "SimHei")
"""Fonts for Chinese and Japanese names, if they are installed."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5C00", "#000000")
"""The colour-blind safe palette of Okabe and Ito, with a darker yellow for white paper."""

FATES = {
    Fate.OK: "#A9B8C9",
    Fate.RUNNING: "#CFE3F5",
    Fate.STOPPED: "#C9C9C9",
    Fate.FAILED: "#B3001B",
    Fate.UNKNOWN: "#EEEEEE",
}
SPENT = {
    Kind.STEPS: "#B5DDA8",
    Kind.WAITING: "#EFEAF7",
    Kind.START: "#DDD3EE",
    Kind.IMPORTS: "#C3B3E0",
    Kind.RENDEZVOUS: "#9C86CB",
    Kind.SETUP: "#B9A0E8",
    Kind.CHECKPOINTS: "#F7DFA5",
    Kind.AGAIN: "#7FA873",
    Kind.HANGS: "#EFA9A9",
    Kind.STALL: "#F6CFCF",
    Kind.RESTARTS: "#6E6E6E",
    Kind.END: "#E4E4E4",
}
"""Colours of areas. PALETTE has the colours of lines, so that each colour has one meaning."""
_BEFORE_STEPS = (Kind.WAITING, Kind.START, Kind.IMPORTS, Kind.RENDEZVOUS, Kind.SETUP)
_INK, _FAINT, _RESTART, _HANG = "#333333", "#DDDDDD", "#555555", "#1A1A1A"
_SHADE = "#F3F0F8"  # the start-up, behind the lines
_WIDEST_LINE, _THINNEST_LINE = 4.2, 1.3
_LETTER = 0.0085  # the width of a letter as a share of a panel
FEW = len(PALETTE)
"""Up to this many processes have a colour and a name each. More processes are thin lines from dark to bright,
with a median.
"""
_SLOW = 0.9
_POINTS = 2000
_BINS = 240
_NAMED_ROWS = 24
_MOST_LOOKS = 480
MOST_NAMED = 8
"""Most panels of named values."""
# more marks than the first number are pale, more than the second are thinned out
_MANY_MARKS, _MOST_MARKS = 50, 500
_HEIGHT = 2.2  # of a panel, in inches
_LONGEST_LABEL = 34  # letters that fit beside it
_WIDEST_LEGEND = 96  # letters
_UNITS = ((180.0, 1.0, "seconds"), (3 * 3600.0, 60.0, "minutes"), (3 * 86400.0, 3600.0, "hours"))

STYLE: Any = {
    "font.size": 9.0,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
}
"""Settings for `matplotlib.rc_context`, around `draw` and saving."""


def write_plot(history: History, to: Path, now: float | None, *, others: Sequence[Path] = ()) -> Course:
    """Write the plot to the file `to`, and return its data. Raises UsageError.

    `now` is given while the job runs. `others` are the event logs of the job's other nodes.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # hides messages about its caches
    import matplotlib

    found = course(events_of(history.path), now, [events_of(each) for each in others])
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hides warnings about letters without a font
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        matplotlib.rcParams["font.family"] = ["DejaVu Sans", *_fonts(), "sans-serif"]
        title = f"{history.job}  ({history.pod})" if history.pod else history.job
        figure = draw(found, _one_line(title), _subtitle(history, found))
        kind = to.suffix.lower().removeprefix(".")
        try:
            with replacing(to) as aside:
                figure.savefig(aside, format=kind, dpi=150)
        except OSError as error:
            raise UsageError(f"cannot write {to}: {error.strerror}") from None
    return found


def _fonts() -> list[str]:
    from matplotlib import font_manager

    there = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in _WIDE_FONTS if name in there]


def _subtitle(history: History, found: Course) -> str:
    """Build the subtitle, such as `train.py · collective on node1 · 2 restarts · exit code 1: trainer 1
    failed`.
    """
    launch = history.launch
    parts = [str(launch["script"]).rpartition("/")[2]] if launch.get("script") else []
    parts.append(f"{launch.get('mode', 'job')} on {launch.get('host', '?')}")
    count = len(found.restarts)
    if count:
        parts.append("1 restart" if count == 1 else f"{count} restarts")
    if found.code is not None:
        reason = f": {found.reason}" if found.code and found.reason else ""
        parts.append(f"exit code {found.code}{reason}")
    elif history.running:
        parts.append("running")
    else:
        parts.append("end not known")
    if not (found.curves or found.values or found.tables):
        parts.append("no process reported progress")
    return _one_line("  ·  ".join(parts))


def _one_line(text: str, longest: int = 140) -> str:
    clean = "".join(each if each.isprintable() else " " for each in text)
    return clean if len(clean) <= longest else clean[: longest - 1] + "…"


@frozen
class _View:
    """The job, its thinned curves with their colours, and the seconds per unit of the time axis."""

    course: Course
    curves: Sequence[Curve]
    colours: Sequence[str]
    scale: float

    def at(self, time: float) -> float:
        """Return the position of a time on the axis."""
        return (time - self.course.begin) / self.scale

    @property
    def whole(self) -> float:
        """The position of the end."""
        return self.at(self.course.end)


def draw(course: Course, title: str, subtitle: str) -> Figure:
    """Draw the figure in memory."""
    from matplotlib.figure import Figure

    curves = [thinned(each, _POINTS) for _, each in sorted(course.curves.items())]
    upper: list[_Fill] = [panel for panel in (_loss, _pace) if curves and (panel is _pace or course.lossy)]
    upper += [_late] if course.late else []
    named = [(*panel, "") for panel in named_panels(course)[:MOST_NAMED]] + _of_tables(course)
    rows = max(1, len(course.lives))
    upper += [partial(_series, title=title, lines=lines, which=which) for title, lines, which in named]
    upper += [_spent] if any(span.kind is Kind.STEPS for span in course.spans) else []
    lives = min(5.0, max(0.9, 0.24 * rows + 0.5))
    heights: dict[_Fill, float] = {_late: 1.4, _spent: 0.45}
    ratios = [*(heights.get(panel, _HEIGHT) for panel in upper), lives]
    figure = Figure(figsize=(10.0, 1.3 + sum(ratios)), layout="constrained")
    panels = list(figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0])
    scale, unit = _scale(course.end - course.begin)
    view = _View(course, curves, _colours(len(curves)), scale)
    for panel, fill in zip(panels, upper, strict=False):
        fill(panel, view)
    _lives(panels[-1], view)
    for panel in panels:
        _marks(panel, view)
    if len(panels) > 1:
        _shade_start(panels[:-1], view)
    began = strftime("%Y-%m-%d %H:%M:%S", localtime(course.begin))
    panels[-1].set_xlabel(f"{unit} since {began}")
    panels[-1].set_xlim(0, max(view.whole, 1e-3))
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)
    has_legend = 0 < len(curves) <= FEW  # one line below the subtitle
    panels[0].set_title(subtitle, loc="left", fontsize=9, color=_RESTART, pad=20 if has_legend else None)
    _legends(figure, panels, view)
    return figure


def _loss(panel: Axes, view: _View) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    panel.set_ylabel("loss")
    curves = view.curves
    _lines(panel, view, curves, [each.losses for each in curves], view.colours)
    known = [loss for each in curves for loss in each.losses if not math.isnan(loss)]
    if known and min(known) > 0 and max(known) > 50 * min(known):
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    for curve, colour in zip(curves, view.colours, strict=True):
        if curve.broken:  # at the top of the panel, because nan has no position
            first = view.at(curve.broken[0])
            panel.plot(
                [first], [0.97], "x", color=colour, markersize=7, markeredgewidth=2,
                transform=panel.get_xaxis_transform(), clip_on=False,
            )  # fmt: skip


def _pace(panel: Axes, view: _View) -> None:
    paced, curves = view.course.paced, view.curves
    series = [known_paces(each) if paced else pace_of_steps(each) for each in curves]
    values = [each.values for each in series]
    panel.set_ylabel("samples per second" if paced else "steps per second")
    _lines(panel, view, series, values, view.colours)
    if len(curves) > FEW:
        _name_slowest(panel, curves, values)
    known = [pace for each in values for pace in each if not math.isnan(pace)]
    panel.set_ylim(bottom=0, top=1.08 * max(known, default=0.0) or 1.0)


def _name_slowest(panel: Axes, curves: Sequence[Curve], values: Sequence[Sequence[float]]) -> None:
    """Name a straggler, a process that is clearly slower than the median."""
    paces = [median(each) for each in values]
    slowest = min((pace for pace in paces if not math.isnan(pace)), default=math.nan)
    if slowest < _SLOW * median(paces):
        curve = curves[paces.index(slowest)]
        panel.annotate(
            curve.title, (0.995, slowest), xycoords=("axes fraction", "data"), xytext=(0, -8),
            textcoords="offset points", ha="right", va="top",
        )  # fmt: skip


def named_panels(course: Course) -> list[tuple[str, dict[str, Series]]]:
    """Return a panel for each named value, with a line for each process.

    Names with the same words before a / share a panel.
    """
    panels: dict[str, dict[str, Series]] = {}
    for name, by_process in course.values.items():
        title, _, line = name.rpartition("/") if "/" in name.strip("/") else (name, "", "")
        for (role, rank), series in sorted(by_process.items()):
            process = Curve(role, rank).title
            several = len(by_process) > 1
            label = f"{line}, {process}" if line and several else line or process
            panels.setdefault(title, {})[label] = series
    return list(panels.items())


def _of_tables(course: Course) -> list[tuple[str, dict[str, Series], str]]:
    """Return panels of tables as `named_panels`, each with a note on the tables shown."""
    panels = []
    for title, by_table in course.tables.items():
        largest = sorted(by_table, key=lambda table: -max(by_table[table].last, 0))[:FEW]
        which = f"the {FEW} largest of {len(by_table)} tables" if len(by_table) > FEW else ""
        panels.append((title, {table: by_table[table] for table in sorted(largest)}, which))
    return panels


def _series(panel: Axes, view: _View, *, title: str, lines: dict[str, Series], which: str) -> None:
    panel.set_ylabel(_one_line(title, _LONGEST_LABEL))
    thin = [thinned_series(each, _POINTS) for each in lines.values()]
    _lines(panel, view, thin, [each.values for each in thin], _colours(len(thin)))
    if 1 < len(lines) <= FEW:
        names = [_one_line(name, 40) for name in lines]
        wide = 4 + max(map(len, names))
        panel.legend(
            panel.lines, names, loc="lower left", bbox_to_anchor=(0, 0.98), title=which or None,
            ncols=max(1, min(FEW, _WIDEST_LEGEND // wide)), alignment="left", title_fontsize=9,
            borderpad=0.2, handlelength=1.2, columnspacing=1.2,
        )  # fmt: skip


def _lines(
    panel: Axes, view: _View, curves: Sequence[Curve | Series], values: Sequence[Sequence[float]],
    colours: Sequence[str],
) -> None:  # fmt: skip
    many = len(curves) > FEW
    widths = [0.7] * len(curves) if many else widths_of(len(curves))
    for curve, ys, colour, width in zip(curves, values, colours, widths, strict=True):
        xs = list(map(view.at, curve.times))
        dots = lonely(ys)
        panel.plot(
            xs, ys, color=colour, linewidth=width, alpha=0.55 if many else 1.0,
            marker="." if dots else None, markevery=dots, markersize=max(4, 2 * width),
        )  # fmt: skip
    if many:
        longest = max((len(each.times) for each in curves), default=0)
        times, ys = middle(curves, values, max(1, min(_BINS, 2 * longest // 3)))  # a report in each span
        xs = list(map(view.at, times))
        panel.plot(xs, ys, color="white", linewidth=3.2)
        panel.plot(xs, ys, color="black", linewidth=1.6)
    panel.margins(x=0, y=0.08)


def widths_of(count: int) -> list[float]:
    """Return the widths of lines.

    Each line is thinner than the line below it, so that equal lines look like stripes.
    """
    most = min(_WIDEST_LINE, _THINNEST_LINE + 1.1 * (count - 1))
    return [most - number * (most - _THINNEST_LINE) / max(1, count - 1) for number in range(count)]


def _shade_start(panels: Sequence[Axes], view: _View) -> None:
    """Shade the time before the first step in each panel, and name it in the first panel if there is room."""
    if not any(span.kind is Kind.STEPS for span in view.course.spans):
        return
    end = 0.0
    for span in view.course.spans:
        if span.kind not in _BEFORE_STEPS:
            break
        end = view.at(span.end)
    for panel in panels:
        panel.axvspan(0, end, facecolor=_SHADE, zorder=0)
    if view.whole and end / view.whole > _LETTER * (len(Kind.START) + 2):
        panels[0].text(
            end / 2, 0.95, str(Kind.START), ha="center", va="top", fontsize=8, color=_RESTART,
            transform=panels[0].get_xaxis_transform(),
        )  # fmt: skip


def _late(panel: Axes, view: _View) -> None:
    """Draw a cell for each rank and measurement.

    Its colour is the share of time for which others waited for the rank.
    """
    from matplotlib.ticker import MaxNLocator

    late = view.course.late
    looks = late[:: math.ceil(len(late) / _MOST_LOOKS) or 1]
    times = [view.at(time) for time, _ in looks]
    count = 1 + max((rank for _, shares in looks for rank in shares), default=0)
    first = max(0.0, times[0] - (times[1] - times[0] if len(times) > 1 else 60.0 / view.scale))
    shares = [[100 * found.get(rank, 0.0) for _, found in looks] for rank in range(count)]
    edges = [number - 0.5 for number in range(count + 1)]
    cells = panel.pcolormesh([first, *times], edges, shares, cmap="Oranges", vmin=0, vmax=100)
    panel.set_ylabel("rank")
    panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.invert_yaxis()
    panel.grid(visible=False)
    bar = panel.figure.colorbar(cells, ax=panel, label="waited for, %", aspect=12, pad=0.01)
    bar.outline.set_visible(False)


def _spent(panel: Axes, view: _View) -> None:
    """Draw the use of the time as one bar."""
    for kind in dict.fromkeys(span.kind for span in view.course.spans):
        spans = [span for span in view.course.spans if span.kind is kind]
        bars = [(view.at(span.begin), (span.end - span.begin) / view.scale) for span in spans]
        panel.broken_barh(bars, (-0.4, 0.8), facecolor=SPENT[kind], linewidth=0)
        for begin, width in bars:
            if width / (view.whole or 1.0) > _LETTER * (len(kind) + 2):
                dark = kind is Kind.RESTARTS
                panel.text(
                    begin + width / 2, 0, str(kind), ha="center", va="center", fontsize=8,
                    color="white" if dark else _INK,
                )  # fmt: skip
    panel.set_yticks([0], ["time"])
    panel.set_ylim(-0.5, 0.5)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False)


def _lives(panel: Axes, view: _View) -> None:
    """Draw a bar for each attempt of each process. A cross marks the end of a failed attempt."""
    from matplotlib.ticker import MaxNLocator

    course = view.course
    names = list(course.lives)
    failures: list[tuple[float, int]] = []
    for row, name in enumerate(names):
        dense = max(len(names), len(course.lives[name]) / 4) > _NAMED_ROWS
        for fate in dict.fromkeys(life.fate for life in course.lives[name]):
            lives = [life for life in course.lives[name] if life.fate is fate]
            spans = [(view.at(life.begin), (life.end - life.begin) / view.scale) for life in lives]
            panel.broken_barh(
                spans, (row - 0.35, 0.7), facecolor=FATES[fate], linewidth=0.6,
                edgecolor=FATES[fate] if dense else "white",
                hatch="///" if fate is Fate.UNKNOWN else None,
            )  # fmt: skip
            if fate is Fate.FAILED:
                failures += [(begin + width, row) for begin, width in spans]
    if failures:  # an empty line would be at the corner of the picture
        panel.plot(
            [end for end, _ in failures], [row for _, row in failures], "x", color="black", markersize=5,
            markeredgewidth=1.4, clip_on=False,
        )  # fmt: skip
    step = math.ceil(len(names) / _NAMED_ROWS) or 1
    panel.set_yticks(range(0, len(names), step), [course.titles.get(each, each) for each in names[::step]])
    panel.set_ylim(max(1, len(names)) - 0.4, -0.6)
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False, axis="y")
    panel.xaxis.set_major_locator(MaxNLocator(nbins=9, min_n_ticks=3))


def _marks(panel: Axes, view: _View) -> None:
    for times, colour, style in ((view.course.restarts, _RESTART, "--"), (view.course.hangs, _HANG, ":")):
        shown = times[:: math.ceil(len(times) / _MOST_MARKS) or 1]
        for time in shown:
            panel.axvline(
                view.at(time), color=colour, linestyle=style, linewidth=1.2, zorder=1.5,
                alpha=min(1.0, _MANY_MARKS / len(shown)),
            )  # fmt: skip


def _legends(figure: Figure, panels: Sequence[Axes], view: _View) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    mark = partial(Line2D, [], [])

    course, curves = view.course, view.curves
    fates = [
        fate for fate in Fate if any(life.fate is fate for each in course.lives.values() for life in each)
    ]
    marks: list[Any] = [Patch(color=FATES[fate], label=str(fate)) for fate in fates]
    if course.restarts:
        marks.append(mark(color=_RESTART, linestyle="--", label="restart"))
    if course.hangs:
        marks.append(mark(color=_HANG, linestyle=":", label="hang"))
    if any(each.broken for each in curves):
        marks.append(mark(color=_INK, linestyle="", marker="x", label="loss is nan or inf"))
    if any(span.kind is Kind.STEPS for span in course.spans):
        whole = sum(span.end - span.begin for span in course.spans)
        for kind in Kind:
            seconds = sum(span.end - span.begin for span in course.spans if span.kind is kind)
            if seconds >= 0.005 * whole:
                label = f"{kind} {100 * seconds / whole:.0f} %"
                marks.append(Patch(color=SPENT[kind], label=label))
    if len(curves) > FEW:
        marks.append(mark(color="black", linewidth=1.6, label="median"))
        _ladder(figure, panels, view)
    elif curves:
        named = [
            mark(color=colour, label=curve.title) for curve, colour in zip(curves, view.colours, strict=True)
        ]
        panels[0].legend(
            handles=named, loc="lower left", bbox_to_anchor=(0, 0.99), ncols=FEW, borderpad=0.2,
            handlelength=1.2, columnspacing=1.2, borderaxespad=0.1,
        )  # fmt: skip
    figure.legend(handles=marks, loc="outside lower left", ncols=6)


def _ladder(figure: Figure, panels: Sequence[Axes], view: _View) -> None:
    """Draw the colours of the ranks as a scale beside all panels, so that their time axes stay aligned."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    ranks = [each.rank for each in view.curves]
    shades = ScalarMappable(Normalize(min(ranks), max(ranks)), ListedColormap(list(view.colours)))
    pad = 0.12 if view.course.late else 0.01
    bar = figure.colorbar(shades, ax=list(panels), label="rank", aspect=40, pad=pad)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(nbins=8, integer=True)
    bar.update_ticks()


def _colours(count: int) -> list[str]:
    if count <= FEW:
        return list(PALETTE[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = colormaps["cividis"]
    return [to_hex(shades(0.92 * number / (count - 1))) for number in range(count)]


def _scale(seconds: float) -> tuple[float, str]:
    return next(((scale, unit) for most, scale, unit in _UNITS if seconds < most), (86400.0, "days"))
