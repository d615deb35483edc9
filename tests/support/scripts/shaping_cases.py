"""What strategies do to a model, by two ranks: `shaping_cases OUT`. Each rank writes what it has seen to
OUT/rank.json; what is compared with is one process that has the batches of both.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.training import furthest
from trainers import fleet
from trainers.checkpoints import checkpoint
from trainers.collective.runtime import CollectiveRuntime
from trainers.collective.sharding import whole_state_dict
from trainers.roles.identity import Identity
from trainers.strategy import DistributedStrategy

STEPS, SAVED = 6, 3
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3),
}
ANCHORS = ["blocks.*", "head"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 33)
        self.back = nn.Linear(33, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = values + self.back(torch.tanh(self.wide(self.norm(values))))
        return out


class Blocks(nn.Module):
    """Odd widths, so that parts of parameters are not all of one size; nobody trains `scale`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(7, 17)
        self.blocks = nn.ModuleList(Block(17) for _ in range(3))
        self.head = nn.Linear(17, 3)
        self.scale = nn.Parameter(torch.full((1,), 0.7), requires_grad=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.stem(values)
        for block in self.blocks:
            values = block(values)
        out: torch.Tensor = self.head(values) * self.scale
        return out


class Pictures(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seen = nn.Sequential(nn.Conv2d(7, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU())
        self.told = nn.Linear(5, 4, bias=False)
        self.norm = nn.BatchNorm1d(4, momentum=None, affine=False)
        self.head = nn.Linear(4, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        wide = values[:, :, None, None] * torch.linspace(-1, 2, 36).view(6, 6)
        out: torch.Tensor = self.head(self.norm(self.told(self.seen(wide).mean((2, 3)))))
        return out


def batch(step: int, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    values, labels = torch.randn(8, 7, generator=generator), torch.randint(0, 3, (8,), generator=generator)
    mine = slice(None) if rank is None else slice(rank * 4, rank * 4 + 4)
    return values[mine], labels[mine]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int | None,
    steps: range = range(STEPS),
    clip: float | None = None,
) -> None:
    for step in steps:
        values, labels = batch(step, rank)
        loss = nn.functional.cross_entropy(model(values), labels)
        model.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def alone(
    kind: Callable[[int], nn.Module], make: str, clip: float | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = kind(0)
    optimizer = OPTIMIZERS[make](trainable(model))
    train(model, optimizer, None, clip=clip)
    return model, optimizer


def wished(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


def made(
    kind: Callable[[int], nn.Module], make: str, order: str, strategy: DistributedStrategy
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A wrapped model, its optimizer and the one that the script made. `order`: what fleet is given first."""
    runtime = CollectiveRuntime(Identity(), strategy)
    plain = kind(dist.get_rank())  # rank 0's values count
    if order == "wrapped":  # as one does in torch
        model = runtime.distributed_model(plain)
        inner = OPTIMIZERS[make](trainable(model))
        return model, runtime.distributed_optimizer(inner), inner
    inner = OPTIMIZERS[make](trainable(plain))
    if order == "optimizer":
        optimizer = runtime.distributed_optimizer(inner)
        return runtime.distributed_model(plain), optimizer, inner
    model = runtime.distributed_model(plain)
    return model, runtime.distributed_optimizer(inner), inner


def local(value: torch.Tensor) -> int:
    return (value.to_local() if hasattr(value, "to_local") else value).numel()


def held(optimizer: torch.optim.Optimizer) -> int:
    """Numbers of optimizer state on this rank."""
    return sum(local(value) for entry in optimizer.state.values() for value in entry.values() if value.dim())


def apart(model: nn.Module, wanted: nn.Module) -> float | None:
    """The largest difference of the whole states, on rank 0."""
    found = whole_state_dict(model)
    if dist.get_rank() > 0:
        return None if not found else 1.0
    return furthest(_floats(found), _floats(wanted.state_dict()))


def _floats(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in state.items()}


def sharded(stage: int, make: str, order: str, out: Path, clip: float | None = None) -> dict[str, Any]:
    """Trains; saves on the way."""
    rank = dist.get_rank()
    configs = {"stage": stage} | ({} if stage == 1 else {"segment_anchors": ANCHORS})
    strategy = wished(sharding=True, sharding_configs=configs)
    model, optimizer, inner = made(Blocks, make, order, strategy)
    train(model, optimizer, rank, range(SAVED), clip)
    checkpoint.save(out / f"{stage} {make}", SAVED, model, optimizer)
    train(model, optimizer, rank, range(SAVED, STEPS), clip)
    with torch.no_grad():
        model.eval()(batch(0, rank)[0])
    same = set(inner.param_groups[0]["params"]) <= set(model.parameters())
    resumed, again, loaded = made(Blocks, make, "model", strategy)
    assert checkpoint.load(out / f"alone {make}", resumed, again) == SAVED
    loss = resumed(batch(0, rank)[0]).sum()
    between = sum(local(param) for param in resumed.parameters())
    loss.backward()
    train(resumed, again, rank, range(SAVED, STEPS), clip)
    wanted, theirs = alone(Blocks, make, clip)
    parted = apart(resumed, wanted)
    if stage == 1:
        again.load_state_dict(theirs.state_dict())  # the whole of it: each rank keeps its part
    return {
        "apart": apart(model, wanted),
        "resumed": parted,
        "state": held(inner),
        "loaded state": held(loaded),
        "params between forward and backward": between,
        "params": sum(local(param) for param in model.parameters()),
        "same": same,
    }


def shaped(kind: Callable[[int], nn.Module], **fields: Any) -> dict[str, Any]:
    model, optimizer, _ = made(kind, "momentum", "optimizer", wished(**fields))
    train(model, optimizer, dist.get_rank())
    return {"apart": apart(model, alone(kind, "momentum")[0])}


def main(out: Path) -> None:
    fleet.init(is_collective=True)
    again = {"recompute": True, "recompute_configs": {"checkpoints": ["seen", "norm"]}}
    blocks = {"recompute": True, "recompute_configs": {"checkpoints": ["blocks.*"]}}
    units = {"sharding": True, "sharding_configs": {"stage": 3, "segment_anchors": ["blocks.*"]}}
    facts = {
        "1 adam": sharded(1, "adam", "optimizer", out),
        "1 momentum": sharded(1, "momentum", "wrapped", out, clip=0.1),
        "2 adam": sharded(2, "adam", "wrapped", out),
        "3 adam": sharded(3, "adam", "optimizer", out),
        "3 momentum": sharded(3, "momentum", "model", out, clip=0.1),
        "batch norm": shaped(Pictures),
        "sync": shaped(Pictures, sync_batch_norm=True),
        "sync, recompute": shaped(Pictures, sync_batch_norm=True, **again),
        "recompute, 3": shaped(Blocks, **blocks, **units),
    }
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
