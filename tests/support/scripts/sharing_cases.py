"""What trainers tell each other, and what a job saves: `sharing_cases collective|sync|async|geo FOLDER`. A
case that finds a thing wrong fails.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainers import fleet, metrics
from trainers.errors import FleetError
from trainers.inference import load_inference_model
from trainers.ps import Normal, SparseEmbedding

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
IDS = torch.arange(-60, 60).view(40, 3)


class Clicks(torch.nn.Module):
    """Every kind of embedding that can be served, and a buffer that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(4, init=Normal(0.0, 0.1, seed=3), padding_idx=7)
        self.words = torch.nn.Embedding(30, 4, sparse=True, padding_idx=0)
        self.bags = torch.nn.EmbeddingBag(30, 4, mode="mean", sparse=True, padding_idx=2)
        with torch.device("meta"):
            self.many = torch.nn.EmbeddingBag(10**9, 4, mode="sum", sparse=True, padding_idx=3)
        self.norm = torch.nn.BatchNorm1d(16)
        self.wide = torch.nn.Linear(16, 700)
        self.out = torch.nn.Linear(700, 1)

    def forward(self, ids: torch.Tensor, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        few = ids % 30
        looked_up = [self.ids(ids).mean(1), self.words(few).mean(1), self.bags(few), self.many(ids)]
        hidden = torch.tanh(self.wide(self.norm(torch.cat(looked_up, dim=1))))
        return {"click": torch.sigmoid(self.out(hidden)[:, 0] + dense.sum(1))}


def refused(call: Callable[[], object]) -> str:
    """What a call said that must not work."""
    try:
        call()
    except FleetError as error:
        return str(error)
    raise AssertionError("that was not refused")


def tell() -> None:
    """Every call of fleet.util and fleet.metrics, by trainers that have different things to say."""
    util, rank, world = fleet.util, fleet.worker_index(), fleet.worker_num()
    assert util.all_reduce(rank + 1) == sum(range(world + 1))
    assert util.all_reduce(0.1 * rank, "max") == 0.1 * (world - 1)
    assert util.all_reduce([[rank, 1]], "min") == [[0, 1]]
    array = util.all_reduce(np.full((2, 3), rank + 0.5, np.float32))
    assert array.dtype == np.float32
    assert (array == sum(each + 0.5 for each in range(world))).all()
    mine = torch.full((3,), rank, dtype=torch.int32)
    assert torch.equal(util.all_reduce(mine), torch.full((3,), sum(range(world)), dtype=torch.int32))
    assert torch.equal(mine, torch.full((3,), rank, dtype=torch.int32)), "what is given is left as it is"
    assert util.all_gather(f"trainer {rank}") == [f"trainer {each}" for each in range(world)]
    lengths = [len(each) for each in util.all_gather(torch.ones(rank))]
    assert lengths == list(range(world)), "other shapes on each"
    assert "Make the same call" in refused(
        lambda: util.all_reduce(1 if rank else 1.5, "max" if rank else "min")
    )
    assert "Make the same call" in refused(lambda: util.all_reduce(torch.ones(1 + rank)))
    files = [f"part-{each}" for each in range(5)]
    shares = util.all_gather(",".join(util.get_file_shard(files)))
    assert shares == ["part-0,part-1,part-2", "part-3,part-4"]
    util.print_on_rank(f"said by {rank}", 1)
    measure(rank, world)
    util.barrier()


def measure(rank: int, world: int) -> None:
    """Metrics of all trainers' examples, of which they have different numbers."""
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(500, generator=generator)
    clicked = (torch.rand(500, generator=generator) < predicted).float()
    mine = slice(0, 123) if rank == 0 else slice(123, None)
    for kind in (metrics.Auc, metrics.Accuracy, metrics.Mae, metrics.Mse, metrics.Rmse, metrics.LogLoss):
        whole, part = kind(), kind()
        whole.update(predicted, clicked)
        part.update(predicted[mine], clicked[mine])
        before = part.value()
        close(fleet.metrics.value(part), whole.value())
        assert part.value() == before
    histograms = metrics.Auc(100)
    histograms.update(predicted[mine], clicked[mine])
    others, clicks = histograms.state.view(2, 100)
    union = metrics.Auc(100)
    union.update(predicted, clicked)
    close(fleet.metrics.auc(clicks.numpy()[None], others.tolist()), union.value())
    wrong = predicted[mine] - clicked[mine]
    whole_wrong = (predicted - clicked).double()
    close(fleet.metrics.mae(wrong.abs().sum(), len(wrong)), float(whole_wrong.abs().mean()))
    close(fleet.metrics.mse(wrong.square().sum(), len(wrong)), float(whole_wrong.square().mean()))
    close(fleet.metrics.rmse(wrong.square().sum(), len(wrong)), float(whole_wrong.square().mean().sqrt()))
    right = (predicted > 0.5) == (clicked > 0.5)
    close(fleet.metrics.acc(int(right[mine].sum()), len(wrong)), float(right.float().mean()))
    assert fleet.metrics.sum(np.array([rank, 1])).tolist() == [1, 2]
    assert (fleet.metrics.max(rank), fleet.metrics.min(rank)) == (world - 1, 0)


def close(found: float, wanted: float) -> None:
    assert abs(found - wanted) < 1e-6, (found, wanted)


def serve_and_compare(model: torch.nn.Module, example: Sequence[torch.Tensor], *batches: Any) -> None:
    """Save for serving, load, and compare with the model as it evaluates."""
    model.eval()
    with torch.no_grad():
        wanted = [model(*batch)["click"] for batch in batches]
    fleet.save_inference_model(FOLDER / "served", model, tuple(example))
    served = load_inference_model(FOLDER / "served")
    for batch, want in zip(batches, wanted, strict=True):
        assert float((served(*batch)["click"] - want).abs().max()) < 1e-6
    with torch.no_grad():
        again = model(*batches[0])["click"]
    assert torch.equal(again, wanted[0]), "the model is as it was"
    assert len({path.name for path in (FOLDER / "served").iterdir()}) == 3, "nothing else is left there"
    model.train()


def serve_in_8_bits(model: torch.nn.Module, batch: Any) -> None:
    """Known ids, unknown ones and bags, with rows in 8 bits."""
    fleet.save_inference_model(FOLDER / "served8", model, tuple(batch), int8_rows=True)
    full, short = load_inference_model(FOLDER / "served"), load_inference_model(FOLDER / "served8")
    assert any(each.dtype is torch.uint8 for each in short.weights.values())
    off = (short(*batch)["click"] - full(*batch)["click"]).abs()
    assert 0 < float(off.max()) < 0.01
    fleet.save_inference_model(FOLDER / "program", model, tuple(batch), rows=False)
    assert "without rows" in refused(lambda: load_inference_model(FOLDER / "program"))
    assert "exclude" in refused(
        lambda: fleet.save_inference_model(FOLDER, model, tuple(batch), rows=False, int8_rows=True)
    )
    few = IDS % 30
    for part, int8 in ((model.bags, False), (torch.nn.Sequential(model.words, torch.nn.Tanh()), True)):
        with torch.no_grad():
            wanted = part.eval()(few)
        fleet.save_inference_model(FOLDER / "part", part, few, int8_rows=int8)
        off = (load_inference_model(FOLDER / "part")(few) - wanted).abs()
        assert float(off.max()) < (0.02 if int8 else 1e-6)
    assert "has none" in refused(
        lambda: fleet.save_inference_model(FOLDER, torch.nn.Linear(1, 1), torch.ones(1, 1), rows=False)
    )
    assert "has none" in refused(
        lambda: fleet.save_inference_model(FOLDER, torch.nn.Linear(1, 1), torch.ones(1, 1), int8_rows=True)
    )


def with_servers() -> None:
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = MODE != "sync"
    if MODE == "geo":
        strategy.a_sync_configs = {"k_steps": 3}
    torch.manual_seed(fleet.worker_index())
    model = Clicks()
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01), strategy)
    if fleet.is_server():
        assert "on a server" in refused(lambda: fleet.util.all_reduce(1))
        fleet.init_server()
        fleet.run_server()
        return
    assert "between fleet.init_worker()" in refused(lambda: fleet.util.all_gather(1))
    assert "between" in refused(lambda: fleet.save_inference_model(FOLDER, model, (IDS, IDS[:, :2].float())))
    assert "between" in refused(lambda: fleet.save_inference_model(FOLDER, model.many, IDS))
    fleet.init_worker()
    generator = torch.Generator().manual_seed(fleet.worker_index())
    for _ in range(4):
        ids = torch.randint(-40, 40, (8, 3), generator=generator)
        clicked = model(ids, torch.randn(8, 2, generator=generator))["click"]
        optimizer.minimize((clicked - torch.rand(8, generator=generator)).square().mean())
    tell()
    if fleet.is_first_worker():
        dense = torch.randn(40, 2)
        whole, one = (IDS, dense), (IDS[:1], dense[:1])
        serve_and_compare(model, one, whole, one)  # an example of one: batches of any size all the same
        serve_in_8_bits(model, whole)
    fleet.barrier_worker()
    fleet.stop_worker()


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(9, 4, mode="max")
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.out.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"click": self.tied(self.out(self.norm(self.bags(ids))))[:, 0]}


