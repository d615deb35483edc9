"""The Python installation that fleetrun runs in: whether an optional package is there, and the command and
environment of a helper process (a writer of metrics, a reader of stacks). Starts nothing.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from fleetrun.aliases import Environ
from fleetrun.envs.contract import TOKEN, without_contract
from fleetrun.errors import UsageError

# ---- Command and environment of a helper process

_ROOT = Path(__file__).resolve().parents[2]
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def helper_command(module: str, *words: str) -> list[str]:
    """`python -m module words`; what lies in the current directory is not taken for a module."""
    return [sys.executable, "-P", "-m", module, *words]


def helper_environment(environ: Environ = os.environ) -> dict[str, str]:
    """The launcher's without the contract and the job's secret: it is not a process of the job.

    It finds the same fleetrun, installed or not, and computes in one thread: the processors are for the job.
    """
    values = without_contract(environ)
    values.pop(TOKEN, None)
    values |= dict.fromkeys(_THREADS, "1")
    if _ROOT.name not in ("site-packages", "dist-packages"):
        values["PYTHONPATH"] = ":".join(filter(None, (environ.get("PYTHONPATH"), str(_ROOT))))
    return values


# ---- Optional packages


def check_package(package: str, what: str, extra: str) -> None:
    """Raises UsageError where `what` needs a package that is not installed; `extra` of fleetrun installs it.
    A folder of that name does not count.
    """
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise UsageError(
            f"{what} needs the Python package {package.replace('_', '-')}, which is not installed",
            hint=f"pip install 'fleetrun[{extra}]'",
        )
