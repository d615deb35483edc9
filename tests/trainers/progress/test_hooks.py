"""What fleet's optimizers, programs and loops tell by themselves."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import trainers
from trainers import fleet, progress, static
from trainers.collective.data_parallel import Cadence
from trainers.collective.stepping import SteppingOptimizer
from trainers.data import loop
from trainers.data.loop import train_from_dataset
from trainers.data.shard import shard_loader
from trainers.optimizer import DistributedOptimizer
from trainers.progress.meter import Meter


class Told:
    """The reports of this process, every one of which is sent."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def send(self, datagram: bytes) -> bool:
        self.said.append(json.loads(datagram))
        return True

    def close(self) -> None: ...

    @property
    def last(self) -> dict[str, Any]:
        return self.said[-1]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    made = Told()
    monkeypatch.setattr(progress, "meter", Meter("p.trainer.0", made, made.clock))  # type: ignore[arg-type]
    loop._steps.cache_clear()  # tests before this one have made steps too
    return made


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def sgd(param: torch.nn.Parameter) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.SGD([param], lr=0.1))


def test_a_step_is_counted_and_minimize_knows_the_loss(told):
    param = weight()
    optimizer = sgd(param)
    optimizer.minimize(param.sum())
    assert (told.last["step"], told.last["loss"]) == (1, 3.0)
    param.sum().backward()
    optimizer.step()
    assert told.last["step"] == 2
    assert "loss" not in told.last


def test_a_schedulers_step_is_none(told):
    optimizer = sgd(weight())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    schedule.step()
    optimizer.step()
    assert told.last["step"] == 2


def test_two_optimizers_of_one_training_step_together(told):
    first, second = sgd(weight()), sgd(weight())
    for _ in range(3):
        first.step()
        second.step()
    assert told.last["step"] == 3


def test_merging_gradients_is_a_step(told):
    param = weight()
    optimizer = SteppingOptimizer(torch.optim.SGD([param], lr=0.1), Cadence(2), lambda: None)
    for _ in range(4):
        optimizer.minimize(param.sum())
    assert told.last["step"] == 4
    assert told.last["loss"] < 3.0


def test_a_scaler_that_skips_a_step_has_made_none(told):
    param = weight()
    optimizer = sgd(param)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert told.last["step"] == 2


class Examples:
    """Three batches of four examples, as a data set gives them."""

    def __iter__(self):
        return iter([[0.5] * 4] * 3)


def test_a_loop_counts_steps_and_examples(told):
    train_from_dataset(lambda batch: {"loss": 0.5, "auc": 0.7}, Examples())
    assert (told.last["step"], told.last["samples"], told.last["loss"]) == (3, 12, 0.5)
    train_from_dataset(lambda batch: torch.tensor(0.25), Examples())
    assert (told.last["step"], told.last["samples"], told.last["loss"]) == (6, 24, 0.25)


def test_a_loop_around_an_optimizer_counts_no_step_twice(told):
    param = weight()
    optimizer = sgd(param)
    for _ in range(100):
        optimizer.step()
    train_from_dataset(lambda batch: optimizer.minimize(param.sum()), Examples())
    assert told.last["step"] == 103


def test_batches_of_a_loader_count_unless_somebody_knows_better(told):
    optimizer = sgd(weight())
    loader = shard_loader(range(12), 4, rank=0, trainers=1)
    for _ in loader:
        optimizer.step()
    with torch.no_grad():
        assert len(list(loader)) == 3
    assert told.last["samples"] == 12
    train_from_dataset(lambda batch: optimizer.step(), loader)
    assert told.last["samples"] == 12, "as long as all batches are: the loop's own count"
    fleet.report(samples=5)
    assert told.last["samples"] == 5


def test_inference_is_a_sign_of_life_and_no_step(told):
    with torch.no_grad():
        train_from_dataset(lambda batch: {"loss": 0.5}, Examples())
    assert len(told.said) == 3
    assert all(said.keys().isdisjoint({"step", "samples", "loss"}) for said in told.said)


def network(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"cost": model(x).mean()}


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_executor_counts_its_steps_of_training(told, wrapped):
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    program = static.Program(
        model, [static.data("x", [None, 3], "float32")], network, loss="cost",
        optimizer=DistributedOptimizer(inner) if wrapped else inner,
    )  # fmt: skip
    executor = static.Executor("cpu")
    feed = {"x": np.ones((5, 3), np.float32)}
    for _ in range(3):
        (cost,) = executor.run(program, feed, ["cost"])
        executor.run(program.clone(for_test=True), feed)
    steps = [said for said in told.said if "step" in said]
    assert (steps[-1]["step"], steps[-1]["samples"]) == (3, 15)
    assert next(said["loss"] for said in reversed(told.said) if "loss" in said) == pytest.approx(float(cost))


def test_a_save_and_a_load_are_activities(told, tmp_path):
    model, optimizer = torch.nn.Linear(3, 1), None
    from trainers.checkpoints import checkpoint

    checkpoint.save(tmp_path / "saved", 7, model, optimizer)
    doing = [said["activity"]["what"] for said in told.said if said["activity"]]
    assert doing == ["saving the checkpoint of step 7"]
    assert told.last["activity"] is None


def test_fleet_has_the_same_calls(told):
    fleet.report(step=12, samples=4, loss=0.5, auc=0.7)
    assert (told.last["step"], told.last["values"]) == (12, {"auc": 0.7})
    fleet.log_scalar("lr", 0.1)
    assert told.last["values"] == {"lr": 0.1}
    fleet.heartbeat()
    assert told.last["values"] == {}
    with fleet.activity("indexing", of=3) as indexing:
        indexing.advance()
        assert told.last["activity"] == {"what": "indexing", "done": 1, "of": 3}
    assert trainers.progress is progress
