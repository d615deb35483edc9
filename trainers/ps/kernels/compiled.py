"""Compiled: how functions become machine code, and where that is kept. Knows numba; leaves what is compiled
to the kernels.

numba keeps machine code in NUMBA_CACHE_DIR if that is set, else beside the source if that can be written,
else in the user's cache folder. It looks at the age of a function's own file only, so machine code that is
older than any kernel's source is thrown away here: it may hold an older version of a function from another
file.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import llvmlite.binding
import numba
import numpy as np
from numba.core import event
from numpy.typing import NDArray

from trainers.glog import glog

Keys: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Words: TypeAlias = NDArray[np.uint64]
Places: TypeAlias = NDArray[np.int32]
Bits: TypeAlias = NDArray[np.uint32]
Flags: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]
Scalar: TypeAlias = Any
"""One number inside a kernel, of the type that numba infers."""

Kernel = TypeVar("Kernel", bound=Callable[..., object])

# Division by zero gives infinity, as in torch; a test for it would also keep loops from being vectorized.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_HERE = Path(__file__).parent


def compiled(function: Kernel) -> Kernel:
    """The function as machine code: compiled at its first call on this machine, loaded at later ones; runs
    without the GIL. Where there is no folder to keep it, it is compiled anew in every process.
    """
    try:
        kernel = cast(Kernel, numba.njit(cache=True, **_OPTIONS)(function))
    except RuntimeError:  # numba found no folder that it can write to
        kernel = cast(Kernel, numba.njit(**_OPTIONS)(function))
    _drop_stale(function.__code__.co_filename, cache_folder(kernel))
    return kernel


def cache_folder(kernel: Callable[..., object]) -> Path | None:
    """Where the machine code of a kernel is kept; None where it is not."""
    path = kernel.stats.cache_path  # type: ignore[attr-defined]  # numba's
    return None if path is None else Path(path)


@cache
def _drop_stale(source: str, folder: Path | None) -> None:
    """Remove machine code of the kernels in `source` that is older than a source beside it, or one here."""
    if folder is None or not folder.is_dir():
        return
    newest = max(path.stat().st_mtime for path in {*Path(source).parent.glob("*.py"), *_HERE.glob("*.py")})
    for index in folder.glob(f"{Path(source).stem}.*.nbi"):
        try:
            if index.stat().st_mtime < newest:
                index.unlink()
        except FileNotFoundError:  # another process has just done the same
            continue


def compile_once(folder: Path | None, run: Callable[[], None]) -> None:
    """Call `run`, which calls kernels. Where their machine code is not in `folder` yet, one process compiles
    it and says so, and others that start at the same time wait and load it.
    """
    if folder is None:
        run()
        return
    stamp = folder / f"{run.__name__}-{_digest()}.warm"
    if stamp.exists():
        run()
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "kernels.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with event.install_listener("numba:compile", _Announcer()):
            run()
        for old in folder.glob(f"{run.__name__}-*.warm"):
            old.unlink()
        stamp.touch()


class _Announcer(event.Listener):
    """Says at the first compilation that it will take a moment."""

    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: event.Event) -> None:
        if not self._said:
            self._said = True
            glog("compiling kernels, once for this machine: takes some seconds")

    def on_end(self, event: event.Event) -> None:
        pass


def _digest() -> str:
    """Changes with whatever makes numba compile anew."""
    parts = [numba.__version__, platform.python_version(), llvmlite.binding.get_host_cpu_name()]
    for path in sorted(_HERE.glob("*.py")):
        status = path.stat()
        parts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
