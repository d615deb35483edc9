"""Hooks that a process of a job installs for its launcher: the error file at its end, its stacks on a
signal.

Standard library only, and little of it: every script that imports `trainers` runs this, also a reader that
is started once for every file. The hooks that were there before are called as well.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# ---- The error file: written for the launcher when a process ends, in torchrun's format

ERROR_FILE_VARIABLES = ("FLEETRUN_ERROR_FILE", "TORCHELASTIC_ERROR_FILE")

_failed = False


def failed() -> bool:
    """Whether an uncaught exception, or sys.exit with something else than 0, is ending this process."""
    return _failed


def error_document(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, now_ns: int
) -> str:
    """The JSON text: `{"message": {"message": ..., "extraInfo": {"py_callstack", "timestamp",
    "time_ns"}}}`.

    torchrun's shape (torch.distributed.elastic.multiprocessing.errors.ErrorHandler) with one key more,
    `time_ns`: the launcher orders failures by it, and seconds are too coarse for that.
    """
    extra = {
        "py_callstack": "".join(traceback.format_exception(kind, error, trace)),
        "timestamp": str(now_ns // 1_000_000_000),
        "time_ns": now_ns,
    }
    return json.dumps({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": extra}})


def error_file(environ: Mapping[str, str]) -> str:
    """The file that the launcher reads, or an empty string."""
    return next((environ[name] for name in ERROR_FILE_VARIABLES if environ.get(name)), "")


def install_exit_hooks() -> None:
    """Chain the hook in front of `sys.excepthook`, and note what `sys.exit` is called with: no hook sees
    that. Calling it again changes nothing.
    """
    if getattr(sys.excepthook, "_fleetrun", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed
        _failed = True
        path = error_file(os.environ)
        if path:
            _write_error_file(Path(path), error_document(kind, error, trace, time.time_ns()))
        previous(kind, error, trace)

    leave = sys.exit

    def exit(code: Any = None, /) -> NoReturn:
        global _failed
        _failed = _failed or code not in (None, 0, False)
        leave(code)

    sys.exit = exit
    hook._fleetrun = True  # type: ignore[attr-defined]  # a mark on a function, so that it is installed once
    sys.excepthook = hook


def leave_dismissed() -> None:
    """For a server whose trainers have all let it go: the launcher must not take its end for a failure."""
    path = error_file(os.environ)
    if path:
        _write_error_file(Path(path), json.dumps({"dismissed": True}))


def _write_error_file(path: Path, text: str) -> None:
    try:
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.touch(mode=0o600)  # a traceback may hold private values
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)  # the launcher never reads half a file
    except OSError as problem:
        sys.stderr.write(f"fleetrun: the last words could not be written to {path}: {problem}\n")


# ---- Stacks on request, also while the process is stuck in C code and a debugger may not attach

STACKS_SIGNAL = signal.SIGRTMIN + 12
"""The signal. The same as in `fleetrun/stacks/asking.py`; SIGUSR1 and SIGUSR2 are the scripts'."""

_STDERR = 2


def install_stack_dump(environ: Mapping[str, str]) -> bool:
    """From now on `NUMBER` writes the stacks of all threads to stderr, which is the log; whether that is so.

    Not where somebody has a handler for it already.
    """
    if not environ.get("FLEETRUN_CONTAINER") or sys.platform != "linux":
        return False
    try:
        if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
            return False
        os.fstat(_STDERR)
        faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # stderr is closed, or no signal can be had
        return False
    return True
