"""Compile functions to machine code with numba, and manage its cache.

numba caches machine code in NUMBA_CACHE_DIR if it is set, else next to the source if that is writable, else
in the user's cache directory. By default, numba compares only the function's own source file. Here it gets
all sources that a kernel may call. Contents are compared instead of modification times, because a file may
change during compilation.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import llvmlite.binding
import numba
import numpy as np
from numba.core import event
from numpy.typing import NDArray

from trainers.process.log import glog

Keys = NDArray[np.int64]
Floats = NDArray[np.float32]
Words = NDArray[np.uint64]
Flags = NDArray[np.uint8]
Halves = NDArray[np.uint16]
Mask = NDArray[np.bool_]
Scalar = Any
"""One number inside a kernel, of the type that numba infers."""

Kernel = TypeVar("Kernel", bound=Callable[..., object])

# Division by zero gives infinity, as in torch. A test for it would also prevent vectorized loops.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_HERE = Path(__file__).parent


def compiled(function: Kernel) -> Kernel:
    """Return the function as machine code that runs without the GIL.

    It is compiled at its first call on this node, and loaded at later ones. If several processes need it at
    the same time, one compiles it, and the others wait and load it. Without a writable cache directory, every
    process compiles it.
    """
    try:
        kernel: Any = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba found no writable directory
        return cast(Kernel, numba.njit(**_OPTIONS)(function))
    folder = Path(kernel.stats.cache_path)
    sources = _sources(Path(function.__code__.co_filename).parent)
    kernel._cache._cache_file._source_stamp = sources
    name = f"{function.__module__}.{function.__name__}"
    kernel.compile = partial(_compile, kernel.compile, folder, name, sources)
    return cast(Kernel, kernel)


def variant(function: Callable[..., object], name: str, **others: object) -> Callable[..., Any]:
    """Compile a function with other values of its global names.

    numba would not cache a function that takes a kernel as an argument, and each process would compile it
    again.
    """
    made = FunctionType(function.__code__, {**function.__globals__, **others}, name)
    made.__qualname__ = name  # numba names its cache by this
    return compiled(made)


def inlined(function: Kernel) -> Kernel:
    """Inline the function in each kernel that calls it, because a call with arrays costs more than a row."""
    return cast(Kernel, numba.njit(inline="always", **_OPTIONS)(function))


@cache
def _sources(folder: Path) -> str:
    """Return a digest that changes with any source in that directory or of this wrapper."""
    files = sorted({*folder.glob("*.py"), *_HERE.glob("*.py")})
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def _compile(
    compile_or_load: Callable[[object], object], folder: Path, name: str, sources: str, signature: object
) -> object:
    """Compile or load machine code for a signature, in one process at a time.

    There is no deadlock, because a kernel waits only for kernels that it calls.
    """
    with (
        _locked(folder / f"{name}.lock"),
        event.install_listener("numba:compile", _Announcer(folder, sources)),
    ):
        return compile_or_load(signature)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclude other processes with the same path. The system releases the lock of a dead process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # closing is not enough, because a forked child may also have it open
            fcntl.flock(lock, fcntl.LOCK_UN)


class _Announcer(event.Listener):
    """Logs the first compilation on this node, which takes a while."""

    def __init__(self, folder: Path, sources: str) -> None:
        self._folder = folder
        self._sources = sources

    def on_start(self, event: event.Event) -> None:
        marker = self._folder / f"{_digest(self._sources)}.said"
        try:
            marker.open("x").close()
        except FileExistsError:
            return
        for other in self._folder.glob("*.said"):
            if other != marker:
                other.unlink(missing_ok=True)
        glog("compiling kernels, which takes some seconds once on each node")

    def on_end(self, event: event.Event) -> None:
        pass


@cache
def _digest(sources: str) -> str:
    """Return a digest that changes with everything that makes numba compile again."""
    parts = [numba.__version__, platform.python_version(), llvmlite.binding.get_host_cpu_name(), sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
