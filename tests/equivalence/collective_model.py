"""The models of a collective program, and what it gives to fleet.

A rank and its plain twin make them by the same code.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from tests.equivalence.collective_data import IDS, TURNS
from tests.equivalence.model import LAYERS
from tests.equivalence.program import DIM, NUMBERS, Block, Program, define
from tests.equivalence.rules import MAKERS
from trainers import fleet

define("world", "one_rank", "on one rank", weight=0.4)
define("world", "three_ranks", "on three ranks, not two")

define("part", "rows", "nn.Embedding", weight=1.5)
define("part", "sparse_rows", "nn.Embedding(sparse=True)", weight=0.4)
define("part", "row_bag", "nn.EmbeddingBag", weight=0.7)
define("part", "branch", "a Linear that only some turns call", lambda rng: {"at": _turns(rng)}, weight=0.7)
define("part", "remembering", "a buffer with the mean of what was seen, used in evaluation mode")

define("strategy", "sync_norm", "sync_batch_norm, and a batch norm", weight=1.5)
define("strategy", "small_buckets", "fuse_grad_size_in_MB is tiny: a bucket for each parameter")
define("strategy", "sharded", "sharding, stage 1", weight=1.5)
define("strategy", "recomputed_layers", "recompute of a layer")
define("strategy", "unused_found", "find_unused_parameters")
define(
    "strategy",
    "gradient_scale",
    "gradients are summed, of a loss that the script scales or not",
    lambda rng: {"how": rng.choice(("sum", "customized"))},
    weight=0.7,
)
define("strategy", "optimizer_first", "distributed_optimizer before distributed_model", weight=0.7)
define("strategy", "inner_schedules", "schedulers have the script's own optimizer", weight=0.7)


def _turns(rng: random.Random) -> tuple[int, ...]:
    return tuple(sorted(rng.sample(range(TURNS), rng.randint(2, 5))))


class _Remembering(torch.nn.Module):
    """Shifts by the mean of all batches in training mode so far."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(hidden.mean(0), 0.3)
            return hidden
        return hidden - self.mean


class Critic(torch.nn.Module):
    """(n,) values of (n, NUMBERS) numbers and (n, 2) ids; (n, 2), if it has other numbers too."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.x = torch.nn.Linear(NUMBERS, DIM)
        self.rows: torch.nn.Module | None = None
        if program.has("rows") or program.has("sparse_rows"):
            self.rows = torch.nn.Embedding(IDS, DIM, sparse=program.has("sparse_rows"))
        elif program.has("row_bag"):
            self.rows = torch.nn.EmbeddingBag(IDS, DIM)
        layers = [LAYERS[each.name]() for each in program.family("layer") if each.name in LAYERS]
        if program.has("sync_norm"):
            layers.append(torch.nn.BatchNorm1d(DIM, eps=0.1))
        if program.has("remembering"):
            layers.append(_Remembering())
        self.layers = torch.nn.Sequential(*layers)
        self.branch = torch.nn.Linear(DIM, DIM) if program.has("branch") else None
        self.out = torch.nn.Linear(DIM, 1)
        self._recomputed = program.has("recomputed")

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, other: torch.Tensor | None = None, on: bool = True
    ) -> torch.Tensor:
        if other is not None:
            x, ids = torch.cat([x, other]), torch.cat([ids, ids])
        if self._recomputed and torch.is_grad_enabled():
            found = checkpoint(self._compute, x, ids, on, use_reentrant=False)
        else:
            found = self._compute(x, ids, on)
        return found if other is None else found.view(2, -1).T

    def _compute(self, x: torch.Tensor, ids: torch.Tensor, on: bool) -> torch.Tensor:
        hidden = self.x(x)
        if self.rows is not None:
            rows = self.rows(ids)
            hidden = hidden + (rows.mean(1) if rows.dim() == 3 else rows)
        hidden = self.layers(hidden)
        if self.branch is not None and on:
            hidden = hidden + self.branch(torch.tanh(hidden))
        return self.out(torch.tanh(hidden))[:, 0]


def generator() -> torch.nn.Module:
    """(n, NUMBERS) to (n, NUMBERS)."""
    return torch.nn.Sequential(torch.nn.Linear(NUMBERS, DIM), torch.nn.Tanh(), torch.nn.Linear(DIM, NUMBERS))


def nets(program: Program) -> list[torch.nn.Module]:
    """The critic, and for a pair of models the generator."""
    critic = Critic(program)
    return [critic, generator()] if program.has("pair") else [critic]


def optimizers(program: Program, models: Sequence[torch.nn.Module]) -> list[torch.optim.Optimizer]:
    """What the script gives to fleet: one for each model, or two for the parts of one."""
    block = next(iter(program.family("optimizer")), Block("sgd", (("lr", 0.1),)))
    groups = [[each for each in model.parameters() if each.requires_grad] for model in models]
    if program.has("two_optimizers"):
        groups = [groups[0][::2], groups[0][1::2]]
    elif program.has("two_programs") and program.all("two_programs")[0]["optimizers"] == 2:
        groups = [groups[0], groups[0]]
    made = []
    for number, group in enumerate(groups):
        options = dict(block.args)
        made.append(MAKERS[block.name](group, **options | {"lr": options["lr"] / (1 + number)}))
    return made


def strategy(program: Program) -> fleet.DistributedStrategy:
    found = fleet.DistributedStrategy()
    found.sync_batch_norm = program.has("sync_norm")
    found.find_unused_parameters = program.has("unused_found") or program.has("branch")
    if program.has("small_buckets"):
        found.fuse_grad_size_in_MB = 1e-5
    if program.has("sharded"):
        found.sharding = True
    if program.has("recomputed_layers"):
        found.recompute = True
        found.recompute_configs = {"checkpoints": ["x", *(["layers.0"] if has_layers(program) else [])]}
    if scale := program.first("gradient_scale"):
        found.gradient_scale_configs = {"scale_strategy": scale["how"]}
    if merged := program.first("merged_gradients"):
        found.gradient_merge = True
        found.gradient_merge_configs = {"k_steps": merged["every"], "avg": merged["avg"]}
    return found


def has_layers(program: Program) -> bool:
    names = {each.name for each in program.family("layer")} & LAYERS.keys()
    return bool(names) or program.has("sync_norm") or program.has("remembering")


def differs_by_rank(program: Program) -> bool:
    """Whether the twin must compute the part of each rank by itself, as these layers would mix them."""
    norm = program.has("batch_norm") and not program.has("sync_norm")
    return norm or program.has("dropout") or program.has("remembering")
