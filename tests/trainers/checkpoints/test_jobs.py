"""Checkpoints of jobs of several processes under the real launcher: killed, resized, damaged."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cluster import ROOT
from tests.support.command import Fleetrun, Launch
from tests.support.scripts.checkpoint_cases import BATCH, KILLS, data, five_steps, small
from tests.support.stores import register
from tests.support.training import furthest
from trainers.checkpoints.shelf import open_shelf, step_of
from trainers.data.sampler import ElasticBatchSampler

pytestmark = pytest.mark.slow
BOUND = 110.0


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Fleetrun]:
    with Fleetrun(tmp_path, path=[ROOT]) as running:
        yield running


def run(command: Fleetrun, count: int, case: str, *words: object) -> Launch:
    script = ("-m", "tests.support.scripts.checkpoint_cases", case, *map(str, words))
    launch = command.start("--nproc_per_node", str(count), *script, env={"OMP_NUM_THREADS": "1"})
    assert launch.wait(BOUND) == 0, launch
    return launch


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The parameters of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Fleetrun(folder, path=[ROOT]) as command:
        run(command, 2, "killed", folder, -1, folder / "saved", "sync")
    return torch.load(folder / "final.pt")


@pytest.mark.parametrize(
    ("seed", "how", "store"),
    [(1, "sync", ""), (2, "async", ""), (3, "async", "objects://"), (4, "async", "torn://")],
)
def test_a_job_killed_again_and_again_ends_as_if_undisturbed(
    command: Fleetrun, undisturbed: dict[str, torch.Tensor], seed: int, how: str, store: str
) -> None:
    register()
    where = f"{store}{command.folder}/saved"
    launch = run(command, 2, "killed", command.folder, seed, where, how)
    deaths = re.findall(
        r"^seed .* dies .*$", command.log("trainer.0") + command.log("trainer.1"), re.MULTILINE
    )
    print(*deaths, sep="\n")
    assert len(deaths) == KILLS
    assert launch.err.count("SIGKILL") >= KILLS, launch
    final = torch.load(command.folder / "final.pt")
    assert all(torch.equal(final[name], value) for name, value in undisturbed.items())
    shelf = open_shelf(where)
    assert [step_of(name) for name in shelf.complete()] == [120, 117]
    assert shelf.interrupted() == []


def test_training_goes_on_with_another_number_of_processes(command: Fleetrun) -> None:
    """Two, three, one: all as one process that was never stopped, but for the order of additions."""
    for count, steps in ((2, 8), (3, 17), (1, 30)):
        run(command, count, "worlds", command.folder, steps)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model.load_state_dict(torch.load(command.folder / "first.pt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler, (x, y) = ElasticBatchSampler(130, BATCH, rank=0, trainers=1, seed=3), data().tensors
    batches = [batch for _ in range(5) for batch in sampler.batches(list(sampler))]
    for batch in batches[:30]:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    assert furthest(torch.load(command.folder / "final.pt"), model.state_dict()) < 1e-5


def test_ranks_pass_over_what_one_has_found_damaged_and_save_no_half_state(command: Fleetrun) -> None:
    run(command, 2, "agree", command.folder)
    for rank in range(2):
        assert re.findall(r"^(loaded .*|again .*)$", command.log(f"trainer.{rank}"), re.MULTILINE) == [
            "loaded 1 1",
            "again 2",
        ]
        assert "refused rank 0 has optimizer.state." in command.log(f"trainer.{rank}")
    assert "step-00000002 is passed over for the one before" in command.log("trainer.0")
    assert steps_in(command.folder) == ["step-00000001", "step-00000002"]


def test_a_directory_that_is_not_shared_is_found_out(command: Fleetrun) -> None:
    run(command, 2, "apart", command.folder)
    for rank in range(2):
        said = command.log(f"trainer.{rank}")
        assert "CheckpointError" in said, said
        assert "loaded None" in said


def test_one_rank_that_cannot_write_leaves_what_there_was(command: Fleetrun) -> None:
    run(command, 2, "full", command.folder)
    for rank in range(2):
        said = command.log(f"trainer.{rank}")
        for how in ("at once", "beside"):
            assert f"{how}: CheckpointError the checkpoint could not be written" in said, said
        assert "rank 1: [Errno 27] File too large" in said
        assert "MB are free there now" in said
    assert "there step-00000001\n" in command.log("trainer.0")
    assert steps_in(command.folder) == ["step-00000001", "step-00000003"]


def test_shards_of_two_are_loaded_by_one_and_back(command: Fleetrun) -> None:
    """FSDP2's parameters and ZeRO's state, saved in the background."""
    for count in (2, 1, 2):
        launch = run(command, count, "sharded", command.folder)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for start in (0, 5, 10):
        five_steps(model, optimizer, start)
    for name in ("parts", "whole"):
        assert furthest(torch.load(command.folder / f"{name}.pt"), model.state_dict()) < 1e-6
    assert f"{command.folder}/whole/step-00000015 with the state of 1\n" in launch.out  # the largest
