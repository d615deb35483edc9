"""All ranks leave a loop at the same step: what one has heard, all hear, at the same call. Knows one small
all_reduce; leaves signals and files to `notice`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from trainers.collective.gathering import cpu_group
from trainers.notice import Notice


def combined(told: Sequence[tuple[str, float] | None], now: float) -> Notice:
    """One notice of what the ranks have heard, (why, seconds left) or nothing: the reason of the first that
    has one, the earliest deadline. Seconds, because clocks of two machines may be far apart.
    """
    heard = [each for each in told if each is not None]
    return Notice(heard[0][0], now + min(left for _, left in heard))


class Agreement:
    """Asked by all ranks equally often, it answers all of them alike.

    A rank alone that left would let the others wait for it in their next all_reduce for ever: signals reach
    ranks at different steps.
    """

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._agreed: Notice | None = None

    def on(self, mine: Notice | None) -> Notice | None:
        """A notice as soon as any rank has one: the reason of the lowest such rank, and the earliest deadline
        by this machine's own clock. From then on the same again, without the others.

        Raises what torch does when a rank is gone.
        """
        if self._agreed is None and self._anyone(mine is not None):
            self._agreed = self._together(mine)
        return self._agreed

    def _anyone(self, mine: bool) -> bool:
        if dist.get_world_size() == 1:
            return mine
        heard = torch.tensor([int(mine)])
        dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=cpu_group())
        return bool(heard.item())

    def _together(self, mine: Notice | None) -> Notice:
        told: list[Any] = [None] * dist.get_world_size()
        own = None if mine is None else (mine.why, mine.deadline - self._wall())
        if len(told) > 1:
            dist.all_gather_object(told, own, group=cpu_group())
        else:
            told = [own]
        return combined(told, self._wall())
