"""Checkpoints of jobs under the real launcher, killed again and again."""

import re
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import pytest
import torch

from fleetrun.envs.contract import Role
from tests.support.cluster import ROOT
from tests.support.command import Fleetrun
from tests.support.forking import Forker
from tests.support.scripts.checkpoint_cases import KILLS, STEPS
from tests.support.stores import register
from tests.support.traces import wait_until
from trainers.checkpoints.directory import open_directory, step_of

pytestmark = pytest.mark.slow
BOUND = 250.0
CASES = ("-m", "tests.support.scripts.checkpoint_cases")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Fleetrun]:
    with Fleetrun(tmp_path, path=[ROOT]) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with forker.job(folder, trainers=2, servers=0) as job:
        job.start_all([*CASES, "killed", str(folder), "-1", str(folder / "saved"), "sync"])
        job.expect_success(BOUND)
    return torch.load(folder / "final.pt")


def assert_as_if_undisturbed(
    said: str, where: str, folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    deaths = re.findall(r"^seed .* dies .*$", said, re.MULTILINE)
    print(*deaths, sep="\n")
    assert len(deaths) == KILLS
    final = torch.load(folder / "final.pt")
    assert all(torch.equal(final[name], value) for name, value in undisturbed.items())
    checkpoints = open_directory(where)
    assert [step_of(name) for name in checkpoints.complete()] == [STEPS, STEPS - 3]
    assert checkpoints.interrupted() == []


@pytest.mark.parametrize(("seed", "how"), [(1, "sync"), (2, "async")])
def test_a_job_killed_again_and_again_ends_as_if_undisturbed(
    command: Fleetrun, undisturbed: dict[str, torch.Tensor], seed: int, how: str
) -> None:
    where = str(command.folder / "saved")
    words = (*CASES, "killed", str(command.folder), str(seed), where, how)
    launch = command.start("--nproc_per_node", "2", *words, env={"OMP_NUM_THREADS": "1"})
    assert launch.wait(BOUND) == 0, launch
    assert launch.err.count("SIGKILL") >= KILLS, launch
    said = command.log("trainer.0") + command.log("trainer.1")
    assert_as_if_undisturbed(said, where, command.folder, undisturbed)


@pytest.mark.parametrize(("seed", "store"), [(3, "objects://"), (4, "torn://")])
def test_so_it_does_over_stores_whoever_starts_it_again(
    forker: Forker, tmp_path: Path, undisturbed: dict[str, torch.Tensor], seed: int, store: str
) -> None:
    register()
    where = f"{store}{tmp_path}/saved"
    said = []
    for attempt in range(KILLS + 1):
        logs = tmp_path / f"attempt-{attempt}"
        logs.mkdir()
        with forker.job(logs, trainers=2, servers=0) as job:
            for rank in range(2):
                words = [*CASES, "killed", str(tmp_path), str(seed), where, "async"]
                job.start(words, Role.TRAINER, rank, restart_count=attempt)
            if attempt == KILLS:
                job.expect_success(BOUND)
            else:
                wait_until(
                    lambda started=job.trainers: any(each.popen.poll() == -SIGKILL for each in started),
                    lambda started=job.trainers: "\n".join(each.output for each in started),
                )
        said += [trainer.output for trainer in job.trainers]
    assert_as_if_undisturbed("".join(said), where, tmp_path, undisturbed)
