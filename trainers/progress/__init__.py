"""Report the progress of a training to the launcher.

`fleetrun status`, the status line of a terminal, plots, TensorBoard and Prometheus show it. Scripts can use
this module without the rest of the package:

    from trainers import progress

    for batch, labels in loader:
        ...
        progress.step(samples=len(batch), loss=loss)

Every call returns immediately, waits for no device, and raises no errors. Outside fleetrun, calls have no
effect. Reports are sent at most twice a second, and the number of the newest step ten times. Children by fork
or multiprocessing report nothing, because their parent does. The module imports only the standard library.
"""

from __future__ import annotations

import atexit
import os

from fleetrun.envs.channels import CONTAINER_VARIABLE, note_imports, take_mark, take_steps
from trainers.progress.channel import channel_of
from trainers.progress.meter import Activity, Meter

__all__ = ["Activity", "Counter", "activity", "heartbeat", "log_scalar", "meter", "report", "step"]

meter = Meter(os.environ.get(CONTAINER_VARIABLE, ""), channel_of(os.environ), on_start=note_imports)
take_mark(lambda mark: meter.renew(mark, channel_of(os.environ)))
"""The meter of this process."""
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


def step(
    *, samples: int | None = None, loss: object = None, of: int | None = None, **scalars: object
) -> None:
    """Report one completed training step, for scripts without a fleet optimizer.

    A fleet optimizer counts steps itself, and stops counting at the first call. `samples` is the number of
    examples that this process used in this step. `loss` and the named `scalars` are numbers, or tensors of
    one value on any device. `of` is the number of the last step. Pass it once, and the status line shows the
    remaining time.
    """
    meter.step(samples, loss, scalars, of)


def report(
    step: int | None = None,
    *,
    samples: int | None = None,
    loss: object = None,
    of: int | None = None,
    **scalars: object,
) -> None:
    """Report on the completed step.

    `step` is its number, if the script counts steps itself. `samples` are examples since the last call.
    `loss`, `of` and `scalars` work as in `step`.
    """
    meter.report(step, samples, loss, scalars, of)


def log_scalar(name: str, value: object) -> None:
    """Log a number, or a tensor of one value, under a name of at most 100 characters.

    The next report sends the last value of each name, for up to 200 names.
    """
    meter.log_scalar(name, value)


def heartbeat() -> None:
    """Report that this process is alive without a step, which restarts the time of `--hang_timeout`."""
    meter.heartbeat()


def activity(what: str, of: float | None = None) -> Activity:
    """Report the work of this process between steps, in a few words:

        with progress.activity("indexing", of=len(files)) as indexing:
            for file in files:
                ...
                indexing.advance()

    `of` is the number of parts. Each `advance()` counts as activity for `--hang_timeout`.
    """
    return meter.activity(what, of)
