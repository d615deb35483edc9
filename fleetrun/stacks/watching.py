"""`--hang_timeout`: who watches, and who takes the stacks then."""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.pod.hangwatch import HangWatch
from fleetrun.pod.loop import Loop
from fleetrun.stacks.helper import Taker


def watch_for_hangs(
    loop: Loop, beside: set[int], limit: float, tell: Callable[[tuple[str, ...]], None]
) -> HangWatch:
    """`beside` are the processes beside the job, `limit` the seconds of silence; `tell` is `HangWatch`'s."""
    why = f"no sign of life for {limit:g} s (--hang_timeout)"
    return HangWatch(loop, limit, Taker(loop, beside, why).take, tell)
