"""Python processes that wait where a test expects them, and whether this user may look into them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fleetrun.stacks.collect import SpyError, dump_pyspy, find_pyspy
from fleetrun.stacks.frames import Target
from tests.support.cluster import PATH
from tests.support.waiting import eventually

MARK = "abcdef.trainer.0"
WAITS = "import time\ndef deep():\n    while not print('ready', flush=True): time.sleep(1000)\ndeep()\n"
"""In one line: who has read "ready" may look before the next one is reached."""


@contextmanager
def waiting(
    folder: Path, text: str = WAITS, env: Mapping[str, str] | None = None
) -> Iterator[tuple[Target, subprocess.Popen[bytes]]]:
    """A container of trainer 0 whose script has said "ready" in its log. It is killed in the end."""
    script, log = folder / "train.py", folder / "train.log"
    script.write_text(text)
    known = {**os.environ, "PYTHONPATH": PATH, "FLEETRUN_CONTAINER": MARK, **(env or {})}
    with log.open("ab") as output, subprocess.Popen(
        [sys.executable, "-u", str(script)], stdout=output, stderr=output, env=known
    ) as process:  # fmt: skip
        try:
            eventually(lambda: b"ready\n" in log.read_bytes())  # print writes the end of a line by itself
            yield target_of(process.pid, log), process
        finally:
            process.kill()


def target_of(pid: int, log: Path) -> Target:
    return Target(role="trainer", rank=0, title="trainer 0", pid=pid, log=str(log), mark=MARK)


def program(folder: Path, text: str, name: str = "py-spy") -> str:
    """A py-spy of sh that does this instead."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@cache
def may_look() -> bool:
    """Whether py-spy is here and allowed to look into a process that it did not start."""
    found = find_pyspy()
    if found is None:
        return False
    text = "print('ready', flush=True); import time; time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-u", "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            return bool(dump_pyspy(found, process.pid, os.environ, 100.0))
        except SpyError:
            return False
        finally:
            process.kill()
