"""What a row takes on Paddle's server: a job of its launcher, and the slope of what the job found."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import _ps_jobs
import numpy as np

SCRIPT = Path(__file__).resolve().parent / "paddle" / "memory.py"


def bytes_a_row(rule: str, dim: int, rows: int) -> float | None:
    """Bytes of the server's resident memory for each of `rows` new rows; None without PADDLE_BIN, and where
    the job fails, which is said.
    """
    side = _ps_jobs.paddle()
    if side is None:
        return None
    with tempfile.TemporaryDirectory(prefix="bench-paddle.") as work:
        result = Path(work) / "result"
        command = [str(side.launcher), "--server_num=1", "--trainer_num=1", "--log_dir=log", str(SCRIPT)]
        options = ["--rule", rule, "--dim", str(dim), "--rows", str(rows), "--result", str(result)]
        try:
            _ps_jobs.start([*command, *options], Path(work), 600, path=[side.launcher.parent])
        except _ps_jobs.JobError as error:
            sys.stderr.write(f"Paddle, {rule}, dim {dim}: {error}\n")
            return None
        found = json.loads(result.with_name("result.trainer0").read_text())
    return slope(found["resident"])


def slope(resident: Sequence[Sequence[float]]) -> float:
    """Bytes a row of (rows, bytes) by least squares, without the first tenth: beginning takes memory too."""
    rows, size = np.array(resident[len(resident) // 10 :], float).T
    return float(np.polyfit(rows, size, 1)[0])
