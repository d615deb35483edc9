"""Trains, as far as a soak is concerned: until somebody says that it is enough. Tells what it did in a file
that all hosts share, and fails when it is told to.
"""

import json
import os
import signal
import time
from pathlib import Path

SHARED = Path(os.environ["SOAK_SHARED"])
TOKEN = os.environ["FLEETTEST_TOKEN"]


def record(what):
    """One line, whole."""
    told = {"what": what, "launch": TOKEN, "pid": os.getpid()}
    told |= {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "PADDLE_RESTART_COUNT")}
    fd = os.open(SHARED / "story", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (json.dumps(told) + "\n").encode())
    os.close(fd)


def told_to_fail():
    try:
        (SHARED / f"fail.{TOKEN}").unlink()
    except FileNotFoundError:
        return False
    return True


if os.environ["RANK"] == "0":  # half of those who stop take their time
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), os._exit(1)))
record("start")
while not (SHARED / "enough").exists():
    if told_to_fail():
        record("fail")
        os._exit(9)
    time.sleep(0.02)
record("done")
