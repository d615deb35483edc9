"""What a job with parameter servers reads of a checkpoint that DistributedModelParallel has written:
`ps_torchrec_dmp RULE TENSORS FOLDER`. Its two trainers first train with DistributedModelParallel, as a job of
TorchRec, and write its state as people do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.scripts.ps_torch_features import same, serve
from tests.support.scripts.ps_torchrec import bag, batches, row, train
from trainers import fleet
from trainers.errors import FleetError, NotSupportedError

RULES = {"row_wise": RowWiseAdagrad, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
PLACES = {
    "t1": table_wise(rank=1),
    "t2": row_wise(),
    "t3": column_wise(ranks=[0, 1]),
    "t4": data_parallel(),
    "s1": row_wise(),
}


class Model(torch.nn.Module):
    """Tables of different widths, and sequences."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(fleet.worker_index())
        tables = [
            bag("t1", "a", "c"),
            bag("t2", "b", rows=31, dim=8),
            bag("t3", "d", dim=16),
            bag("t4", "a"),
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.ec = EmbeddingCollection(tables=[row("s1", "b", dim=8)], device=torch.device(device))
        self.over = torch.nn.Linear(36, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.ec(features)["b"].values().sin().sum()
        return self.over(torch.tanh(self.ebc(features).values())).mean() + 0.1 * rows


def write(folder: Path, kind: Any, *, dtensors: bool) -> dict[str, torch.Tensor]:
    """Train with DistributedModelParallel. Write its state with torch.distributed.checkpoint: `alone` from
    files of torch.save, and `both` beside the optimizer's. Return the state that these files have. `whole.pt`
    has the state that a reader should find.
    """
    rank = fleet.worker_index()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    plain, sharders = Model("meta"), [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
    apply_optimizer_in_backward(kind, plain.ebc.parameters(), {"lr": 0.1})
    apply_optimizer_in_backward(kind, plain.ec.parameters(), {"lr": 0.1})
    plans = {}
    for name, module, sharder in zip(("ebc", "ec"), (plain.ebc, plain.ec), sharders, strict=True):
        places = {
            each: PLACES[each] for each in (module.embedding_bags if name == "ebc" else module.embeddings)
        }
        plans[name] = construct_module_sharding_plan(
            module, places, sharder=sharder, world_size=2, local_size=2, device_type="cpu"
        )
    env = ShardingEnv(2, rank, dist.group.WORLD, output_dtensor=dtensors)
    model = DistributedModelParallel(
        plain,
        env,
        torch.device("cpu"),
        ShardingPlan(plan=plans),
        sharders,  # type: ignore[arg-type]
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    rest = KeyedOptimizerWrapper(dense, lambda some: torch.optim.Adagrad(some, lr=0.1))
    optimizer = CombinedOptimizer([model.fused_optimizer, rest])
    train(model, [optimizer], batches()[rank : 4 + rank])
    state = model.state_dict()
    kinds = {type(each) for each in state.values()}
    assert kinds == {torch.Tensor, DTensor if dtensors else ShardedTensor}
    assert state.keys() == plain.state_dict().keys() == model.module.state_dict().keys()
    torch.save(state, folder / f"{rank}.pt")
    again: dict[str, torch.Tensor] = torch.load(folder / f"{rank}.pt", weights_only=False)
    dcp.save(again, checkpoint_id=folder / "alone")
    dcp.save({"model": state, "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "both")
    whole = {name: gathered(each) for name, each in state.items()}
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()
    return again


def gathered(value: Any) -> torch.Tensor:
    """The whole tensor, of the shards of both processes."""
    if isinstance(value, DTensor):
        local: Any = value.to_local()
        mine = list(
            zip(local.local_offsets(), local.local_shards(), strict=False)
        )  # an empty one has no shard
    elif isinstance(value, ShardedTensor):
        mine = [(each.metadata.shard_offsets, each.tensor) for each in value.local_shards()]
    else:
        return value
    shards: list[Any] = [None, None]
    dist.all_gather_object(shards, mine)
    out = torch.full(value.size(), torch.nan)
    for (top, left), shard in (each for some in shards for each in some):
        out[top : top + shard.shape[0], left : left + shard.shape[1]] = shard
    return out


def read(folder: Path, kind: Any, sharded: dict[str, torch.Tensor]) -> None:
    """Read the state as docs/from-torchrec.md describes it."""
    model, reference = Model(), Model()
    apply_optimizer_in_backward(kind, [*model.ebc.parameters(), *model.ec.parameters()], {"lr": 0.1})
    (optimizer,) = serve(model, torch.optim.Adagrad(model.over.parameters(), lr=0.1))

    with pytest.raises(FleetError, match=r"(DTensor|ShardedTensor) for .*torch\.distributed\.checkpoint"):
        model.load_state_dict(sharded)

    whole = torch.load(folder / "whole.pt")
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder / "alone")
    model.load_state_dict(state)
    torch.testing.assert_close(model.state_dict(), whole, rtol=0, atol=0)

    file = folder / f"plain{fleet.worker_index()}.pt"
    module = "torch.distributed.checkpoint.format_utils"
    subprocess.run([sys.executable, "-m", module, "dcp_to_torch", folder / "both", file], check=True)
    both = torch.load(file)
    model.load_state_dict({name: torch.zeros_like(each) for name, each in whole.items()})
    model.load_state_dict(both["model"])
    torch.testing.assert_close(model.state_dict(), whole, rtol=0, atol=0)
    if kind is not torch.optim.SGD:
        assert both["optimizer"]["state"]
    with pytest.raises(NotSupportedError, match="servers hold it"):
        optimizer.load_state_dict(both["optimizer"])

    # Training continues from there, with new state of the optimizers.
    reference.load_state_dict(whole)
    tables = [*reference.ebc.parameters(), *reference.ec.parameters()]
    apply_optimizer_in_backward(kind, tables, {"lr": 0.1})
    made = torch.optim.Adagrad(reference.over.parameters(), lr=0.1)
    train(model, [optimizer], batches())
    train(reference, [made], batches())
    same(model, reference)


def read_on_meta(folder: Path) -> None:
    """Read the state into tables on the meta device, whose rows only the servers have."""
    model, reference = Model("meta"), Model()
    serve(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
    whole = torch.load(folder / "whole.pt")
    model.load_state_dict(whole)
    reference.load_state_dict(whole)
    with torch.no_grad():
        for each in batches():
            torch.testing.assert_close(model(each), reference(each), rtol=0, atol=1e-6)
    fleet.stop_worker()


if __name__ == "__main__":
    torch.set_num_threads(1)
    fleet.init()
    rule, tensors, here = RULES[sys.argv[1]], sys.argv[2], Path(sys.argv[3])
    written = write(here, rule, dtensors=tensors == "dtensors") if fleet.is_worker() else {}
    if tensors == "on_meta":
        read_on_meta(here)
    else:
        read(here, rule, written)
