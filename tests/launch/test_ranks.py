"""What the launcher prints about ranks: waits for a debugger, and diagnoses."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleetrun.envs.progress_report import Activity, Report
from fleetrun.launcher.parts import Launch, Reach
from fleetrun.launcher.ranks import Ranks
from fleetrun.pod.container import Container, Pod
from fleetrun.pod.events import Restarting, Verdict


class FakeLaunch(SimpleNamespace):
    def __init__(self) -> None:
        self.printed: list[str] = []
        self.listeners: list[Any] = []
        super().__init__(
            settings=SimpleNamespace(run_mode="ps"),
            loop=None,
            status=None,
            warn=self.printed.append,
            console=SimpleNamespace(info=self.printed.append, warning=self.printed.append),
            journal=SimpleNamespace(write=lambda *name, **fields: None),
            progress=SimpleNamespace(subscribe=self.listeners.append),
        )


@pytest.fixture
def launch() -> FakeLaunch:
    return FakeLaunch()


@pytest.fixture
def ranks(launch: FakeLaunch) -> Ranks:
    return Ranks(cast("Launch", launch), Reach())


def test_each_wait_for_a_debugger_is_printed_once(launch: FakeLaunch, ranks: Ranks) -> None:
    def report(rank: int, what: str = "") -> None:
        activity = Activity(what) if what else None
        launch.listeners[0](
            f"trainer.{rank}", Report(pod="abcdef", role="trainer", rank=rank, activity=activity)
        )

    waits = "waits for `fleetrun debug 1` at train.py:3 in main"
    for what in (waits, waits, "is debugged at train.py:3 in main", "", "loading", waits):
        report(1, what)
        report(0)
    assert launch.printed == [f"trainer 1 {waits}"] * 2
    for number in (0, 1):
        again = SimpleNamespace(spec=SimpleNamespace(name=f"trainer.{number}"))
        ranks.handle(Restarting([cast("Container", again)]))
        report(1, waits)
    assert launch.printed == [f"trainer 1 {waits}"] * 3
    ranks.set_pod(cast("Pod", SimpleNamespace(containers=[])), 0)
    report(1, waits)
    assert launch.printed == [f"trainer 1 {waits}"] * 4


def test_a_debugged_rank_is_no_hang(launch: FakeLaunch, ranks: Ranks) -> None:
    """Another node may have found it."""
    at = "/lib/fleetrun/probe/inside/fleetrun_debug.py:150 in _readable"
    for stack in ((at,), ("train.py:3 in main",)):
        ranks._warn_of(
            Verdict(kind="not entered", sentence="trainer 3 has not come", ranks=(3,), stack=stack)
        )
    assert len(launch.printed) == 1
