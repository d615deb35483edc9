"""From results to the parameter servers' two tables: speed, and what it costs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from _ps_cases import AUC_WANTED, CASES, SERVER_CPU_WANTED, Case

OURS, PADDLE, ALONE = "fleetrun", "Paddle", "alone"
FAILED = "failed"
"""What a run has instead of figures."""

Samples = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]  # case -> side -> a result per run


def tables(samples: Samples, best_auc: float, best_loss: float) -> str:
    measured = [case for case in CASES if case.name in samples]
    notes = [case.note for case in measured if case.note]
    return "\n".join(
        [
            *_speed(samples, measured),
            "",
            f"A model that knows the truth has test AUC {best_auc:.4f} and log loss {best_loss:.4f}.",
            "",
            *_costs(samples, measured),
            *(f"\n{note}" for note in notes),
        ]
    )


def _speed(samples: Samples, cases: Sequence[Case]) -> list[str]:
    head = ("configuration", "wanted, examples/s", "**fleetrun**", "met", "Paddle", "ours / Paddle",
            "torch alone, per core")  # fmt: skip
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for case in cases:
        mine, theirs = (median(samples, case.name, side, "speed") for side in (OURS, PADDLE))
        factor = f" and {case.ratio:g} x Paddle" if case.ratio else ""
        cells = [
            case.title,
            f"{case.wanted:,.0f}{factor}" if case.wanted else "",
            f"**{_cell(samples, case.name, OURS, 'speed')}**",
            met(case, mine, theirs) if case.wanted else "",
            _cell(samples, case.name, PADDLE, "speed"),
            f"{mine / theirs:.2f}" if mine and theirs else "-",
            _cell(samples, case.name, ALONE, "speed"),
        ]
        lines.append(_line(cells))
    if any(case.name == "async" for case in cases):
        mine, theirs = (median(samples, "async", side, "server_cpu") for side in (OURS, PADDLE))
        said = "-" if mine is None else "yes" if mine <= SERVER_CPU_WANTED else "no"
        ratio = f"{mine / theirs:.2f}" if mine and theirs else "-"
        own, other = (_cell(samples, "async", side, "server_cpu") for side in (OURS, PADDLE))
        title = "server CPU, s per million examples, async 128x64"
        lines.append(_line([title, f"<= {SERVER_CPU_WANTED:g}", f"**{own}**", said, other, ratio, "-"]))
    return lines


def met(case: Case, mine: float | None, theirs: float | None) -> str:
    """Whether both limits hold: the absolute one, and the ratio where Paddle was measured."""
    if mine is None:
        return "no"
    return "yes" if mine >= case.wanted and (theirs is None or mine >= case.ratio * theirs) else "no"


_COSTS = (
    ("trainer_cpu", "trainer CPU, s/M"),
    ("server_cpu", "server CPU, s/M"),
    ("server_mb", "server peak, MB"),
    ("auc", "test AUC"),
    ("log_loss", "test log loss"),
)


def _costs(samples: Samples, cases: Sequence[Case]) -> list[str]:
    """For each metric ours and Paddle's side by side."""
    head = ["configuration", *(title for _, title in _COSTS), f"AUC not {AUC_WANTED} below"]
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for case in cases:
        cells = [
            " / ".join(_cell(samples, case.name, side, metric, spread=False) for side in (OURS, PADDLE))
            for metric, _ in _COSTS
        ]
        mine, theirs = (median(samples, case.name, side, "auc") for side in (OURS, PADDLE))
        said = "-" if mine is None or theirs is None else "yes" if mine >= theirs - AUC_WANTED else "no"
        lines.append(_line([case.title, *cells, said]))
    return lines


def median(samples: Samples, case: str, side: str, metric: str) -> float | None:
    values = _values(samples, case, side, metric)
    return statistics.median(values) if values else None


def _values(samples: Samples, case: str, side: str, metric: str) -> list[float]:
    return [result[metric] for result in samples.get(case, {}).get(side, []) if metric in result]


def _cell(samples: Samples, case: str, side: str, metric: str, *, spread: bool = True) -> str:
    values = _values(samples, case, side, metric)
    runs = samples.get(case, {}).get(side, [])
    failures = f"{failed} of {len(runs)} failed" if spread and (failed := _failures(runs)) else ""
    if not values:
        return failures or "-"
    figures = 4 if metric in ("auc", "log_loss") else 1 if metric.endswith("_cpu") else 0
    middle, low, high = (f"{v:,.{figures}f}" for v in (statistics.median(values), min(values), max(values)))
    said = middle if low == high or not spread else f"{middle} [{low}-{high}]"
    return f"{said}, {failures}" if failures else said


def _failures(runs: Sequence[Mapping[str, float]]) -> int:
    return sum(FAILED in run for run in runs)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
