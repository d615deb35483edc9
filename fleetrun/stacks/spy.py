"""py-spy: finds it, runs it on one process within a bound, and says in words why it had no success. Leaves
processes as they were.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sysconfig
from collections.abc import Mapping

from fleetrun.stacks.processes import state_of, waits_for
from fleetrun.stacks.traces import Thread, of_pyspy

MISSING = "py-spy is not installed: pip install 'fleetrun[monitor]'"
_WHY = {
    "ermission": "this user may not look into it (kernel.yama.ptrace_scope, or another user's process)",
    "not permitted": "this user may not look into it (kernel.yama.ptrace_scope, or another user's process)",
    "find python version": "it is no Python, or one that py-spy does not know",
    "No such": "it has ended",
}
_LONGEST = 200  # characters
_DEAF = 2.0  # seconds for a killed py-spy to go


def find() -> str | None:
    """The program: of this Python first, then of the PATH."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


class SpyError(Exception):
    """Why py-spy did not say where a process stands."""


def dump(program: str, pid: int, env: Mapping[str, str], within: float) -> tuple[Thread, ...]:
    """The threads of a Python process. Raises SpyError, after about `within` seconds at the latest.

    py-spy stops what it looks at for a moment. A process that is stopped already, or deaf in the kernel, it
    would wait for without end; that one stands still anyway, and is read as it is.
    """
    before = state_of(pid)
    still = before in ("T", "t", "D")
    try:
        return of_pyspy(_run([program, "dump", "--json", "--pid", str(pid), *_quietly(still)], env, within))
    except ValueError as error:
        raise SpyError(f"py-spy's answer cannot be read: {error}") from None
    finally:
        if before != "T" and _stops(pid):  # py-spy was killed between its stop and its continue
            _continue(pid)


def _quietly(still: bool) -> tuple[str, ...]:
    return ("--nonblocking",) if still else ()


def _run(argv: list[str], env: Mapping[str, str], within: float) -> str:
    try:
        popen = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise SpyError(f"py-spy cannot be started: {error.strerror}") from None
    try:
        out, err = popen.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        _kill(popen)
        raise SpyError(f"py-spy did not answer within {within:g} s") from None
    if popen.returncode != 0:
        raise SpyError(_why(err.decode(errors="replace")))
    return out.decode(errors="replace")


def _kill(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    for stream in (popen.stdout, popen.stderr):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may itself be deaf in the kernel
        popen.wait(_DEAF)


def _why(said: str) -> str:
    found = next((why for sign, why in _WHY.items() if sign in said), None)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return found or f"py-spy: {lines[0] if lines else 'no word'}"[:_LONGEST]


def _stops(pid: int) -> bool:
    """Whether it is stopped, or will be once the kernel lets go of it."""
    return waits_for(pid, signal.SIGSTOP) or state_of(pid) == "T"


def _continue(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGCONT)
