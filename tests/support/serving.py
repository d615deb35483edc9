"""A launcher's socket without a launcher: a loop in a thread of its own."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fleetrun.control.server import Server
from fleetrun.pod.loop import Loop


@contextlib.contextmanager
def serving(path: Path, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Server]:
    """`answer` is called in the loop's thread."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    loop = Loop()
    server = Server(loop, path, answer)
    read, write = os.pipe()
    loop.add(read, loop.stop)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield server
    finally:
        os.write(write, b"x")
        thread.join()
        server.close()
        loop.close()
        os.close(read)
        os.close(write)


def status_of(job: str, pod: str, **more: Any) -> dict[str, Any]:
    """As a launcher answers."""
    return {
        "version": 1, "job": job, "pod": pod, "mode": "collective", "pid": os.getpid(), "guard": os.getppid(),
        "log_dir": "/logs", "cwd": "/here", "started": 1000.0, "elapsed": 5.0, "state": "running", "why": "",
        "restarts": 0, "max_restart": 3, "nodes": [], "waiting": None, "containers": [], **more,
    }  # fmt: skip
