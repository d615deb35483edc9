"""Client programs of engines (sbatch, scontrol, kubectl): run to their end, or until a signal says stop."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from fleetrun.errors import LaunchError
from fleetrun.pod.guardian import Guard
from fleetrun.pod.signals import JOB_CONTROL, PASSED_ON, Signals

_NO_ENDING = PASSED_ON | JOB_CONTROL | {signal.SIGCHLD, signal.SIGIO}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said. `code` is the shell's."""

    code: int
    out: str
    err: str


def ask(argv: Sequence[str], environ: Mapping[str, str], *, within: float = 30.0) -> str | None:
    """What a program prints; None when there is no such program, it fails, or takes longer."""
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=within, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def hand_over(
    argv: Sequence[str], text: str, environ: Mapping[str, str], signals: Signals, guard: Guard
) -> Answer:
    """Run a program with this on its stdin. Raises LaunchError when there is none, and KeyboardInterrupt when
    a signal came before its end, or the guard is gone: then it has ended too.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode("utf-8", "surrogateescape"))
        given.seek(0)
        try:
            process = subprocess.Popen(argv, env=environ, stdin=given, stdout=out, stderr=err)
        except OSError as error:
            raise LaunchError(f"cannot run {argv[0]}: {error.strerror}", hint="Is it installed?") from None
        if not _ended(process, signals, guard):
            raise KeyboardInterrupt
        return Answer(process.returncode, _text(out), _text(err))


def _ended(process: subprocess.Popen[bytes], signals: Signals, guard: Guard) -> bool:
    """Whether it came to its own end."""
    poll = select.poll()
    pidfd = os.pidfd_open(process.pid)
    poll.register(pidfd, select.POLLIN)
    poll.register(signals.fileno(), select.POLLIN)
    poll.register(guard.fileno(), select.POLLIN)
    try:
        while not any(fd == pidfd for fd, _ in poll.poll()):
            if asked_to_end(signals.read()) or guard.gone:
                process.terminate()
                return False
        return True
    finally:
        process.wait()
        os.close(pidfd)


def asked_to_end(numbers: bytes) -> list[int]:
    """Those of the signals that mean: end."""
    return [number for number in numbers if number not in _NO_ENDING]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
