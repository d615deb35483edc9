"""What a script can ask of its tables: `ps_options SCENARIO FOLDER ...`. A scenario that finds a thing wrong
fails.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from trainers import InMemoryDataset, Slot, fleet
from trainers.data.slots import Batch
from trainers.errors import ServerError
from trainers.ps import (
    Adagrad,
    Constant,
    CountFilterEntry,
    ProbabilityEntry,
    RowWiseAdagrad,
    ShowClickEntry,
    ShrinkPolicy,
    SparseEmbedding,
    Uniform,
)

FOLDER = Path(sys.argv[2])
EXTREMES = torch.tensor([-(2**63), -(2**63) + 1, -1, 0, 1, 2**62, 2**63 - 1])
STEPS = 6
MODES = {
    "sync": {"a_sync": False},
    "async": {"a_sync": True},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 4}},
}


def say(*words: object) -> None:
    print(*words, flush=True)


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.005)


def begin(model: torch.nn.Module, rate: float = 1.0, **options: object) -> fleet.DistributedOptimizer | None:
    """SGD on the servers; None on a server, when it has served."""
    strategy = fleet.DistributedStrategy()
    for name, value in options.items():
        setattr(strategy, name, value)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=rate), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return None
    fleet.init_worker()
    return optimizer


def extremes() -> None:
    """Every trainer adds 1 to the rows of the same few keys, the smallest and the largest among them."""
    mode = sys.argv[3]
    short = SparseEmbedding(1, init=Constant(0.5), dtype=torch.bfloat16)
    tables = [short, SparseEmbedding(512, init=Constant(0.5))]
    optimizer = begin(torch.nn.ModuleList(tables), **MODES[mode])
    if optimizer is None:
        return
    for _ in range(STEPS):
        optimizer.minimize(-sum(table(EXTREMES).sum() for table in tables))
    fleet.barrier_worker()
    times = STEPS * (fleet.worker_num() if mode == "async" else 1)
    with torch.no_grad():
        for table in tables:
            rows = table.eval()(EXTREMES)
            assert bool((rows == 0.5 + times).all()), rows[:, 0]
    fleet.barrier_worker()
    if fleet.is_first_worker():
        fleet.save_persistables(FOLDER / "saved")
    fleet.stop_worker()


class Wished(torch.nn.Module):
    """Tables with a wish each, all in the strategy."""

    def __init__(self) -> None:
        super().__init__()
        names = ("counted", "drawn", "bounded", "plain", "own", "lean")
        self.tables = torch.nn.ModuleDict({name: SparseEmbedding(2, init=Constant(0.0)) for name in names})
        self.short = torch.nn.Embedding(41, 2, sparse=True, dtype=torch.bfloat16)
        torch.nn.init.zeros_(self.short.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        short = self.short(ids)
        assert short.dtype is torch.bfloat16
        return torch.stack([*(table(ids) for table in self.tables.values()), short.float()])


def options() -> None:
    """Key k stands in the batches of k steps; every gradient is -1."""
    own = {
        "tables.counted.weight": {"entry": CountFilterEntry(3)},
        "tables.drawn.weight": {"entry": ProbabilityEntry(0.5), "init": Uniform(0.0, 0.0, seed=7)},
        "tables.bounded.weight": {"low": -1.0, "high": 2.5},
        "tables.own.weight": {"rule": Adagrad(initial_accumulator_value=0.0), "lr": 0.5},
        "tables.lean.weight": {"rule": RowWiseAdagrad(), "lr": 0.5, "dtype": "float16"},
        "*": {"high": 39.0},
    }
    model = Wished()
    optimizer = begin(model, a_sync=True, a_sync_configs={"overlap": False}, sparse_table_configs=own)
    if optimizer is None:
        return
    for step in range(1, 41):
        optimizer.minimize(-model(torch.arange(step, 41)).sum())
    fleet.save_persistables(FOLDER / "saved")
    assert model.state_dict()["short.weight"].dtype is torch.bfloat16
    fleet.stop_worker()


def shown() -> None:
    """Ids 0 to 9 are shown in ten batches each, 0 to 2 are clicked; who asks for the counts by the module and
    who does so by the strategy get the same.
    """
    by_module = SparseEmbedding(1, init=Constant(0.0), entry=ShowClickEntry())
    by_strategy = SparseEmbedding(1, init=Constant(0.0))
    own = {"1.weight": {"entry": ShowClickEntry()}}
    optimizer = begin(
        torch.nn.ModuleList([by_module, by_strategy]),
        a_sync=True,
        a_sync_configs={"overlap": False},
        sparse_table_configs=own,
    )
    if optimizer is None:
        return
    ids = torch.arange(10)
    for _ in range(10):
        looked_up = [table(ids, clicks=(ids < 3).float()) for table in (by_module, by_strategy)]
        optimizer.minimize(sum(rows.sum() for rows in looked_up))
    # Scores of a day on which nothing fades: 10 clicks make 10, 10 shows without one make 1.
    policy = ShrinkPolicy(nonclk_coeff=0.1, click_coeff=1.0, show_click_decay_rate=1.0, delete_threshold=5.0)
    assert fleet.shrink(policy) == 14
    fleet.save_persistables(FOLDER / "saved")
    fleet.stop_worker()


def bad_numbers() -> None:
    """One of the steps of this trainer has a NaN in a row and one in a dense block."""
    model = torch.nn.ModuleDict(
        {"ids": SparseEmbedding(2, init=Constant(0.0)), "out": torch.nn.Linear(1, 1, bias=False)}
    )
    with torch.no_grad():
        model["out"].weight.fill_(0.0)
    optimizer = begin(
        model, a_sync=True, a_sync_configs={"overlap": False}, ps_configs={"nonfinite": sys.argv[3]}
    )
    if optimizer is None:
        return
    for step in range(4):
        rows = model["ids"](torch.tensor([1, 2]))
        scale = torch.ones(2, 1)
        if step == 2:
            scale[0] = float("nan")
        dense = model["out"].weight.sum() * (float("inf") if step == 2 else 1.0)
        optimizer.minimize(-(rows * scale).sum() - dense)
        say("pushed", step)
    with torch.no_grad():
        assert model.eval()["ids"](torch.tensor([1, 2])).tolist() == [[3, 3], [4, 4]]
    fleet.stop_worker()
    assert model["out"].weight.item() == 3.0


def silent() -> None:
    """The test stops server 1 while this trainer waits for a file."""
    model = torch.nn.Sequential(SparseEmbedding(1, init=Constant(0.0)), torch.nn.Flatten())
    optimizer = begin(model, a_sync=sys.argv[3] == "async", ps_configs={"request_timeout_s": 6.0})
    if optimizer is None:
        return
    optimizer.minimize(-model(torch.arange(20)).sum())
    fleet.barrier_worker()
    say("held")
    wait_for("go")
    try:
        for _ in range(10):
            optimizer.minimize(-model(torch.arange(20)).sum())
    except ServerError as error:
        say("ServerError", error)


def queue() -> None:
    """Dense pushes only, so that nothing but the queue makes a step wait; every step adds 1."""
    merged, queued = map(int, sys.argv[3:5])
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    optimizer = begin(
        model, a_sync=True, a_sync_configs={"max_merge_var_num": merged, "send_queue_size": queued}
    )
    if optimizer is None:
        return
    optimizer.minimize(-model.weight.sum())
    fleet.barrier_worker()
    say("held")
    wait_for("go")
    for step in range(1, 40):
        optimizer.minimize(-model.weight.sum())
        say("pushed", step)
    fleet.stop_worker()
    say("end", model.weight.item())


def receives() -> None:
    """Dense values come with every third push only."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.0)
    optimizer = begin(
        model, a_sync=True, a_sync_configs={"min_send_grad_num_before_recv": 3, "overlap": False}
    )
    if optimizer is None:
        return
    seen = []
    for _ in range(7):
        optimizer.minimize(-model.weight.sum())
        seen.append(model.weight.item())
    assert seen == [0, 0, 3, 3, 3, 6, 6], seen
    fleet.stop_worker()
    assert model.weight.item() == 7.0


