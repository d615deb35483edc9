"""All ranks leave at one step, whoever was told, and whenever."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.command import Fleetrun, Launch
from tests.support.forking import Forker

pytestmark = pytest.mark.slow
SCRIPT = ("-m", "tests.support.scripts.checkpoint_cases", "told")
LEFT = re.compile(r"^left at step (\d+) why (.*) left (.*)$", re.MULTILINE)


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Fleetrun]:
    with Fleetrun(tmp_path, path=[ROOT]) as running:
        yield running


def started(command: Fleetrun) -> Launch:
    words = ("--nproc_per_node", "2", "--stop_timeout", "60", *SCRIPT, str(command.folder))
    launch = command.start(*words, env={"OMP_NUM_THREADS": "1"})
    launch.until_out("ready")
    return launch


def left(said: str) -> tuple[str, str, str]:
    found: tuple[str, str, str] = LEFT.findall(said)[0]
    return found


def test_a_stop_is_one_step_for_all_and_leaves_a_checkpoint(command: Fleetrun) -> None:
    launch = started(command)
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143, launch
    first, second = (left(command.log(f"trainer.{rank}")) for rank in range(2))
    assert first == second
    assert first[1] in ("stop", "signal SIGTERM"), launch
    (saved,) = (command.folder / "saved").iterdir()
    assert saved.name == f"step-{int(first[0]):08d}"


def test_a_signal_to_one_rank_is_heard_by_all(forker: Forker, tmp_path: Path) -> None:
    """As Slurm's notice to one machine, of which no launcher learns."""
    with forker.job(tmp_path, trainers=2, servers=0) as job:
        job.start_all([*SCRIPT, str(tmp_path)])
        told = job.trainers[1]
        told.wait_for("ready")
        told.popen.send_signal(signal.SIGUSR1)
        job.expect_success()
        first, second = (left(trainer.output) for trainer in job.trainers)
    assert first == second
    assert first[1:] == ("signal SIGUSR1", "forever")
