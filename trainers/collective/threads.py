"""Gloo's worker threads at the end of a process. Knows /proc and one defect of torch; nothing of
training.

A Gloo thread that has finished a collective drops the Python objects that came with it, and takes the
GIL for that. When the interpreter is being torn down by then, the process aborts (`terminate called
without an active exception`, exit code -6; https://github.com/pytorch/pytorch/issues/190489). Destroying
the process group does not join the threads once there has been a DistributedDataParallel. Seen once in
about four hundred runs, on a busy machine, and not since; it could not be provoked.
"""

from __future__ import annotations

import time
from pathlib import Path

WORKER = "pt_gloo_runloop"
TASKS = Path("/proc/self/task")


def wait_until_idle(tasks: Path = TASKS, looks: int = 1000, pause: float = 0.002) -> bool:
    """Look until every Gloo worker sleeps, so often at most, every `pause` seconds; whether they all do.

    Twice in a row, and the GIL is free in between: a thread that sleeps because it waits for the GIL
    gets it there. Looks are counted, not seconds: while this process stands still its workers do, too.
    """
    asleep = 0
    for _ in range(looks):
        asleep = asleep + 1 if all(state == "S" for state in _states(tasks)) else 0
        if asleep == 2:
            return True
        time.sleep(pause)
    return False


def _states(tasks: Path) -> list[str]:
    """The state letter of each Gloo worker: the field after the name in /proc/PID/task/TID/stat (proc(5))."""
    states = []
    for task in tasks.iterdir():
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread has just ended
        if name == WORKER:
            states.append(rest.split()[0])
    return states
