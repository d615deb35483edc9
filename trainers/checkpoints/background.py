"""One save at a time beside the training: in a thread, through a process group of its own. Knows threads and
the end of the process; leaves what is saved to `checkpoint`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from trainers.glog import glog
from trainers.lastwords import failed


class Background:
    """`start` and `wait` are called by all ranks, in the same order."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: Future[str] | None = None
        self._groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)

    def start(self, work: Callable[[], str]) -> None:
        """After `wait`. Raises nothing that `work` raises."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="fleet-checkpoint")
            # After the group's own, so before it: the save needs its peers.
            atexit.register(self._end)
        self._under_way = self._threads.submit(work)

    def wait(self) -> str | None:
        """What the save under way returns, None when there is none; raises what it raises, once."""
        ended, self._under_way = self._under_way, None
        return None if ended is None else ended.result()

    def group(self) -> dist.ProcessGroup | None:
        """Gloo among all ranks, for the thread alone: in a group of the training's its messages would get
        between the training's own. Made at the first call, by all ranks together.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._groups[0] is not dist.group.WORLD:
            self._groups = dist.group.WORLD, dist.new_group(backend="gloo")
        return self._groups[1]

    def _end(self) -> None:
        """The interpreter has waited for the thread. A save that nobody has asked after and that failed must
        not go unnoticed: an exit code of 0 would say that all is there.
        """
        error = None if self._under_way is None else self._under_way.exception()
        if error is None:
            return
        if failed():
            glog(f"warning: the last checkpoint was not saved: {error}")
            return
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # Python has no other way to another exit code from here
