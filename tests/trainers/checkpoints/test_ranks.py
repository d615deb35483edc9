"""Checkpoints of jobs of several processes: resized, damaged, written by some only."""

import re
from pathlib import Path

import pytest
import torch

from tests.support.forking import Forker
from tests.support.scripts.checkpoint_cases import BATCH, data, five_steps, small
from tests.support.training import furthest
from trainers.data.sampler import ElasticBatchSampler

pytestmark = pytest.mark.slow


def run(forker: Forker, folder: Path, count: int, case: str, *words: object) -> list[str]:
    """What each rank said, to its end. The job works in `folder`, its logs are apart from those of others."""
    logs = folder / f"logs.{len(list(folder.glob('logs.*')))}"
    logs.mkdir()
    with forker.job(logs, trainers=count, servers=0) as job:
        script = ("-m", "tests.support.scripts.checkpoint_cases", case, folder, *words)
        job.start_all(list(map(str, script)))
        job.expect_success()
        return [trainer.output for trainer in job.trainers]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").iterdir())


def test_training_goes_on_with_another_number_of_processes(forker: Forker, tmp_path: Path) -> None:
    """Two, three, one: all as one process that was never stopped, but for the order of additions."""
    for count, steps in ((2, 8), (3, 17), (1, 30)):
        run(forker, tmp_path, count, "worlds", steps)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    model.load_state_dict(torch.load(tmp_path / "first.pt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler, (x, y) = ElasticBatchSampler(130, BATCH, rank=0, trainers=1, seed=3), data().tensors
    batches = [batch for _ in range(5) for batch in sampler.batches(list(sampler))]
    for batch in batches[:30]:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    assert furthest(torch.load(tmp_path / "final.pt"), model.state_dict()) < 1e-5


def test_ranks_pass_over_what_one_has_found_damaged_and_save_no_half_state(
    forker: Forker, tmp_path: Path
) -> None:
    outputs = run(forker, tmp_path, 2, "agree")
    for said in outputs:
        assert re.findall(r"^(loaded .*|again .*)$", said, re.MULTILINE) == ["loaded 1 1", "again 2"]
        assert "refused Rank 0 has optimizer.state." in said
    assert "step-00000002 is skipped, and the one before" in outputs[0]
    assert steps_in(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_directory_that_is_not_shared_is_found_out(forker: Forker, tmp_path: Path) -> None:
    for said in run(forker, tmp_path, 2, "apart"):
        assert "CheckpointError" in said, said
        assert "loaded None" in said


def test_one_rank_that_cannot_write_leaves_what_there_was(forker: Forker, tmp_path: Path) -> None:
    outputs = run(forker, tmp_path, 2, "full")
    for said in outputs:
        for how in ("at once", "beside"):
            assert f"{how}: CheckpointError The checkpoint could not be written" in said, said
        assert "rank 1: [Errno 27] File too large" in said
        assert "MB are free there" in said
    assert "there step-00000001\n" in outputs[0]
    assert steps_in(tmp_path) == ["step-00000001", "step-00000003"]


def test_what_only_one_rank_can_see_is_answered_alike_on_all(forker: Forker, tmp_path: Path) -> None:
    """A rank that was refused alone left the others waiting in the save or the load, or training on."""
    first, second = (
        re.findall(r"^([01] .*?|load): (.*)$", said, re.MULTILINE)
        for said in run(forker, tmp_path, 2, "refused")
    )
    assert first == second
    found, uncounted = dict(first), "Batches were taken without being counted"
    for victim in (0, 1):
        # The state is rank 0's: what another rank has looked at does not matter.
        for name in ("save", "later", "memory", "memory only"):
            answer = found[f"{victim} peek, {name}"]
            assert answer == uncounted if victim == 0 else answer in ("saved", "done")
        assert found[f"{victim} no object"].startswith("sampler=3 cannot be kept")
        assert found[f"{victim} none to keep"].startswith("keep is 0")
        assert found[f"{victim} sampler"] == "saved"
        for name in ("foreign", "load foreign"):
            assert found[f"{victim} {name}"].startswith("The optimizer has parameters of shapes")
        assert found[f"{victim} load more"].startswith("The checkpoint was saved without more")
        assert found[f"{victim} load other"].startswith("The sampler's state belongs to other data")
        assert found[f"{victim} load broken"] == f"rank {victim}: ValueError: not today"
    assert found["load"] == "saved"


def test_shards_of_two_are_loaded_by_one_and_back(forker: Forker, tmp_path: Path) -> None:
    """FSDP2's parameters and ZeRO's state, saved in the background."""
    for count in (2, 1, 2):
        first, *_ = run(forker, tmp_path, count, "sharded")
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for start in (0, 5, 10):
        five_steps(model, optimizer, start)
    for name in ("parts", "whole"):
        assert furthest(torch.load(tmp_path / f"{name}.pt"), model.state_dict()) < 1e-6
    assert f"{tmp_path}/whole/step-00000015 with the state of 1\n" in first  # the largest
