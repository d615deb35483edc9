"""Curves of many points and of many processes, made fit for a picture: thinned, and summed up in their
median. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleetrun.plots.course import Curve

_FEW = 12  # points of a curve


def thinned(curve: Curve, most: int) -> Curve:
    """A curve of about `most` points at most: the mean of neighbours. Gaps stay."""
    stride = math.ceil(len(curve.times) / most)
    if stride < 2:
        return curve
    thin = Curve(curve.role, curve.rank, broken=curve.broken)
    for start in range(0, len(curve.times), stride):
        piece = slice(start, start + stride)
        if any(map(_is_gap, curve.losses[piece], curve.paces[piece], curve.steps[piece])):
            thin.gap(curve.times[start])
        means = (_mean(each[piece]) for each in (curve.times, curve.losses, curve.paces, curve.steps))
        thin.point(*means)
    return thin


def middle(
    curves: Sequence[Curve], values: Sequence[Sequence[float]], bins: int
) -> tuple[list[float], list[float]]:
    """Times, and the median over curves of their means within each of so many equal spans of time; NaN where
    fewer than half of them have any.
    """
    times = [time for curve in curves for time in curve.times]
    if not times:
        return [], []
    begin, span = min(times), (max(times) - min(times)) / bins or 1.0
    cells: list[dict[int, list[float]]] = [{} for _ in range(bins + 1)]
    for number, (curve, ys) in enumerate(zip(curves, values, strict=True)):
        for time, y in zip(curve.times, ys, strict=True):
            if not math.isnan(y):
                cells[int((time - begin) / span)].setdefault(number, []).append(y)
    known = [[_mean(ys) for ys in cell.values()] for cell in cells]
    return (
        [begin + (number + 0.5) * span for number in range(len(cells))],
        [median(each) if len(each) > len(curves) / 2 else math.nan for each in known],
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(value / len(known) for value in known) if known else math.nan


def median(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN of none."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return math.nan
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def lonely(values: Sequence[float]) -> list[int]:
    """Where the points are that no line would show: between two gaps. All of them, where they are few."""
    there = [False, *(not math.isnan(value) for value in values), False]
    few = sum(there) < _FEW
    return [
        at - 1
        for at in range(1, len(there) - 1)
        if there[at] and (few or not (there[at - 1] or there[at + 1]))
    ]


def pace_of_steps(curve: Curve) -> list[float]:
    """Steps per second between a point and the one before it; NaN where that cannot be told."""
    paces = [math.nan]
    for number in range(1, len(curve.times)):
        steps = curve.steps[number] - curve.steps[number - 1]
        seconds = curve.times[number] - curve.times[number - 1]
        paces.append(steps / seconds if steps >= 0 and seconds > 0 else math.nan)
    return paces


def _is_gap(loss: float, pace: float, step: float) -> bool:
    return math.isnan(loss) and math.isnan(pace) and math.isnan(step)
