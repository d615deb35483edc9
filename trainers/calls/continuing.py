"""The part of the fleet API by which a training goes on after a restart: checkpoints, the step to resume at,
the notice to stop. Knows for which kind of job each call is; leaves the work to `checkpoint` and `notice`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from typing import Any

import torch

from trainers import progress
from trainers.calls.begun import Begun
from trainers.collective.runtime import CollectiveRuntime
from trainers.errors import UsageError
from trainers.notice import Notice, StopSignals, notice_file
from trainers.runtime import Where


class Continuing(Begun):
    """A Fleet's calls that concern its going on elsewhere, or later. All but `init` comes after `init`."""

    def __init__(self) -> None:
        super().__init__()
        self._signals = StopSignals(notice_file(os.environ))

    def resume_step(self) -> int:
        """How many steps are done already. Collective: the step of the checkpoint that was loaded, 0 when
        none was. With parameter servers: how many steps of this trainer's place they had when it started; 0,
        unless it was restarted. A script that skips as many batches goes on where its former self was. When
        there are more trainers than before, or fewer: the share of each of what all had done, rounded down.
        """
        return self._ready("resume_step").resume_step()

    def save_checkpoint(
        self,
        directory: Where,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keep: int = 2,
        async_save: bool = False,
        **state: Any,
    ) -> str | None:
        """Save model, optimizer and random generators as they are after `step` steps; all ranks call it.
        When it returns its path, `directory/step-XXXXXXXX` is complete and durable; the newest `keep` stay.

        state: by any name, small dicts, and objects with `state_dict` and `load_state_dict` (a sampler, a
        learning rate schedule). `directory`: a path, the same folder on every machine, or a URL of fsspec.
        async_save: only copy everything now, into memory of this machine, and return None; the copy is
        written beside the training. The next save, load or wait_checkpoint waits for it, and so does the end
        of the process. Raises CheckpointError, then the former checkpoints are as they were; a save in the
        background that failed lets the next of these calls raise it, on all ranks.
        """
        from trainers.checkpoints import checkpoint

        runtime = self._collective("save_checkpoint")
        runtime.before_checkpoint()
        optimizer = runtime.made_of(optimizer)
        save = checkpoint.start if async_save else checkpoint.save  # either tells when it writes
        return save(directory, step, model, optimizer, keep=keep, state=state)

    def wait_checkpoint(self) -> str | None:
        """Wait until the last `save_checkpoint(..., async_save=True)` is complete and durable; its path, None
        when there is nothing to wait for; all ranks call it. Raises CheckpointError when it has failed.
        """
        from trainers.checkpoints import checkpoint

        self._collective("wait_checkpoint")
        with progress.activity("waiting for the checkpoint"):
            return checkpoint.wait()

    def load_checkpoint(
        self,
        directory: Where,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        **state: Any,
    ) -> int | None:
        """Bring model, optimizer and `state`, dicts in place, to the newest complete checkpoint; all ranks
        call it, and there may be more or fewer than when it was saved. Its step, or None when there is none.

        A damaged checkpoint is passed over for the one before. Raises CheckpointError when all are damaged,
        or when it is of another model.
        """
        from trainers.checkpoints import checkpoint

        runtime = self._collective("load_checkpoint")
        optimizer = runtime.made_of(optimizer)
        with progress.activity("loading the checkpoint"):
            step = checkpoint.load(directory, model, optimizer, state=state)
        runtime.resumed = step or 0
        progress.meter.resumed(runtime.resumed)
        return step

    load_latest = load_checkpoint

    def stop_requested(self, *, sync: bool = True, signals: Collection[int] = ()) -> Notice | None:
        """Why and until when this process is to stop, once it is: save, and leave.

        From the first call on SIGTERM no longer ends the process: it is asked to ask again. `signals` are
        more that mean "stop": SIGUSR1, where Slurm sends it ahead of its time limit. In a collective job all
        ranks call it equally often and get the same answer at the same call, through a small all_reduce;
        without `sync` each hears of its own signal only, and must not leave alone. When the launcher says
        that other ranks are gone, a collective job's process still ends at once: it could save nothing.
        """
        runtime = self._ready("stop_requested")
        collective = isinstance(runtime, CollectiveRuntime)
        self._signals.listen((signal.SIGTERM, *signals), with_others=collective)
        mine = self._signals.notice()
        if sync and isinstance(runtime, CollectiveRuntime):
            return runtime.agreement.on(mine)
        return mine

    def _collective(self, call: str) -> CollectiveRuntime:
        runtime = self._ready(call)
        if not isinstance(runtime, CollectiveRuntime):
            raise UsageError(
                f"fleet.{call}() belongs to collective training, and this job has parameter servers: they "
                "keep their tables by strategy.ps_configs durability, and by fleet.save_persistables()"
            )
        return runtime