def exchanges() -> None:
    """Geo: trainer 1 looks at the servers' values while trainer 0 is between two exchanges."""
    table = SparseEmbedding(1, init=Constant(0.0))
    optimizer = begin(table, a_sync=True, a_sync_configs={"k_steps": 5})
    if optimizer is None:
        return
    if fleet.is_first_worker():
        for _ in range(7):
            optimizer.minimize(-table(torch.tensor([3])).sum())
        (FOLDER / "trained").touch()
        wait_for("seen")
        optimizer.minimize(-table(torch.tensor([4])).sum())
    else:
        wait_for("trained")
        with torch.no_grad():
            say("between", table.eval()(torch.tensor([3, 4]))[:, 0].tolist())
        (FOLDER / "seen").touch()
    fleet.barrier_worker()
    with torch.no_grad():
        say("end", table.eval()(torch.tensor([3, 4]))[:, 0].tolist())
    fleet.stop_worker()


def uneven() -> None:
    """A table that is used much is whole on one of the servers, unless the settings say otherwise."""
    model = torch.nn.ModuleDict(
        {"used": torch.nn.Embedding(20_000, 2, sparse=True), "rare": SparseEmbedding(2)}
    )
    optimizer = begin(model, a_sync=True, sparse_table_configs=json.loads(sys.argv[3]))
    if optimizer is None:
        return
    for _ in range(6):
        optimizer.minimize(model["used"](torch.arange(20_000)).sum() + model["rare"](torch.arange(9)).sum())
    fleet.stop_worker()


