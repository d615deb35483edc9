"""Numbers and lengths of time for a person: the foot of a terminal, lines, reports and tables write them
alike. Pure.

What is an option's value stays in the unit of the option: `--timeout 300 s`.
"""

from __future__ import annotations

import math

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
