"""All ranks leave at one step, under the real launcher: whoever was told, and whenever."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.command import Fleetrun, Launch
from tests.support.traces import wait_until

pytestmark = pytest.mark.slow
READY = re.compile(r"^ready (\d+)$", re.MULTILINE)
LEFT = re.compile(r"^left at step (\d+) why (.*) left (.*)$", re.MULTILINE)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Fleetrun]:
    with Fleetrun(tmp_path, path=[ROOT]) as running:
        yield running


def started(command: Fleetrun) -> Launch:
    script = ("-m", "tests.support.scripts.checkpoint_cases", "told", str(command.folder))
    words = ("--nproc_per_node", "2", "--stop_timeout", "60", *script)
    launch = command.start(*words, env={"OMP_NUM_THREADS": "1"})
    launch.until_out("ready")
    return launch


def left(command: Fleetrun) -> list[tuple[str, str, str]]:
    return [LEFT.findall(command.log(f"trainer.{rank}"))[0] for rank in range(2)]


def test_a_stop_is_one_step_for_all_and_leaves_a_checkpoint(command: Fleetrun) -> None:
    launch = started(command)
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143, launch
    first, second = left(command)
    assert first == second
    assert first[1] in ("stop", "signal SIGTERM"), launch
    (saved,) = (command.folder / "saved").iterdir()
    assert saved.name == f"step-{int(first[0]):08d}"


def test_a_signal_to_one_rank_is_heard_by_all(command: Fleetrun) -> None:
    """As Slurm's notice to one machine."""
    launch = started(command)
    wait_until(lambda: READY.search(command.log("trainer.1")) is not None, launch)
    found = READY.search(command.log("trainer.1"))
    assert found is not None
    os.kill(int(found[1]), signal.SIGUSR1)
    assert launch.wait() == 0, launch
    first, second = left(command)
    assert first == second
    assert first[1:] == ("signal SIGUSR1", "forever")
