"""Write log lines to stderr in glog's format, as Paddle does, without levels and files."""

import contextlib
import os
import sys
import time


def glog(message: str) -> None:
    """Write `Immdd hh:mm:ss.micros pid file:line] message` to stderr, with the caller's file and line.

    A failure to write (for example on a full disk) is ignored.
    """
    caller = sys._getframe(1)
    place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"  # noqa: PTH119  # a name
    now = time.time_ns()
    stamp = time.strftime("%m%d %H:%M:%S", time.localtime(now // 1_000_000_000))
    micros = now // 1000 % 1_000_000
    with contextlib.suppress(OSError):
        sys.stderr.write(f"I{stamp}.{micros:06d} {os.getpid()} {place}] {message}\n")
        sys.stderr.flush()
