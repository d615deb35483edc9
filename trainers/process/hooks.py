"""Hooks that a process of a job installs for its launcher: the error file and the exit code at its end, its
stacks on a signal.

Standard library only, and little of it: every script that imports `trainers` runs this, also a reader that
is started once for every file. The hooks that were there before are called as well.
"""

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fleetrun.aliases import Callback, Texts
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
        message, helps = f"{kind.__name__}: {error}", getattr(error, "restart_helps", True)
        if path:
            callstack = "".join(traceback.format_exception(kind, error, trace)) if helps else ""
            text = write_error(message, callstack, time.time_ns(), restart_helps=helps)
            _write_error_file(Path(path), text)
        if helps:
            previous(kind, error, trace)
        else:  # its cause is not in the script: see FleetError
            sys.stderr.write(f"{message}\n")

    leave = sys.exit

    def exit(code: Any = None, /) -> NoReturn:
        global _failed
        _failed = _failed or code not in (None, 0, False)
        leave(code)

    sys.exit = exit
    hook._fleetrun = True  # type: ignore[attr-defined]  # a mark on a function, so that it is installed once
    sys.excepthook = hook


def at_exit(finish: Callback) -> None:
    """Call `finish` when the interpreter exits, as `atexit` does. If it raises, the process has failed: the
    error is printed and written to the error file, and the exit code is not 0, whatever the script's own is.
    """

    def run() -> None:
        try:
            finish()
        except BaseException as error:  # noqa: BLE001  # atexit would print it and leave the exit code at 0
            sys.excepthook(type(error), error, error.__traceback__)
            _fail_at_exit()

    atexit.register(run)


_EXIT_CODE = 1


def _fail_at_exit() -> None:
    """Make the exit code of this process 1, when the interpreter exits already. Python offers only
    `os._exit`, which would skip the other hooks and lose what is buffered in open files; so C's `exit` calls
    `_exit(1)`, after Python has finished, and after C's own buffers are written.
    """
    import ctypes

    try:
        libc = ctypes.CDLL(None)
        register, leave, flush = libc.__cxa_atexit, libc._exit, libc.fflush
    except (OSError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_CODE)
    register(leave, ctypes.c_void_p(_EXIT_CODE), None)
    register(flush, None, None)  # the last one registered is called first


def leave_dismissed() -> None:
    """For a server that all its trainers have dismissed: the launcher must not take its end for a failure."""
    path = error_file(os.environ)
    if path:
        _write_error_file(Path(path), write_dismissed())


def _write_error_file(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        aside.touch(mode=0o600)  # a traceback may hold private values
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)  # the launcher never reads half a file
    except OSError as problem:
        with contextlib.suppress(OSError):
            aside.unlink()
        sys.stderr.write(f"fleetrun: the last words could not be written to {path}: {problem}\n")


# ---- Stacks on request, also while the process is stuck in C code and a debugger may not attach

_STDERR = 2


def install_stack_dump(environ: Texts) -> bool:
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
