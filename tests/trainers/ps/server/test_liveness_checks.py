"""Which time it is for trainers when a server checks after them."""

from trainers.ps.server.server import LivenessChecks


def test_time_passes_from_look_to_look() -> None:
    checks = LivenessChecks(0.5, 100.0)
    assert checks.wait(100.25) == 0.25
    assert checks.due(100.4) is None
    assert checks.due(100.5) == 100.5
    assert checks.due(100.9) is None
    assert checks.due(101.0) == 101.0


def test_time_in_which_the_server_stood_still_has_not_passed() -> None:
    checks = LivenessChecks(0.5, 100.0)
    assert checks.due(100.5) == 100.5
    assert checks.wait(700.0) == 0.0
    assert checks.due(700.0) == 101.0
    assert checks.due(700.4) is None
    assert checks.due(700.5) == 101.5


def test_time_in_which_nobody_waits_passes_without_looks() -> None:
    checks = LivenessChecks(0.5, 100.0)
    for now in (100.2, 100.6, 700.0):
        checks.skip(now)
    assert checks.wait(700.0) == 0.0
    assert checks.due(700.0) == 700.0