def dataset() -> None:
    """Training from files through a pipe, rows prefetched; an id gets 1 each time it is in a file."""
    table = SparseEmbedding(1, init=Constant(0.0))
    optimizer = begin(table, a_sync=True)
    if optimizer is None:
        return
    data = InMemoryDataset()
    data.init(
        use_var=[Slot("ids", length=None), Slot("label", "float32")],
        pipe_command="sed 's/^x//'",
        batch_size=4,
        max_bad_lines=1,
    )
    data.set_filelist([FOLDER / f"part-{fleet.worker_index()}"])
    data.load_into_memory()
    data.global_shuffle()

    def ids(batch: Batch) -> torch.Tensor:
        return batch.bag("ids").values

    def step(batch: Batch) -> torch.Tensor:
        loss = -table(ids(batch)).sum()
        optimizer.minimize(loss)
        return loss

    result = fleet.train_from_dataset(
        step, data, ids=ids, fetch_list=["loss"], fetch_info=["minus"], print_period=3
    )
    say("skipped", result.skipped_lines, "examples", data.get_memory_data_size(fleet))
    fleet.barrier_worker()
    seen: dict[int, float] = {}

    def look(batch: Batch) -> None:
        rows = table(ids(batch))
        assert not rows.requires_grad
        seen.update(zip(ids(batch).tolist(), rows[:, 0].tolist(), strict=True))

    table.eval()
    fleet.infer_from_dataset(look, data, ids=ids)
    assert seen == {id: 1.0 if id < 100 else 8.0 for id in seen}, seen
    fleet.stop_worker()
    say("trained")


SCENARIOS: tuple[Callable[[], None], ...] = (
    extremes,
    options,
    shown,
    bad_numbers,
    silent,
    queue,
    receives,
    exchanges,
    uneven,
    dataset,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    fleet.init()
    {each.__name__: each for each in SCENARIOS}[sys.argv[1]]()
