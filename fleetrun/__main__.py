"""`fleetrun` and `python -m fleetrun`: the same command. Forks the guard before anything large is
imported.
"""

import os
import sys

from fleetrun.pod.guardian import Guard, flush, guarded
from fleetrun.pod.signals import Signals


def main() -> None:
    _open_standard_streams()
    code = guarded(_command)
    flush()
    os._exit(code)


def _open_standard_streams() -> None:
    """Started with one of them closed (`2>&-`), the next file to be opened would take its place."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _command(signals: Signals, guard: Guard) -> int:
    from fleetrun.cli import main as command

    return command(sys.argv[1:], os.environ, lambda resolved: _launch(resolved, signals, guard))


def _launch(resolved: object, signals: Signals, guard: Guard) -> int:
    from fleetrun.launch import run

    return run(resolved, signals, guard)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
