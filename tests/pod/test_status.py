"""Which moves are legal, and what an exit says."""

import pytest

from fleetrun.pod.container import Status, move
from fleetrun.pod.process import Exit, signal_name

LEGAL = {
    "uninit": "ready failed",
    "ready": "running terminating failed",
    "running": "terminating restarting completed failed",
    "terminating": "restarting completed failed",
    "restarting": "ready running terminating failed",
    "completed": "restarting",
    "failed": "restarting",
}


@pytest.mark.parametrize("now", Status)
@pytest.mark.parametrize("then", Status)
def test_moves(now, then):
    if then in LEGAL[now].split():
        assert move(now, then) is then
    else:
        with pytest.raises(RuntimeError, match=f"illegal move from {now} to {then}"):
            move(now, then)


@pytest.mark.parametrize(
    ("code", "ok", "signal", "shell_code", "words"),
    [
        (0, True, None, 0, "exited with code 0"),
        (3, False, None, 3, "exited with code 3"),
        (255, False, None, 255, "exited with code 255"),
        (-9, False, 9, 137, "was killed by SIGKILL"),
        (-15, False, 15, 143, "was killed by SIGTERM"),
        (-40, False, 40, 168, "was killed by signal 40"),
    ],
)
def test_exits(code, ok, signal, shell_code, words):
    end = Exit(code)
    assert (end.ok, end.signal, end.shell_code, str(end)) == (ok, signal, shell_code, words)


def test_signals_have_names():
    assert (signal_name(2), signal_name(99)) == ("SIGINT", "signal 99")
