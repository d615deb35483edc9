"""The optimizers of a program: what a script gives to fleet, and what torch needs for the same arithmetic.

On tables every optimizer is lazy (docs: "Optimizers on tables"), so the plain twin of a table has torch's own
sparse rule where there is one, and else the dense rule, undone in all rows without a gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.equivalence.model import Net
from tests.equivalence.program import STEPS, Block, Program, define
from tests.support.training import Lazily
from trainers.ps import FTRL

_DECAY = (0.0, 0.0, 0.1)


def _momentum(rng: random.Random) -> dict[str, Any]:
    return {"lr": 0.05, "momentum": 0.8, "nesterov": rng.random() < 0.5, "weight_decay": rng.choice(_DECAY)}


def _adagrad(rng: random.Random) -> dict[str, Any]:
    decay = {"lr_decay": rng.choice((0.0, 0.1)), "weight_decay": rng.choice(_DECAY)}
    return {"lr": 0.1, "initial_accumulator_value": 0.1, **decay}


def _adam(rng: random.Random) -> dict[str, Any]:
    # A large eps: where a gradient is zero but for rounding, Adam would make a whole step of the rounding.
    decay = {"weight_decay": rng.choice((0.0, 0.0, 0.0, 0.1)), "amsgrad": rng.random() < 0.15}
    return {"lr": 0.05, "eps": 1e-2, **decay}


def _adamw(rng: random.Random) -> dict[str, Any]:
    return {"lr": 0.05, "eps": 1e-2, "weight_decay": 0.1, "maximize": rng.random() < 0.2}


def _rmsprop(rng: random.Random) -> dict[str, Any]:
    return {"lr": 0.02, "eps": 5e-2, "momentum": rng.choice((0.0, 0.5)), "centered": rng.random() < 0.3}


define("optimizer", "sgd", "SGD", lambda rng: {"lr": rng.choice((0.05, 0.2))}, merged=True)
define("optimizer", "sgd_decay", "SGD with weight decay", lambda rng: {"lr": 0.1, "weight_decay": 0.1})
define("optimizer", "momentum", "SGD with momentum", _momentum)
define("optimizer", "adagrad", "Adagrad", _adagrad, weight=1.5)
define("optimizer", "adam", "Adam; without options SparseAdam on the twin's tables", _adam, weight=2.0)
define("optimizer", "adamw", "AdamW", _adamw)
define("optimizer", "rmsprop", "RMSprop", _rmsprop)
define("optimizer", "sparse_adam_and_adam", "two optimizers: tables, and the rest", weight=1.5)
define("optimizer", "sgd_and_adagrad", "two optimizers: tables by Adagrad, the rest by SGD")
define(
    "optimizer",
    "ftrl",
    "SGD, and FTRL on tables by sparse_table_configs",
    lambda rng: {"lr": 0.1},
    weight=0.8,
)

MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd_decay": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "ftrl": torch.optim.SGD,
}

define(
    "rate",
    "groups",
    "tables in a parameter group with a learning rate of their own",
    lambda rng: {"factor": rng.choice((0.5, 2.0))},
    merged=True,
)
define("rate", "exponential", "ExponentialLR", merged=True)
define("rate", "step_rate", "StepLR", merged=True)
define("rate", "warm_up", "LambdaLR from 0 on", weight=1.5, merged=True)
define("rate", "to_zero", "LambdaLR down to 0", merged=True)
define("rate", "one_cycle", "OneCycleLR without momentum")
define("rate", "cosine", "CosineAnnealingLR", merged=True)
define("rate", "on_plateau", "ReduceLROnPlateau by the loss", alone=True)
define("rate", "by_hand", "the loop writes lr into the groups", merged=True)

_Scheduler = Callable[[torch.optim.Optimizer], Any]
_lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, _Scheduler] = {
    "exponential": lambda each: _lr.ExponentialLR(each, 0.8),
    "step_rate": lambda each: _lr.StepLR(each, 2, 0.5),
    "warm_up": lambda each: _lr.LambdaLR(each, lambda step: min(1.0, step / 3)),
    "to_zero": lambda each: _lr.LambdaLR(each, lambda step: max(0.0, 1 - step / (STEPS - 1))),
    "one_cycle": lambda each: _lr.OneCycleLR(each, 0.1, total_steps=STEPS + 3, cycle_momentum=False),
    "cosine": lambda each: _lr.CosineAnnealingLR(each, STEPS),
    "on_plateau": lambda each: _lr.ReduceLROnPlateau(each, factor=0.5, patience=0),
}


class Ftrl(torch.optim.Optimizer):
    """FTRL-proximal of one table in float64, by the formula of `trainers.ps.FTRL`. A step with learning rate
    0 changes nothing.
    """

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and group["lr"]:
                    self._update(weight, group["lr"])

    def _update(self, weight: torch.Tensor, lr: float) -> None:
        assert weight.grad is not None
        grad = weight.grad.coalesce()
        keys, slope = grad.indices()[0], grad.values().double()
        state = self.state[weight]
        if not state:
            state.update(n=torch.zeros_like(weight).double(), z=torch.zeros_like(weight).double())
        rule, n, value = _FTRL, state["n"][keys], weight[keys].double()
        new = n + slope * slope
        z = state["z"][keys] + slope - (new.sqrt() - n.sqrt()) / lr * value
        moved = (z.sign() * rule.l1 - z) / ((new.sqrt() + rule.beta) / lr + 2 * rule.l2)
        weight[keys] = torch.where(z.abs() <= rule.l1, 0.0, moved).float()
        state["n"][keys], state["z"][keys] = new, z


class _Lazily(Lazily):
    """Leaves the gradient sparse, as `zero_grad(set_to_none=False)` and the next backward pass expect it."""

    def step(self) -> None:
        grad = self._table.grad
        super().step()
        self._table.grad = grad


_FTRL = FTRL(l1=0.01, l2=0.1, beta=1.0)
TABLE_CONFIGS: dict[str, dict[str, Any]] = {"ftrl": {"*": {"rule": _FTRL}}}
"""strategy.sparse_table_configs, by name of the optimizer's block."""


