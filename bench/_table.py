"""From samples to the markdown table: cells with median and range, ours next to the peers. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from _peers import OURS
from _rows import ROWS, Result, Row, Samples

BEGIN = "<!-- bench/launch.py --write: begin -->"
END = "<!-- bench/launch.py --write: end -->"


def table(samples: Samples, launchers: Sequence[str]) -> str:
    """`launchers` are the columns; ours comes first. In a peer's cell, after the dot: ours / theirs."""
    others = [name for name in launchers if name != OURS]
    lines = [_line(["what", "unit", "wanted", f"**{OURS}**", "met", *others])]
    lines.append(_line(["---", *["---:"] * (len(others) + 4)]))
    for row in ROWS:
        if row.scenario not in samples:
            continue
        cells = [_cell(row, samples, name) for name in others]
        ours = f"**{_cell(row, samples, OURS, compare=False)}**"
        lines.append(_line([row.title, _unit(row), row.wanted, ours, _met(row, samples), *cells]))
    return "\n".join(lines)


def put_between_marks(text: str, new: str) -> str:
    """`text` with `new` between BEGIN and END. Raises ValueError when they are not there."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the file has no marks {BEGIN} ... {END}")
    return f"{head}{BEGIN}\n{new}\n{END}{tail}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _unit(row: Row) -> str:
    return {"left": "processes", "of": "runs", "code": ""}.get(row.unit, row.unit)


def _values(row: Row, samples: Samples, launcher: str) -> list[float | str]:
    results: list[Result] = samples.get(row.scenario, {}).get(launcher, [])
    found = (result.get(row.metric, "failed" if "error" in result else None) for result in results)
    return [value for value in found if value is not None]


def _numbers(values: Sequence[float | str]) -> list[float]:
    return [value for value in values if isinstance(value, float)]


def _cell(row: Row, samples: Samples, launcher: str, *, compare: bool = True) -> str:
    values = _values(row, samples, launcher)
    if not values:
        return "-"
    numbers = _numbers(values)
    parts = [_numeric(row, numbers)] if numbers else []
    words = Counter(value for value in values if isinstance(value, str))
    parts += [word if len(words) == 1 and not numbers else f"{word} ({n}x)" for word, n in words.items()]
    mine = _numbers(_values(row, samples, OURS))
    if compare and mine and numbers and row.unit in ("ms", "s", "MB", "%") and statistics.median(numbers) > 0:
        ratio = statistics.median(mine) / statistics.median(numbers)
        parts[0] += f" · {ratio:.2f}" if ratio >= 0.01 else " · < 0.01"
    return ", ".join(parts)


def _numeric(row: Row, numbers: Sequence[float]) -> str:
    if row.unit == "of":
        return f"{sum(numbers):.0f} of {len(numbers)}"
    if row.unit == "code":
        codes = Counter(int(number) for number in numbers).most_common()
        return str(codes[0][0]) if len(codes) == 1 else ", ".join(f"{code} ({n}x)" for code, n in codes)
    low, high = _number(min(numbers)), _number(max(numbers))
    if row.unit == "left":
        return low if low == high else f"{low} to {high}"
    middle = _number(statistics.median(numbers))
    return middle if low == high else f"{middle} [{low}-{high}]"


def _number(value: float) -> str:
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _met(row: Row, samples: Samples) -> str:
    values = _values(row, samples, OURS)
    limit = row.limit(samples) if callable(row.limit) else row.limit
    if limit is None or not values:
        return ""
    numbers = _numbers(values)
    if len(numbers) < len(values):
        return "no"
    return _judgement(row, numbers, limit)


def _judgement(row: Row, numbers: Sequence[float], limit: float) -> str:
    if row.unit == "code" or row.unit == "of":
        return "yes" if all(number == limit for number in numbers) else "no"
    figure = max(numbers) if row.unit == "left" else statistics.median(numbers)
    said = "yes" if figure <= limit else "no"
    return f"{said} ({_number(limit)})" if callable(row.limit) else said
