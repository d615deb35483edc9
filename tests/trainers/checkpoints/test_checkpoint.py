"""Save and load in one process without a process group; jobs of several are in test_checkpoint_jobs."""

import copy
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import PATH
from trainers.checkpoints import checkpoint
from trainers.checkpoints.directory import LocalDirectory
from trainers.checkpoints.manifest import CheckpointError
from trainers.errors import NotSupportedError, UsageError
from trainers.optimizer import DistributedOptimizer

Optimizers = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Net(torch.nn.Module):
    def __init__(self, *, hidden: int = 8, sparse: bool = False) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(10, 4, sparse=sparse)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Dropout(0.5))
        self.unused = torch.nn.Linear(1, 1)
        self.tied = self.words  # one tensor by two names

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.norm(self.words(ids)))
        return result


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(10).roll(step)).square().mean().backward()
        optimizer.step()


def two_groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Net)
    groups: list[dict[str, Any]] = [{"params": model.out.parameters(), "lr": 0.3}]
    return torch.optim.SGD([*groups, {"params": model.words.parameters(), "momentum": 0.9}], lr=0.1)


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "groups": two_groups,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.95), amsgrad=True),
    "tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "wrapped": lambda model: DistributedOptimizer(torch.optim.NAdam(model.parameters(), lr=0.1)),
}


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 3])
def test_training_goes_on_bit_by_bit(tmp_path: Path, name: str, before: int) -> None:
    """Also from a checkpoint before the first step, when the optimizer has no state yet."""
    torch.manual_seed(1)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, before)
    checkpoint.save(tmp_path, before, model, optimizer)
    train(model, optimizer, 3)
    torch.manual_seed(2)
    other = Net()
    again = OPTIMIZERS[name](other)
    train(other, again, 1)
    assert checkpoint.load(tmp_path, other, again) == before
    train(other, again, 3)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    assert equal(optimizer.state_dict(), again.state_dict())


def test_sparse_gradients_keep_their_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    wanted = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(tmp_path, 2, model, optimizer)
    train(model, optimizer, 1)
    assert checkpoint.load(tmp_path, model, optimizer) == 2
    assert equal(optimizer.state_dict(), wanted)


def test_small_things_are_kept_and_dicts_filled_in_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.1)
    train_once = (optimizer.step, schedule.step)
    for act in train_once * 3:
        act()
    checkpoint.save(tmp_path, 3, model, optimizer, state={"schedule": schedule, "seen": {"epoch": 4, 7: "x"}})
    for act in train_once * 3:
        act()
    seen = {"epoch": 9, "more": 1}
    assert checkpoint.load(tmp_path, model, optimizer, state={"schedule": schedule, "seen": seen}) == 3
    assert seen == {"epoch": 4, 7: "x"}
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (3, pytest.approx(0.1))
    for act in train_once * 2:
        act()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.slow
def test_a_compiled_module_and_a_plain_one_are_the_same(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoint.save(tmp_path, 1, torch.compile(model, backend="eager"))
    other = torch.nn.Linear(2, 2)
    assert checkpoint.load(tmp_path, other) == 1
    assert torch.equal(model.weight, other.weight)


def test_without_a_checkpoint_nothing_changes(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    weight = model.weight.clone()
    assert checkpoint.load(tmp_path / "nowhere", model) is None
    assert torch.equal(model.weight, weight)
    assert not (tmp_path / "nowhere").exists()


def saved(folder: Path, steps: int = 3) -> torch.nn.Linear:
    """Checkpoints 1 to `steps`, whose weights are their numbers."""
    model = torch.nn.Linear(2, 2)
    for step in range(1, steps + 1):
        torch.nn.init.constant_(model.weight, step)
        checkpoint.save(folder, step, model, keep=5)
    return model


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_the_newest_two_stay(tmp_path: Path) -> None:
    model = saved(tmp_path)
    checkpoint.save(tmp_path, 10, model)
    assert LocalDirectory(tmp_path).complete() == ["step-00000010", "step-00000003"]


def test_a_damaged_one_is_passed_over_and_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path)
    flip(tmp_path / "step-00000003" / "__0_0.distcp")
    (tmp_path / "step-00000002" / "checkpoint.json").unlink()
    (tmp_path / "step-00000004.01234567.tmp").mkdir()
    assert checkpoint.load(tmp_path, model) == 1
    assert model.weight[0, 0].item() == 1
    told = capfd.readouterr().err
    assert "step-00000003 is skipped" in told
    assert "step-00000002 is skipped" in told
    assert "step-00000004.01234567.tmp is ignored, because its save was interrupted" in told
    checkpoint.save(tmp_path, 2, model)
    assert checkpoint.load(tmp_path, model) == 2
    checkpoint.save(tmp_path, 3, model)
    assert LocalDirectory(tmp_path).complete() == ["step-00000003", "step-00000002"]


def test_when_all_are_damaged_training_does_not_begin_anew_unasked(tmp_path: Path) -> None:
    model = saved(tmp_path, 2)
    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}" / ".metadata")
    with pytest.raises(CheckpointError, match=r"All 2 checkpoints in .* are damaged"):
        checkpoint.load(tmp_path, model)


