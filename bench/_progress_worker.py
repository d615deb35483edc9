"""One process that reports as fast as it can, under a launcher that listens; and tensorboard's writer for
comparison. Called by progress.py with a folder, seconds and rounds; writes folder/told.json: seconds a call.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from trainers import fleet, progress
from trainers.optimizer import DistributedOptimizer

CALLS = 200  # between two looks at the clock


def main() -> None:
    folder, seconds, rounds = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    assert progress.meter._channel is not None, "Start this script with bench/progress.py."
    told: dict[str, list[float]] = {}
    with SummaryWriter(str(folder / "events")) as writer:  # type: ignore[no-untyped-call]
        ways = _ways(writer)
        for _ in range(rounds):
            for name, call in ways.items():
                told.setdefault(name, []).append(_measured(call, seconds))
    (folder / "told.json").write_text(json.dumps(told))


def _ways(writer: SummaryWriter) -> dict[str, Callable[[], object]]:
    weight = torch.nn.Parameter(torch.ones(4))
    loss = (weight * 2).sum()
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
    hook = next(iter(optimizer._optimizer_step_post_hooks.values()))
    return {
        "nothing": lambda: None,
        "what a fleet optimizer counts in `step()`": lambda: hook(optimizer, (), {}),
        "the same and the loss of `minimize(loss)`": lambda: (
            progress.meter.has_loss(loss),
            hook(optimizer, (), {}),
        ),
        "`progress.step(samples=32, loss=0.5)`": lambda: progress.step(samples=32, loss=0.5),
        "`progress.step(samples=32, loss=loss)`, a tensor": lambda: progress.step(samples=32, loss=loss),
        '`fleet.log_scalar("auc", 0.5)`': lambda: fleet.log_scalar("auc", 0.5),
        '`SummaryWriter.add_scalar("loss", 0.5, n)`': lambda: writer.add_scalar("loss", 0.5, 1),  # type: ignore[no-untyped-call]
        '`SummaryWriter.add_scalar("loss", loss, n)`, a tensor': lambda: writer.add_scalar("loss", loss, 1),  # type: ignore[no-untyped-call]
    }


def _measured(call: Callable[[], object], seconds: float) -> float:
    """Seconds a call, over so many seconds: reports that leave twice a second are in it."""
    began = time.perf_counter()
    count = 0
    while (now := time.perf_counter()) - began < seconds:
        for _ in range(CALLS):
            call()
        count += CALLS
    return (now - began) / count


if __name__ == "__main__":
    main()
