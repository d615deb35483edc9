"""Run a Python function as the program of a job.

The caller pickles the function into a private directory. Each process (`python -m fleetrun.function FOLDER
NAME`) calls the function and writes the returned value or the exception to the same directory.

Only the caller's user can write to the directory, so its pickles can be trusted.
"""

from __future__ import annotations

import linecache
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from fleetrun.aliases import Document, Fields
from fleetrun.envs.channels import error_file, inside_container, write_error
from fleetrun.errors import LaunchError, UsageError

_CALL = "call"
_TRAINER = "trainer"


# ---- In the caller


class Call:
    """A pickled call in its directory, and the answers of the job's processes."""

    def __init__(
        self, function: Callable[..., object], args: Sequence[object], kwargs: Fields | None
    ) -> None:
        """Pickle the call. Raises UsageError if the function or an argument cannot be pickled."""
        module = getattr(function, "__module__", None) or "__main__"
        self.name = _name(function) if module == "__main__" else f"{module}.{_name(function)}"
        """The function's name for people. It is the last word of the processes' command lines."""
        setup = {"path": [str(Path(each).absolute()) for each in sys.path], "cells": _cells()}
        self.folder = Path(tempfile.mkdtemp(prefix="fleetrun-"))
        try:
            _write(self.folder / _CALL, _name(function), setup, (function, tuple(args), dict(kwargs or {})))
        except TypeError as error:
            shutil.rmtree(self.folder)
            hint = "Create files, connections and locks inside the function, because it is pickled."
            raise UsageError(str(error), hint=hint) from None

    def has_value(self, rank: int) -> bool:
        """Return True if the last attempt of this trainer returned a value."""
        return _answer(self.folder, rank, "value").exists()

    def value(self, rank: int) -> Any:
        """Return the value of this trainer. Raises LaunchError if the value cannot be unpickled here."""
        try:
            with _answer(self.folder, rank, "value").open("rb") as file:
                return pickle.load(file)
        except Exception as error:  # any object may define its own unpickling
            reason = f"{type(error).__name__}: {error}"
            raise LaunchError(f"what trainer {rank} returned cannot be unpickled here: {reason}") from error

    def error(self, rank: int) -> BaseException | None:
        """Return the exception of this trainer's last attempt.

        Return None if the attempt raised no exception, or if the exception cannot be unpickled here.
        """
        try:
            with _answer(self.folder, rank, "error").open("rb") as file:
                found = pickle.load(file)
        except Exception:  # noqa: BLE001  # exceptions with arguments of their own often cannot be; the report has it
            return None
        return found if isinstance(found, BaseException) else None


def _cells() -> Document:
    """Return the code of notebooks and shells, which exists only in memory. Tracebacks in the processes need
    it.
    """
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _write(path: Path, what: str, *values: object) -> None:
    """Pickle the values into this file, which is then either complete or absent.

    Raises TypeError with `what` in its message, and OSError.
    """
    import cloudpickle  # late: a launch of a script works without it

    aside = path.with_suffix(".new")
    try:
        with aside.open("wb") as file:
            for each in values:
                cloudpickle.dump(each, file)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # objects decide how they are pickled
        raise TypeError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from None
    aside.rename(path)


def _answer(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"{rank}.{kind}"


# ---- In each process


def main(folder: Path) -> None:
    """Call the function and, in a trainer, write its value. An exception ends the process as in a script."""
    if not (folder / _CALL).exists():  # a user may have copied the command line
        sys.exit(f"fleetrun: {folder} no longer exists. Run the Python program of this function again.")
    role, rank = _place()
    value, error = (_answer(folder, rank, kind) for kind in ("value", "error"))
    if role == _TRAINER:  # answers of an earlier attempt
        value.unlink(missing_ok=True)
        error.unlink(missing_ok=True)
    sys.excepthook = _report
    try:
        with (folder / _CALL).open("rb") as file:
            setup = pickle.load(file)
            sys.path[:] = [*setup["path"], *(each for each in sys.path if each not in setup["path"])]
            linecache.cache.update(setup["cells"])
            try:
                function, args, kwargs = pickle.load(file)
            except ImportError as missing:
                missing.add_note("Each process must be able to import the module of the function.")
                raise
        returned = function(*args, **kwargs)
        if role == _TRAINER:
            _write(value, f"what {_name(function)} returned", returned)
    except Exception as raised:  # noqa: BLE001  # it is the user's function
        if role == _TRAINER:
            with suppress(Exception):  # the report then has the exception's text
                _write(error, "the exception", raised)
        sys.excepthook(type(raised), raised, raised.__traceback__)
        sys.last_value = raised  # as Python does, for --debug_on_error
        sys.exit(1)


def _place() -> tuple[str, int]:
    """Return the role, and the rank within this role."""
    _, role, rank = (inside_container(os.environ) or "..-1").rsplit(".", 2)
    return role, int(rank)


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback and report it to the launcher.

    Unlike Python's own hook, omit the frames of this file and show the lines of notebooks.
    """
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(text)
    if path := error_file(os.environ):
        aside = Path(f"{path}.{os.getpid()}")
        with suppress(OSError):  # on a full disk, the log may still have the traceback
            aside.touch(mode=0o600)  # a traceback may hold private values
            aside.write_text(write_error(f"{kind.__name__}: {error}", text, time.time_ns()), "utf-8")
            aside.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
