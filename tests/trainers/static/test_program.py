"""Programs and the executor: a step that trains as the same lines of a script do, a test that leaves no
trace, and what is refused before anything is trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainers import static
from trainers.data.dataset import QueueDataset
from trainers.data.loop import prefetched
from trainers.errors import NotSupportedError, UsageError
from trainers.optimizer import DistributedOptimizer

X = static.data("x", [None, 3], "float32")
Y = static.data("y", [None, 1], "float32")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)
    return torch.nn.Sequential(*layers)


def network(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
    out = model(x)
    return {"cost": (out - y).square().mean(), "out": out, "graph": float(out.requires_grad)}


def program(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any
) -> static.Program:
    return static.Program(net, [X, Y], network, loss="cost", optimizer=optimizer, **settings)


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def batch(seed: int = 0, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    return drawn[:, :3], drawn[:, 3:]


def state(net: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in net.state_dict().values()]


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, DistributedOptimizer])
def test_a_step_is_that_of_a_script(wrap: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> None:
    script, declared = model(), model()
    optimizer, exe = sgd(script), static.Executor("cpu")
    step = program(declared, wrap(sgd(declared)))
    for number in range(3):
        x, y = batch(number)
        torch.manual_seed(number)  # dropout
        loss = (script(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for param in declared.parameters():
            param.grad = torch.ones_like(param)  # of another program
        torch.manual_seed(number)
        cost, out = exe.run(step, feed={"x": x.numpy(), "y": y}, fetch_list=["cost", "out"])
        assert isinstance(cost, np.ndarray)
        assert cost == loss.detach().numpy()
        assert out.shape == (5, 1)
    assert all(torch.equal(*pair) for pair in zip(state(script), state(declared), strict=True))
    assert all(param.grad is None for param in declared.parameters())


def test_training_goes_on_in_training_mode() -> None:
    net = model()
    net.eval()
    static.Executor().run(program(net, sgd(net)), feed=batch())
    assert net.training


def test_a_test_leaves_no_trace() -> None:
    net, exe = model(), static.Executor()
    net[1].eval()  # frozen on purpose
    trains = program(net, sgd(net))
    test = trains.clone(for_test=True)
    before, modes = state(net), [module.training for module in net.modules()]
    first, second = (exe.run(test, feed=batch(), fetch_list=["out"])[0] for _ in range(2))
    assert np.array_equal(first, second), "dropout is off"
    assert all(torch.equal(*pair) for pair in zip(state(net), before, strict=True))
    assert [module.training for module in net.modules()] == modes
    kept, graph = exe.run(test, feed=batch(), fetch_list=["out", "graph"], return_numpy=False)
    assert (kept.requires_grad, float(graph)) == (False, 0)
    exe.run(trains, feed=batch())
    assert not torch.equal(net[0].weight, before[0]), "the program that was cloned still trains"
    exe.run(trains.clone(), feed=batch())
    assert test.optimizer is None
    assert trains.clone().optimizer is trains.optimizer


def test_a_step_leaves_nothing_behind_that_it_was_computed_from() -> None:
    net = model()
    values = program(net, sgd(net)).step(dict(zip("xy", batch(), strict=True)))
    assert not any(value.requires_grad for value in values.values() if isinstance(value, torch.Tensor))


def test_a_test_that_fails_leaves_the_modes_as_they_were() -> None:
    net = model()
    net[1].eval()
    modes = [module.training for module in net.modules()]
    with pytest.raises(RuntimeError):
        static.Executor().run(program(net), feed=(torch.ones(2, 3), torch.ones(7, 1)))
    assert [module.training for module in net.modules()] == modes


def test_what_is_fetched_does_not_change_with_the_next_step() -> None:
    net, exe = torch.nn.Linear(1, 1), static.Executor()

    def weight(model: torch.nn.Linear) -> dict[str, Any]:
        return {"weight": model.weight, "cost": model.weight.sum(), "half": model.weight.bfloat16(), "n": 2}

    step = static.Program(net, [], weight, loss="cost", optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    names = ["weight", "half", "n"]
    first, half, number = exe.run(step, fetch_list=names)
    kept = first.copy()
    exe.run(step)
    assert np.array_equal(first, kept)
    assert half.dtype == np.float32
    assert number == 2


@pytest.mark.parametrize(
    ("feed", "fetch_list", "message"),
    [
        (batch(), ["acc"], "fetch_list has 'acc', but the network returns cost, out, graph"),
        (batch(), "cost", "fetch_list is 'cost'; it must be a list of names"),
        ({"x": batch()[0]}, [], "feed lacks y. The program's feeds are x, y"),
        ({"x": 1, "y": 1, "z": 1}, [], "feed has z. The program's feeds are x, y"),
        (
            batch()[:1],
            [],
            "feed is 1 values. Pass a dict, or a list in the order of the program's feeds: x, y",
        ),
        (torch.ones(2), [], "feed is a Tensor. Pass a dict"),
        ((batch()[0].double(), batch()[1]), [], "feed 'x' (float32, shape [any, 3]) was given float64"),
    ],
)
def test_what_is_refused_before_anything_is_trained(feed: Any, fetch_list: Any, message: str) -> None:
    net = model()
    weights = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(UsageError, match=re.escape(message)):
        static.Executor().run(program(net, sgd(net)), feed=feed, fetch_list=fetch_list)
    assert all(torch.equal(*pair) for pair in zip(weights, net.parameters(), strict=True))
    assert all(param.grad is None for param in net.parameters())


@pytest.mark.parametrize(
    ("loss", "given", "message"),
    [
        ("loss", {"cost": torch.ones(1)}, "The program minimizes 'loss', but its network returns cost"),
        ("loss", {"loss": torch.ones(2)}, "The loss 'loss' has shape [2]. Return its mean instead"),
        ("loss", {"loss": 1.0}, "The program minimizes 'loss'"),
        ("loss", torch.ones(1), "The network returned a Tensor; it must return a dict"),
    ],
)
def test_what_a_network_must_give(loss: str, given: Any, message: str) -> None:
    net = model()
    step = static.Program(net, [], lambda model: given, loss=loss, optimizer=sgd(net))
    with pytest.raises(UsageError, match=re.escape(message)):
        static.Executor().run(step)


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        ((1, [X, Y], network), {}, "needs a torch.nn.Module as its model, not 1"),
        ((model(), [X, Y], network), {"optimizer": "sgd"}, "needs a torch.optim optimizer, not 'sgd'"),
        ((model(), ["x"], network), {}, "feeds contains 'x'; it must be a list of static.data"),
        ((model(), [X, X], network), {}, "feeds has 'x' twice"),
        ((model(), [X], network), {}, ": missing a required argument: 'y'"),
    ],
)
def test_what_is_no_program(words: tuple[Any, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        static.Program(*words, **settings)


def test_an_executor_of_another_device() -> None:
    net = model()
    with pytest.raises(UsageError, match="model is on cpu, but the executor is on cuda:1"):
        static.Executor("cuda:1").run(program(net, sgd(net)), feed=batch())
    with pytest.raises(UsageError, match="was given None to run"):
        static.Executor().run(None)  # type: ignore[arg-type]


def test_names_of_paddle_say_what_to_use() -> None:
    with pytest.raises(NotSupportedError, match=r"static.default_startup_program; torch modules get their"):
        static.default_startup_program()
    with pytest.raises(AttributeError, match="'unknown'"):
        _ = static.unknown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it
def test_a_compiled_network_computes_the_same() -> None:
    net, other = model(), model()
    compiled: list[bool] = []

    def seen(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        compiled.append(torch.compiler.is_compiling())
        return network(model, x, y)

    class Outside(torch.nn.Module):
        """As a served embedding: its forward is put on the instance, and is nothing for a compiler."""

        def __init__(self) -> None:
            super().__init__()
            self.forward = self.late  # type: ignore[method-assign]

        def late(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.compiler.is_compiling()
            return x

    net.insert(1, Outside())
    net[3].p = other[2].p = 0.0
    torch.compiler.reset()
    quick = static.Program(net, [X, Y], seen, loss="cost", optimizer=sgd(net), compile="eager")
    plain = program(other, sgd(other))
    for number in range(2):
        costs = [static.Executor().run(each, batch(number), ["cost"]) for each in (quick, plain)]
        np.testing.assert_allclose(*costs, rtol=1e-6)
    assert compiled
    assert all(compiled)


# ---- data sets


@pytest.fixture
def dataset(tmp_path: Path) -> QueueDataset:
    (tmp_path / "part-0").write_text("".join(f"3 {i} 0 1 1 {i % 2}\n" for i in range(10)))
    made = QueueDataset()
    made.init(use_var=[X, Y], batch_size=4)
    made.set_filelist([tmp_path / "part-0"])
    return made


def test_a_pass_over_a_data_set_trains(dataset: QueueDataset, capsys: pytest.CaptureFixture[str]) -> None:
    net, other = model(), model()
    net[2].p = other[2].p = 0.0
    exe, seen = static.Executor(), []

    def prefetch(feeds: Any) -> Any:
        return prefetched(feeds, lambda feed: seen.append(int(feed["x"][0, 0])))

    printing = {"fetch_list": ["cost"], "fetch_info": ["loss"], "print_period": 1}
    result = exe.train_from_dataset(program(net, sgd(net)), dataset, prefetch=prefetch, **printing)
    assert (result.batches, result.examples) == (3, 10)
    assert seen == [4, 8], "the batches after the first, ahead of their step"
    optimizer = sgd(other)
    costs = []
    for start in (0, 4, 8):
        rows = torch.arange(float(start), float(min(start + 4, 10)))
        x = torch.stack([rows, torch.zeros_like(rows), torch.ones_like(rows)], dim=1)
        loss = (other(x) - rows.remainder(2)[:, None]).square().mean()
        costs.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(state(net), state(other), strict=True))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for number, (line, cost) in enumerate(zip(lines, costs, strict=True), start=1):
        assert re.fullmatch(rf"time: \[[^]]+\], batch: \[{number}\], loss\[1\]:\[{cost:.6g}\]", line)


def test_a_pass_without_training(dataset: QueueDataset) -> None:
    net = model()
    trains = program(net, sgd(net))
    before = state(net)
    result = static.Executor().infer_from_dataset(trains, dataset, fetch_list=["cost"], print_period=3)
    assert result.examples == 10
    assert all(torch.equal(*pair) for pair in zip(state(net), before, strict=True))
    with pytest.raises(UsageError, match=r"a program for tests: .*\. Use infer_from_dataset"):
        static.Executor().train_from_dataset(trains.clone(for_test=True), dataset)


def test_a_name_that_cannot_be_printed_is_said_at_the_first_batch(dataset: QueueDataset) -> None:
    net = model()
    before = [param.detach().clone() for param in net.parameters()]
    with pytest.raises(UsageError, match="fetch_list has 'acc', but the network returns cost, out, graph"):
        static.Executor().train_from_dataset(program(net, sgd(net)), dataset, fetch_list=["acc"])
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
    assert sum(len(each) for each in dataset) == 10, "another pass can begin"


def test_what_is_no_data_set() -> None:
    net = model()
    with pytest.raises(UsageError, match=r"this one returned a tuple\. Loop over it with"):
        static.Executor().train_from_dataset(program(net, sgd(net)), [batch()])  # type: ignore[list-item]
