"""How a process is started that fleetrun runs for itself beside a job (a writer of metrics, a reader of
stacks): its command and its environment. Starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from fleetrun.envs.inherited import without_contract
from fleetrun.envs.secret import TOKEN

_ROOT = Path(__file__).resolve().parents[2]
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def command(module: str, *words: str) -> list[str]:
    """`python -m module words`; what lies in the current directory is not taken for a module."""
    return [sys.executable, "-P", "-m", module, *words]


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The launcher's without the contract and the job's secret: it is no process of the job.

    It finds the same fleetrun, installed or not, and computes in one thread: processors are the job's.
    """
    values = without_contract(environ)
    values.pop(TOKEN, None)
    values |= dict.fromkeys(_THREADS, "1")
    if _ROOT.name not in ("site-packages", "dist-packages"):
        values["PYTHONPATH"] = ":".join(filter(None, (environ.get("PYTHONPATH"), str(_ROOT))))
    return values
