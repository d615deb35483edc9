"""Hooks that a process of a job installs for its launcher: the error file at its end, its stacks on a
signal.

Standard library only, and little of it: every script that imports `trainers` runs this, also a reader that
is started once for every file. The hooks that were there before are called as well.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fleetrun.envs.channels import STACKS_SIGNAL, error_file, inside_container, write_dismissed, write_error

# ---- The error file: written for the launcher when a process ends, in torchrun's format

_failed = False


def failed() -> bool:
    """Whether an uncaught exception, or sys.exit with something else than 0, is ending this process."""
    return _failed


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
            callstack = "".join(traceback.format_exception(kind, error, trace))
            _write_error_file(Path(path), write_error(f"{kind.__name__}: {error}", callstack, time.time_ns()))
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
    """For a server that all its trainers have dismissed: the launcher must not take its end for a failure."""
    path = error_file(os.environ)
    if path:
        _write_error_file(Path(path), write_dismissed())


def _write_error_file(path: Path, text: str) -> None:
    try:
        aside = path.with_name(f"{path.name}.{os.getpid()}")
        aside.touch(mode=0o600)  # a traceback may hold private values
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)  # the launcher never reads half a file
    except OSError as problem:
        sys.stderr.write(f"fleetrun: the last words could not be written to {path}: {problem}\n")


# ---- Stacks on request, also while the process is stuck in C code and a debugger may not attach

_STDERR = 2


def install_stack_dump(environ: Mapping[str, str]) -> bool:
    """From now on `NUMBER` writes the stacks of all threads to stderr, which is the log; whether that is so.

    Not where somebody has a handler for it already.
    """
    if not inside_container(environ) or sys.platform != "linux":
        return False
    try:
        if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
            return False
        os.fstat(_STDERR)
        faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # stderr is closed, or no signal can be had
        return False
    return True
