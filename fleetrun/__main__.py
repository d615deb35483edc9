"""Run `fleetrun` and `python -m fleetrun`, which are the same command. Fork the guard before any large
import.
"""

import os
import sys

TYPE_CHECKING = False

try:
    import gc

    from fleetrun.pod.guard import Guard, Signals, flush, guarded
    from fleetrun.verbs import asked
except KeyboardInterrupt:  # Ctrl-C before a handler is installed
    os._exit(130)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from fleetrun.envs.settings.command_line import EngineValue


def main() -> None:
    try:
        gc.disable()  # until all imports are done: modules stay alive, and scanning them takes time
        _open_standard_streams()
        code = guarded(_command) if asked(sys.argv[1:]) is None else _answer()
    except KeyboardInterrupt:  # Ctrl-C before a handler is installed
        code = 130
    flush()
    os._exit(code)


def _answer() -> int:
    """Run a command that does not launch a job, and so works without a guard."""
    from fleetrun.cli import main as command

    return command(sys.argv[1:], os.environ, _no_launch)


def _no_launch(resolved: object) -> int:
    raise AssertionError("a command that starts no job has launched one")


def _open_standard_streams() -> None:
    """Open closed standard streams (`2>&-`). Otherwise the next opened file would get the descriptor of a
    stream.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel assigns the lowest free descriptor, which is this one
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def _command(signals: Signals, guard: Guard) -> int:
    from fleetrun.cli import main as command

    return command(
        sys.argv[1:], os.environ, lambda resolved: _launch(resolved, signals, guard), _engine_values
    )


def _engine_values(environ: "Mapping[str, str]", but: "Collection[str]") -> "Mapping[str, EngineValue]":
    from fleetrun.schedulers.placing import place

    return place(environ, but)


def _launch(resolved: object, signals: Signals, guard: Guard) -> int:
    from fleetrun.launcher.local import run

    gc.freeze()  # the objects of these imports also stay alive
    gc.enable()
    return run(resolved, signals, guard)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
