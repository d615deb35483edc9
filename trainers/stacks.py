"""Lets a process of a job write its own stacks when the launcher asks, also while it is stuck in C code: for
hangs, where a debugger may not attach. Standard library only; does nothing outside a job.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Mapping

NUMBER = signal.SIGRTMIN + 12
"""The signal. The same as in `fleetrun/stacks/asking.py`; SIGUSR1 and SIGUSR2 are the scripts'."""

_STDERR = 2


def install(environ: Mapping[str, str]) -> bool:
    """From now on `NUMBER` writes the stacks of all threads to stderr, which is the log; whether that is so.

    Not where somebody has a handler for it already.
    """
    if not environ.get("FLEETRUN_CONTAINER") or sys.platform != "linux":
        return False
    try:
        if signal.getsignal(NUMBER) is not signal.SIG_DFL:
            return False
        os.fstat(_STDERR)
        faulthandler.register(NUMBER, file=_STDERR, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # stderr is closed, or no signal can be had
        return False
    return True
