"""Describe the Python installation that fleetrun runs in. Check for optional packages, and build the command
and environment of helper processes, such as a metrics writer or a stack reader. Starts no process.
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
    """Return `python -m module words`. Files in the current directory cannot shadow a module."""
    return [sys.executable, "-P", "-m", module, *words]


def helper_environment(environ: Environ = os.environ) -> dict[str, str]:
    """Return the launcher's environment without the contract variables and the token, because a helper is not
    a process of the job.

    A helper finds the same fleetrun, installed or not. It computes in one thread, to leave the processors to
    the job.
    """
    values = without_contract(environ)
    values.pop(TOKEN, None)
    values |= dict.fromkeys(_THREADS, "1")
    if _ROOT.name not in ("site-packages", "dist-packages"):
        values["PYTHONPATH"] = ":".join(filter(None, (environ.get("PYTHONPATH"), str(_ROOT))))
    return values


# ---- Optional packages


def check_package(package: str, what: str, extra: str) -> None:
    """Raise UsageError if `what` needs a package that is not installed. fleetrun's `extra` installs it.

    A directory with the package's name does not count.
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
