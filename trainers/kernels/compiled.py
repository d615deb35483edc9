"""`compiled`: functions as machine code by numba, and its cache.

numba caches machine code in NUMBA_CACHE_DIR if that is set, else next to the source if that is writable, else
in the user's cache folder. It compares only the function's own source file; here it gets all that a kernel
may call. Contents are compared, not modification times: a file may change while it is being compiled.
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
from typing import Any, TypeAlias, TypeVar, cast

import llvmlite.binding
import numba
import numpy as np
from numba.core import event
from numpy.typing import NDArray

from trainers.process.log import glog

Keys: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float32]
Words: TypeAlias = NDArray[np.uint64]
Places: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.uint8]
Halves: TypeAlias = NDArray[np.uint16]
Mask: TypeAlias = NDArray[np.bool_]
Scalar: TypeAlias = Any
"""One number inside a kernel, of the type that numba infers."""

Kernel = TypeVar("Kernel", bound=Callable[..., object])

# Division by zero gives infinity, as in torch; a test for it would also keep loops from being vectorized.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_HERE = Path(__file__).parent


def compiled(function: Kernel) -> Kernel:
    """The function as machine code: compiled at its first call on this machine, loaded at later ones; runs
    without the GIL. Of several processes that need it at once one compiles it, and the others wait and load
    it. Without a writable cache folder it is compiled in every process.
    """
    try:
        kernel: Any = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba found no folder that it can write to
        return cast(Kernel, numba.njit(**_OPTIONS)(function))
    folder = cache_folder(kernel)
    sources = _sources(Path(function.__code__.co_filename).parent)
    kernel._cache._cache_file._source_stamp = sources
    name = f"{function.__module__}.{function.__name__}"
    kernel.compile = partial(_compile, kernel.compile, folder, name, sources)
    return cast(Kernel, kernel)


def variant(function: Callable[..., Any], name: str, **others: object) -> Callable[..., Any]:
    """Compile a function with other values of its global names. One that took a kernel as an argument would
    not be cached by numba: each process would compile it again.
    """
    made = FunctionType(function.__code__, {**function.__globals__, **others}, name)
    made.__qualname__ = name  # by which numba names its cache
    return compiled(made)


def inlined(function: Kernel) -> Kernel:
    """Make the function a part of each kernel that calls it: a call with arrays costs more than a row."""
    return cast(Kernel, numba.njit(inline="always", **_OPTIONS)(function))


def cache_folder(kernel: Callable[..., object]) -> Path:
    """Where the machine code of a kernel is cached."""
    return Path(kernel.stats.cache_path)  # type: ignore[attr-defined]  # numba's


@cache
def _sources(folder: Path) -> str:
    """Changes with any source in that folder, or of this wrapper."""
    files = sorted({*folder.glob("*.py"), *_HERE.glob("*.py")})
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def _compile(
    compile_or_load: Callable[[Any], Any], folder: Path, name: str, sources: str, signature: Any
) -> Any:
    """numba's way to machine code for a signature, in one process at a time.

    There is no deadlock: a kernel waits only for kernels that it calls, never the other way round.
    """
    with (
        _locked(folder / f"{name}.lock"),
        event.install_listener("numba:compile", _Announcer(folder, sources)),
    ):
        return compile_or_load(signature)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Excludes other processes with the same path. The system releases the lock of a dead process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child may have it open too


class _Announcer(event.Listener):
    """Logs the first compilation on this machine, which takes a while."""

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
        glog("compiling kernels, once on this machine; this takes some seconds")

    def on_end(self, event: event.Event) -> None:
        pass


@cache
def _digest(sources: str) -> str:
    """Changes with everything that makes numba compile again."""
    parts = [numba.__version__, platform.python_version(), llvmlite.binding.get_host_cpu_name(), sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
