"""Saves beside the training, in one process: what is saved is what was there at the call."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cluster import PATH
from tests.support.stores import GATE, register
from trainers.checkpoints import checkpoint
from trainers.checkpoints.checkpoint import Background
from trainers.checkpoints.manifest import CheckpointError
from trainers.errors import UsageError


@pytest.fixture
def where(tmp_path: Path) -> Iterator[str]:
    register()
    GATE.clear()
    yield f"gated://{tmp_path.name}/saved"
    GATE.set()
    checkpoint.wait()


@pytest.mark.slow
def test_what_is_saved_is_what_was_there_at_the_call(where: str) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):  # in the second round the memory of the first is used again
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        numbers = {"epoch": 1, "deep": {"a": [1]}}
        torch.manual_seed(5)
        weight, squares = model.weight.detach().clone(), optimizer.state[model.weight]["exp_avg_sq"].clone()
        step = 1 if not GATE.is_set() else 2
        checkpoint.save(where, step, model, optimizer, state={"numbers": numbers}, background=True)
        torch.rand(1)
        torch.nn.init.zeros_(model.weight)
        optimizer.state[model.weight]["exp_avg_sq"].zero_()
        optimizer.param_groups[0]["lr"] = 7.0
        numbers["epoch"] = 2
        numbers["deep"]["a"].append(2)  # type: ignore[index]  # the test's own
        GATE.set()
        path = checkpoint.wait()
        assert path is not None
        assert path.startswith(f"{where}/step-0000000{step}")
        assert checkpoint.load(where, model, optimizer, state={"numbers": numbers}) == step
        assert torch.equal(model.weight, weight)
        assert torch.equal(optimizer.state[model.weight]["exp_avg_sq"], squares)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert numbers == {"epoch": 1, "deep": {"a": [1]}}
        assert torch.equal(torch.rand(4), torch.rand(4, generator=torch.Generator().manual_seed(5)))


def test_a_save_waits_for_the_one_before(where: str) -> None:
    model, saved = torch.nn.Linear(1, 1), []
    for step in (1, 2, 3):
        torch.nn.init.constant_(model.weight, step)
        if step == 2:
            threading.Thread(target=GATE.set).start()
        checkpoint.save(where, step, model, keep=3, background=True)
    checkpoint.wait()
    assert checkpoint.wait() is None
    for step in (3, 2, 1):
        assert checkpoint.load(where, model) == step
        saved.append(model.weight.item())
        newest = checkpoint.open_directory(where)
        newest.discard(newest.complete()[0])
    assert saved == [3, 2, 1]


CALLS: dict[str, Callable[[Path, torch.nn.Module], object]] = {
    "save": lambda folder, model: checkpoint.save(folder / "good", 1, model),
    "start": lambda folder, model: checkpoint.save(folder / "good", 1, model, background=True),
    "load": lambda folder, model: checkpoint.load(folder / "good", model),
    "wait": lambda folder, model: checkpoint.wait(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_failure_is_raised_by_the_next_call_once(tmp_path: Path, name: str) -> None:
    model = torch.nn.Linear(1, 1)
    (tmp_path / "file").touch()
    checkpoint.save(tmp_path / "file" / "below", 1, model, background=True)
    with pytest.raises(CheckpointError, match="Not a directory"):
        CALLS[name](tmp_path, model)
    assert not (tmp_path / "good").exists()
    CALLS[name](tmp_path, model)
    checkpoint.wait()


def test_what_cannot_be_saved_is_known_at_once_or_at_the_next_call(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UsageError, match="keep is 0"):
        checkpoint.save(tmp_path, 1, model, keep=0, background=True)
    checkpoint.save(tmp_path, 1, model, state={"seen": {"deep": model}}, background=True)
    with pytest.raises(UsageError, match=r"seen\.deep is of type Linear"):
        checkpoint.wait()
    assert list(tmp_path.iterdir()) == []


def test_one_at_a_time() -> None:
    background = Background()
    assert background.wait() is None
    background.start(lambda: "here")
    assert background.wait() == "here"
    assert background.wait() is None


LOST = """
import torch
from trainers.checkpoints import checkpoint
open("file", "w").close()
checkpoint.save("file/below", 1, torch.nn.Linear(1, 1), background=True)
print("at the end")
"""


@pytest.mark.slow
def test_a_process_whose_last_save_failed_does_not_end_with_0(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOST],
        cwd=tmp_path,
        env={"PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "at the end\n")
    assert "CheckpointError: " in done.stderr
    assert "Not a directory" in done.stderr
