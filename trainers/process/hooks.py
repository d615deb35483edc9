"""Install hooks in a process of a job: the error file and exit code at its end, and its stacks on a signal.

The module imports only a small part of the standard library. Every script that imports `trainers` runs it,
even a reader that starts once for every file. Earlier hooks are called as well.
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
from typing import NoReturn

from fleetrun.aliases import Callback, Texts
from fleetrun.envs.channels import STACKS_SIGNAL, error_file, inside_container, write_dismissed, write_error

# ---- The error file for the launcher, in torchrun's format

_failed = False


def failed() -> bool:
    """Return True if an uncaught exception, or a nonzero sys.exit, is ending this process."""
    return _failed


def install_exit_hooks() -> None:
    """Install the hook in front of `sys.excepthook`, and record the argument of `sys.exit`, which hooks do
    not see.

    Further calls have no effect.
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
        else:  # the cause is not in the script, see FleetError
            sys.stderr.write(f"{message}\n")

    leave = sys.exit

    def exit(code: str | int | None = None, /) -> NoReturn:
        global _failed
        _failed = _failed or code not in (None, 0, False)
        leave(code)

    sys.exit = exit
    hook._fleetrun = True  # type: ignore[attr-defined]  # a mark on a function, so that it is installed once
    sys.excepthook = hook


def at_exit(finish: Callback) -> None:
    """Call `finish` when the interpreter exits, as `atexit` does.

    If it raises, the process has failed. The error is printed and written to the error file, and the exit
    code is not 0, whatever the script returned.
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
    """Set the exit code of this process to 1 during the interpreter's exit.

    Python offers only `os._exit`, which would skip other hooks and lose buffered output. C's `exit` therefore
    calls `_exit(1)`, after Python has finished and after C's own buffers are written.
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
    register(flush, None, None)  # functions run in reverse order of registration


def leave_dismissed() -> None:
    """Mark the end of a dismissed server, so that the launcher does not treat it as a failure."""
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
        sys.stderr.write(
            f"fleetrun: the last words of the process could not be written to {path}: {problem}\n"
        )


# ---- Stacks on request, even if the process is stuck in C code and a debugger may not attach

_STDERR = 2


def install_stack_dump(environ: Texts) -> bool:
    """Let STACKS_SIGNAL write the stacks of all threads to stderr, which is the log. Return True if it is
    installed.

    An existing handler stays in place.
    """
    if not inside_container(environ) or sys.platform != "linux":
        return False
    try:
        if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
            return False
        os.fstat(_STDERR)
        faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # stderr is closed, or the signal is unavailable
        return False
    return True