def test_a_step_is_saved_once_and_no_older_one_after_it(tmp_path: Path) -> None:
    model = saved(tmp_path)
    torch.nn.init.constant_(model.weight, 9)
    checkpoint.save(tmp_path, 3, model)
    checkpoint.load(tmp_path, model)
    assert model.weight[0, 0].item() == 3
    with pytest.raises(
        UsageError, match=r"has a checkpoint of step 3, but this is step 2\. .* may belong to another"
    ):
        checkpoint.save(tmp_path, 2, model)


def test_a_step_of_another_run_is_neither_kept_nor_replaced(tmp_path: Path) -> None:
    """It was said to be complete and durable, with the weights of the other run."""
    model = saved(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    torch.nn.init.constant_(model.weight, 9)
    words = r"second has a checkpoint of step 3, which this run neither saved nor loaded"
    with pytest.raises(UsageError, match=words):
        checkpoint.save(tmp_path / "second", 3, model)
    checkpoint.save(tmp_path / "second", 3, model, background=True)
    with pytest.raises(UsageError, match=words):
        checkpoint.wait()
    assert checkpoint.load(tmp_path / "second", model) == 3
    assert model.weight[0, 0].item() == 3
    assert checkpoint.save(tmp_path / "second", 3, model) == str(tmp_path / "second" / "step-00000003")
    checkpoint.save(tmp_path / "second", 4, model)
    checkpoint.save(tmp_path / "second", 4, model)


def test_a_save_that_fails_leaves_what_there_was(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    with pytest.raises(UsageError, match=r"seen\.deep is of type Linear"):
        checkpoint.save(tmp_path, 2, model, state={"seen": {"deep": [model]}})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        checkpoint.save(tmp_path / "file", 2, model)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Net(hidden=9), r"out\.0\.bias is \[8\] in the saved model and \[9\] in this"),
        (torch.nn.Linear(2, 2), r"another model: bias is missing in the saved model; .* and \d+ more"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: torch.nn.Module, words: str) -> None:
    checkpoint.save(tmp_path, 1, Net())
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(tmp_path, other)


def test_what_was_not_saved_cannot_be_loaded(tmp_path: Path) -> None:
    model = Net()
    checkpoint.save(tmp_path / "a", 1, model)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        checkpoint.load(tmp_path / "a", model, OPTIMIZERS["sgd"](model))
    with pytest.raises(CheckpointError, match="saved without sampler"):
        checkpoint.load(tmp_path / "a", model, state={"sampler": {}})
    checkpoint.save(tmp_path / "b", 1, model, OPTIMIZERS["groups"](model))
    with pytest.raises(CheckpointError, match="3 parameters in 2 groups, but this optimizer has 7 in 1"):
        checkpoint.load(tmp_path / "b", model, OPTIMIZERS["sgd"](model))
    assert checkpoint.load(tmp_path / "b", model) == 1


@pytest.mark.parametrize("step", [-1, 1.0, "1", True])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match=f"The step of a checkpoint is {re.escape(repr(step))}"):
        checkpoint.save(tmp_path, step, torch.nn.Linear(1, 1))


class Odd(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return {"a": 1}

    def set_extra_state(self, state: object) -> None:
        raise AssertionError(state)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((5,), {}, UsageError, "must be a torch.nn.Module, not 5"),
        ((torch.nn.Linear(1, 1), 5), {}, UsageError, "must be one of torch's, not 5"),
        ((torch.nn.Linear(1, 1),), {"state": {"x": 5}}, UsageError, "x=5 cannot be kept"),
        ((torch.nn.Linear(1, 1),), {"keep": 0}, UsageError, "keep is 0"),
        ((Odd(1, 1),), {}, NotSupportedError, "_extra_state in the model's state is a .* must be a tensor"),
        (
            (torch.nn.Linear(1, 1), torch.optim.SGD(torch.nn.Linear(1, 1).parameters())),
            {},
            UsageError,
            "parameters of shapes .* that the model lacks",
        ),
    ],
)
def test_what_cannot_be_saved(
    tmp_path: Path, arguments: tuple[Any, ...], options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        checkpoint.save(tmp_path, 1, *arguments, **options)
    assert list(tmp_path.iterdir()) == []


PICKLED = """
import sys
from pathlib import Path
import torch
from trainers import fleet
from trainers.checkpoints import checkpoint
assert "torch.distributed.checkpoint" not in sys.modules
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
checkpoint.save("saved", 1, model, optimizer)
named = []
sys.addaudithook(lambda event, args: named.append(args) if event == "pickle.find_class" else None)
assert checkpoint.load("saved", model, optimizer) == 1
assert not named, named
checkpoint.save("saved", 2, model, optimizer, background=True)
"""


@pytest.mark.slow
def test_loading_runs_no_code_that_came_with_the_checkpoint(tmp_path: Path) -> None:
    """And torch's part of it is imported by the first that saves or loads, not before."""
    done = subprocess.run(
        [sys.executable, "-c", PICKLED],
        cwd=tmp_path,
        env={"PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    # The end of the process has waited for what was still being saved.
    assert LocalDirectory(tmp_path / "saved").complete() == ["step-00000002", "step-00000001"]
