"""How far trainers may go: a test lets them go on bit by bit, so that they are never through before it."""

from __future__ import annotations

import time
from pathlib import Path


def give(step_limit: Path, steps: int) -> None:
    """From now on trainers may make so many steps."""
    aside = step_limit.with_name(f"{step_limit.name}.aside")
    aside.write_text(str(steps))
    aside.replace(step_limit)


def wait(step_limit: Path, step: int) -> None:
    """Until this step may be made; the first is 0."""
    while not step_limit.exists() or int(step_limit.read_text()) <= step:
        time.sleep(0.002)
