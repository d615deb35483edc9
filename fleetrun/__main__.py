"""`fleetrun` and `python -m fleetrun`: the same command. Forks the guard before anything large is
imported.
"""

import os
import sys

from fleetrun.pod.guardian import flush, guarded
from fleetrun.pod.signals import Signals


def main() -> None:
    code = guarded(_command)
    flush()
    os._exit(code)


def _command(signals: Signals, guard: int) -> int:
    from fleetrun.cli import main as command

    return command(sys.argv[1:], os.environ, lambda resolved: _launch(resolved, signals, guard))


def _launch(resolved: object, signals: Signals, guard: int) -> int:
    from fleetrun.launch import run

    return run(resolved, signals, guard)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
