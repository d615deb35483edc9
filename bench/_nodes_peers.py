"""The launchers that `nodes.py` compares, and what each can do here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_LOOK = """
from importlib.metadata import version
from importlib.util import find_spec
print(version("paddlepaddle"), find_spec("etcd3") is not None)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """`waits`: what it says when others are missing, and after how many more seconds it has joined.
    `at_once`: so many of its jobs may act at the same time.
    """

    name: str
    program: tuple[str, ...]
    version: str
    ours: bool
    etcd: bool
    waits: tuple[str, float]
    at_once: int


def fleetrun() -> Launcher:
    """The one in the folder of this interpreter."""
    return Launcher(
        name="fleetrun",
        program=(str(Path(sys.executable).with_name("fleetrun")),),
        version="",
        ours=True,
        etcd=shutil.which("etcd") is not None,
        waits=("nodes have joined", 1.0),
        at_once=2,
    )


def paddle() -> Launcher | None:
    """The one of PADDLE_BIN, a folder; None without it."""
    python = Path(os.environ.get("PADDLE_BIN", ""), "python")
    if not os.environ.get("PADDLE_BIN") or not python.exists():
        return None
    told = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, timeout=60, check=True)
    version, etcd = told.stdout.split()
    return Launcher(
        name="Paddle",
        program=(str(python), "-m", "paddle.distributed.launch"),
        version=version,
        ours=False,
        etcd=etcd == "True" and shutil.which("etcd") is not None,
        waits=("Waiting peer", 4.0),
        at_once=1,
    )
