"""What a check comes to: a verdict, what was found, and what to do about it. Knows no check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    PASS = "pass"
    WARN = "warn"  # the job will run, perhaps slowly, or fail under more load
    FAIL = "fail"  # the job will not run


@dataclass(frozen=True, slots=True)
class Finding:
    """`check` is the name of what was looked at, `found` one line, `mend` what to do about it."""

    check: str
    verdict: Verdict
    found: str
    mend: str = ""


def passed(check: str, found: str) -> Finding:
    return Finding(check, Verdict.PASS, found)


def warned(check: str, found: str, mend: str) -> Finding:
    return Finding(check, Verdict.WARN, found, mend)


def failed(check: str, found: str, mend: str = "") -> Finding:
    return Finding(check, Verdict.FAIL, found, mend)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when something would keep the job from running."""
    return int(any(each.verdict is Verdict.FAIL for each in findings))


def size(amount: float) -> str:
    """Bytes as a person writes them, in powers of 1024: `64 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def figure(amount: float) -> str:
    """Three digits or more, and no exponent: `0.25`, `17.3`, `1180`."""
    return f"{amount:.3g}" if amount < 99.95 else f"{amount:.0f}"


def plural(number: int, word: str) -> str:
    """`1 process`, `2 processes`."""
    ending = "es" if word.endswith("s") else "s"
    return f"{number} {word}{'' if number == 1 else ending}"