def collective() -> None:
    fleet.init(is_collective=True)
    rank = fleet.worker_index()
    torch.manual_seed(rank)
    model = fleet.distributed_model(Small())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for step in range(3):
        optimizer.minimize(model((IDS + step + rank) % 9)["click"].square().mean())
    tell()
    fleet.save(FOLDER / "state", model, optimizer)
    if fleet.is_first_worker():
        serve_and_compare(model, [IDS % 9], [IDS % 9], [IDS[:1] % 9])
        fleet.save_persistables(FOLDER / "weights", model)
    fleet.barrier_worker()
    other = Small()
    other_optimizer = torch.optim.Adam(other.parameters(), lr=1.0)
    fleet.load(FOLDER / "state", other, other_optimizer)
    if rank:  # running means are each rank's own, and the first rank's were saved
        other.norm.load_state_dict(model.module.norm.state_dict())
    for one, two in ((model.module, other), (optimizer, other_optimizer)):
        left, right = flat(one.state_dict()), flat(two.state_dict())
        assert left.keys() == right.keys()
        assert all(torch.equal(torch.as_tensor(left[name]), torch.as_tensor(right[name])) for name in left)
    optimizer.minimize(model(IDS % 9)["click"].square().mean())
    fleet.load(FOLDER / "weights", model)
    assert torch.equal(model.module.out.weight, other.out.weight)
    assert "has no tables" in refused(lambda: fleet.save_persistables(FOLDER, model, mode=1))


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Numbers and tensors of a state dict by their path."""
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, list | tuple):
        items = list(enumerate(state))
    else:
        return {} if state is None else {name: state}
    found: dict[str, Any] = {}
    for key, value in items:
        found |= flat(value, f"{name}.{key}")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    (collective if MODE == "collective" else with_servers)()
    print("done", flush=True)