def _options(block: Block) -> dict[str, Any]:
    return dict(block.args)


def _plain_of(block: Block, lr: float, weight: torch.nn.Parameter) -> Any:
    """The twin's optimizer of one table."""
    options = _options(block) | {"lr": lr}
    decays = options.get("weight_decay")
    if block.name == "ftrl":
        return Ftrl([weight], lr)
    if block.name == "adam" and not (decays or options["amsgrad"]):
        return torch.optim.SparseAdam([weight], lr=lr, eps=options["eps"])
    if block.name in ("sgd", "adagrad") and not decays:
        return MAKERS[block.name]([weight], **options)
    return _Lazily(lambda found: MAKERS[block.name](found, **options), weight)


def listed(program: Program, net: Net) -> tuple[list[torch.nn.Parameter], list[int]]:
    """What an optimizer has: dense parameters, and numbers of tables."""
    unlisted = {net.place(each) for name in ("frozen", "unlisted") for each in program.all(name)}
    tables = [place for place in net.served_tables() if place not in unlisted]
    out = {id(net.tables[place].weight) for place in unlisted}
    return [each for each in net.dense() if id(each) not in out], tables


def _block(program: Program) -> Block:
    return next(iter(program.family("optimizer")), Block("sgd", (("lr", 0.1),)))


_TWO: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "sparse_adam_and_adam": (
        lambda found: torch.optim.SparseAdam(found, lr=0.05, eps=1e-2),
        lambda found: torch.optim.Adam(found, lr=0.02, eps=1e-2),
    ),
    "sgd_and_adagrad": (
        lambda found: torch.optim.Adagrad(found, lr=0.1, initial_accumulator_value=0.1),
        lambda found: torch.optim.SGD(found, lr=0.1),
    ),
}


def given(program: Program, net: Net) -> list[torch.optim.Optimizer]:
    """What a script gives to fleet.distributed_optimizer."""
    block = _block(program)
    dense, places = listed(program, net)
    tables = [net.tables[place].weight for place in places]
    if block.name in _TWO:
        rows, rest = _TWO[block.name]
        return [*([rows(tables)] if tables else []), rest(dense)]
    options = _options(block)
    groups: list[Any] = [*dense, *tables]
    factor = program.first("groups")
    if factor is not None and tables:
        groups = [{"params": dense}, {"params": tables, "lr": options["lr"] * factor["factor"]}]
    return [MAKERS[block.name](groups, **options)]


def twins(program: Program, net: Net) -> list[Any]:
    """What one process needs for the same result."""
    block = _block(program)
    dense, places = listed(program, net)
    tables = [net.tables[place].weight for place in places]
    if block.name in _TWO:
        rows, rest = _TWO[block.name]
        return [*(rows([each]) for each in tables), rest(dense)]
    options = _options(block)
    factor = program.first("groups")
    lr = options["lr"] * (1.0 if factor is None else factor["factor"])
    return [*(_plain_of(block, lr, each) for each in tables), MAKERS[block.name](dense, **options)]


class Steppers:
    """The optimizers of a run, as its loop uses them."""

    def __init__(self, optimizers: Sequence[Any], served: bool) -> None:
        self.optimizers = optimizers
        self.served = served

    @property
    def torchs(self) -> list[torch.optim.Optimizer]:
        """As schedulers take them."""
        return [each._inner if isinstance(each, Lazily) else each for each in self.optimizers]

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def step_with(self, closure: Callable[[], Any]) -> None:
        """`step(closure)` of the first, `step()` of the rest."""
        if self.served:
            self.optimizers[0].step(closure)
            rest = self.optimizers[1:]
        else:
            closure()
            rest = self.optimizers
        for each in rest:
            each.step()

    def minimize(self, loss: torch.Tensor) -> None:
        if self.served:
            for each in self.optimizers:
                each.minimize(loss)
            return
        loss.backward()
        self.step()
        self.zero_grad(True)

    def zero_grad(self, set_to_none: bool) -> None:
        for each in self.torchs:
            each.zero_grad(set_to_none)

    def scale_rates(self, factor: float) -> None:
        for each in self.torchs:
            for group in each.param_groups:
                group["lr"] *= factor
