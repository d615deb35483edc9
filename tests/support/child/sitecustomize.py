"""Python imports this first wherever this folder is on PYTHONPATH. Processes of tests start and end sooner,
and tests/support/costs.py counts their imports of torch.

A third of the time of a process that imports torch is the collector's, which finds nothing in it.
The launcher is measured as it is.
"""

import atexit
import gc
import os
import sys


class Noticed:
    """A finder that finds nothing: it adds a byte to a file when torch is looked for, which happens once."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch" and (file := os.environ.get("FLEETTEST_IMPORTS")):
            try:
                handle = os.open(file, os.O_WRONLY | os.O_APPEND)
            except OSError:  # another user's process, or the run is over
                return
            os.write(handle, b".")
            os.close(handle)


sys.meta_path.insert(0, Noticed)

if "fleetrun" not in sys.orig_argv:
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)  # the first to be registered is the last to run
