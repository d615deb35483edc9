"""The MPI starters of this machine, as command prefixes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import pytest

_OPEN_MPI = ("mpirun.openmpi", "mpirun")
_MPICH = ("mpiexec.hydra",)


def starters() -> Mapping[str, str | None]:
    """By name, the program; None where it is not installed (Debian's packages openmpi-bin and mpich)."""
    return {
        "Open MPI": next(filter(None, map(shutil.which, _OPEN_MPI)), None),
        "MPICH": next(filter(None, map(shutil.which, _MPICH)), None),
    }


def mpirun(starter: str, number: int) -> tuple[str, ...]:
    """The prefix for so many processes on this host. Skips the test where the starter is missing."""
    program = starters()[starter]
    if program is None:
        pytest.skip(f"{starter} is not installed")
    if starter == "Open MPI":
        root = ("--allow-run-as-root",) if os.getuid() == 0 else ()
        return (program, *root, "--oversubscribe", "-n", str(number))
    return (program, "-n", str(number))
