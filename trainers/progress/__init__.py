"""Reports to the launcher how far a training is: for `fleetrun status`, the line at the bottom of a terminal,
plots, TensorBoard and Prometheus. Also for scripts that use nothing else of this package:

    from trainers import progress

    for batch, labels in loader:
        ...
        progress.step(samples=len(batch), loss=loss)

Every call returns at once, waits for no device, and raises nothing. Outside of fleetrun it does nothing.
Reports leave twice a second at most, the number of the newest step ten times. Children made by fork or by
multiprocessing tell nothing: their parent does. Standard library only.
"""

from __future__ import annotations

import atexit
import os
from typing import Any

from fleetrun.envs.channels import CONTAINER_VARIABLE, note_imports, take_mark, take_steps
from trainers.progress.channel import channel_of
from trainers.progress.meter import Activity, Meter

__all__ = ["Activity", "Counter", "activity", "heartbeat", "log_scalar", "meter", "report", "step"]

meter = Meter(os.environ.get(CONTAINER_VARIABLE, ""), channel_of(os.environ), begun=note_imports)
take_mark(meter.set_mark)
"""Of this process."""
atexit.register(meter.end)
os.register_at_fork(after_in_child=meter.turn_off)
take_steps(meter.optimizer_stepped, meter.last_step)


class Counter:
    """Counts the steps of one optimizer, or of one loop."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps = 0
        meter.has_counter()

    def tick(self) -> None:
        self._steps += 1
        meter.counted(self._steps)


def step(*, samples: int | None = None, loss: Any = None, of: int | None = None, **scalars: Any) -> None:
    """One more training step is done. For scripts without a fleet optimizer, which counts steps itself; from
    the first call on it does not.

    `samples`: how many examples this process took in this step. `loss` and `scalars` by their names: numbers,
    or tensors of one value on any device. `of`: the number of the last step, which needs to be said once: the
    status line then shows the time that is left.
    """
    meter.step(samples, loss, scalars, of)


def report(
    step: int | None = None,
    *,
    samples: int | None = None,
    loss: Any = None,
    of: int | None = None,
    **scalars: Any,
) -> None:
    """Report on the step that is done. `step`: its number, when the script counts steps itself.
    `samples`: examples since the last call. `loss`, `of`, `scalars`: as for `step`.
    """
    meter.report(step, samples, loss, scalars, of)


def log_scalar(name: str, value: Any) -> None:
    """A number, or a tensor of one value, under a name of at most 100 letters. The last value of each name
    goes with the next report; up to 200 names.
    """
    meter.log_scalar(name, value)


def heartbeat() -> None:
    """This process is alive, though it makes no step: `--hang_timeout` starts again."""
    meter.heartbeat()


def activity(what: str, of: float | None = None) -> Activity:
    """What this process does while it makes no steps, in a few words:

        with progress.activity("indexing", of=len(files)) as indexing:
            for file in files:
                ...
                indexing.advance()

    `of`: how many parts there are. Each `advance()` is a sign of life.
    """
    return meter.activity(what, of)
