"""Python imports this first wherever this folder is on PYTHONPATH: processes of tests start and end sooner.

A third of the time of a process that imports torch is the collector's, which finds nothing in it.
The launcher is measured as it is.
"""

import atexit
import gc
import sys

if "fleetrun" not in sys.orig_argv:
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)  # the first to be registered is the last to run
