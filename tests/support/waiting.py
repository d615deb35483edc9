"""Waiting for what the kernel does not tell: by condition, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def eventually(condition: Callable[[], object], within: float = 60.0) -> None:
    """Until the condition holds. Raises AssertionError after `within` seconds: a bound, not a measure."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.002)


def state_of(pid: int) -> str:
    """The letter of `ps`: R, S, T (stopped), Z (ended, not reaped); empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def ended(pid: int) -> bool:
    return state_of(pid) in ("", "Z")
