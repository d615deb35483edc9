"""Where between two updates, and between two exchanges, a job is: counts, and what follows from them. Knows
no gradient and no process.
"""

from __future__ import annotations

from trainers.collective.configs import LocalSGDConfigs


class Cadence:
    """Counted by the optimizer, asked by the model. `steps`: backward passes to an update."""

    def __init__(self, steps: int = 1, local: LocalSGDConfigs | None = None) -> None:
        self._steps = steps
        self._local = local
        self.followed = False
        """Whether an optimizer counts here."""
        self.merged = 0
        """Backward passes since the last update."""
        self.updates = 0
        self.apart = 0
        """Updates that each process has made on its own since models were equal."""

    @property
    def merges(self) -> bool:
        """Whether the next step is none yet: its gradients are only added to those before."""
        return self.merged + 1 < self._steps

    @property
    def alone(self) -> bool:
        """Whether the next update is each process's own."""
        return self._local is not None and self.updates + 1 >= self._local.begin_step

    @property
    def localized(self) -> bool:
        """Whether processes have made updates of their own, from which at least their optimizers differ."""
        return self._local is not None and self.updates >= self._local.begin_step

    @property
    def exchanges(self) -> bool:
        """Whether the next backward pass sends gradients to the other processes."""
        return not self.merges and not self.alone

    def merge(self) -> None:
        """A step that only added up."""
        self.merged += 1

    def update(self) -> bool:
        """An update; whether models are to be averaged now."""
        if self.alone:
            self.apart += 1
        self.updates += 1
        self.merged = 0
        return self._local is not None and self.apart >= self._local.k_steps

    def drop(self) -> None:
        """An update that did not take place: its gradients were not finite."""
        self.merged = 0

    def resume(self, updates: int) -> None:
        """Go on where a checkpoint was taken, of models that were equal."""
        self.updates, self.merged, self.apart = updates, 0, 0
