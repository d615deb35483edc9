"""Log lines in the shape of glog, as Paddle prints them. Knows the line, and that it goes to stderr; no
levels, no files.
"""

import contextlib
import os
import sys
import time


def glog(message: str) -> None:
    """Write `Immdd hh:mm:ss.micros pid file:line] message` to stderr, where file and line are the caller's. A
    log that cannot be written (its disk is full) ends nothing.
    """
    caller = sys._getframe(1)
    place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"  # noqa: PTH119  # a name
    now = time.time_ns()
    stamp = time.strftime("%m%d %H:%M:%S", time.localtime(now // 1_000_000_000))
    micros = now // 1000 % 1_000_000
    with contextlib.suppress(OSError):
        sys.stderr.write(f"I{stamp}.{micros:06d} {os.getpid()} {place}] {message}\n")
        sys.stderr.flush()
