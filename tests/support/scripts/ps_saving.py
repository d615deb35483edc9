"""Training that saves: `ps_saving SCENARIO FOLDER [LOAD_FROM]`. A scenario that finds a thing wrong fails."""

import resource
import sys
import time
from pathlib import Path

import torch

from trainers import fleet
from trainers.errors import FleetError
from trainers.inference import load_inference_model
from trainers.ps import Normal, ShrinkPolicy, SparseEmbedding, read_values
from trainers.ps.saves.read import ModelValues

MIDDLE, STEPS = 15, 30
KEYS = torch.arange(-40, 40)
MANY = 150_000


class Model(torch.nn.Module):
    """An embedding without end, one with an end, and a layer that two servers share."""

    def __init__(self, hidden: int = 2100) -> None:
        super().__init__()
        self.ids = SparseEmbedding(4, init=Normal(0.0, 0.1, seed=3), statistics=True)
        self.words = torch.nn.Embedding(30, 4, sparse=True)
        self.wide = torch.nn.Linear(8, hidden)
        self.out = torch.nn.Linear(hidden, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.ids(ids).mean(1), self.words(ids % 30).mean(1)], dim=1)
        result: torch.Tensor = self.out(torch.tanh(self.wide(joined)))[:, 0] / 45
        return result


def say(*words: object) -> None:
    print(*words, flush=True)


def begin(a_sync: bool, hidden: int = 2100) -> tuple[Model, fleet.DistributedOptimizer]:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = a_sync
    if a_sync:
        strategy.a_sync_configs = {"overlap": False}
    strategy.ps_configs = {"trainer_timeout_s": 60.0}
    torch.manual_seed(0)
    model = Model(hidden)
    fleet.distributed_model(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    return model, fleet.distributed_optimizer(adamw, strategy)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)


def serve() -> None:
    fleet.init_server(sys.argv[3] if len(sys.argv) > 3 and "/" in sys.argv[3] else None)
    fleet.run_server()


def train(model: Model, optimizer: fleet.DistributedOptimizer, steps: range) -> None:
    rank = fleet.worker_index()
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(-40, 40, (8, 3), generator=generator)
        optimizer.minimize((model(ids) - torch.randn(8, generator=generator)).square().mean())


@torch.no_grad()
def evaluation(model: Model) -> torch.Tensor:
    result = model.eval()(KEYS[:, None])
    model.train()
    return result


def halves() -> None:
    """Train the first half, save, evaluate, train the second half."""
    model, optimizer = begin(a_sync=False)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    train(model, optimizer, range(MIDDLE))
    fleet.barrier_worker()
    folder = Path(sys.argv[2])
    if fleet.is_first_worker():
        fleet.save_persistables(folder / "saved")
    end_of(model, optimizer)


def second_half() -> None:
    """With servers that have loaded what `halves` saved."""
    model, optimizer = begin(a_sync=False)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    end_of(model, optimizer)


def end_of(model: Model, optimizer: fleet.DistributedOptimizer) -> None:
    middle = evaluation(model)
    fleet.barrier_worker()
    train(model, optimizer, range(MIDDLE, STEPS))
    fleet.barrier_worker()
    end = evaluation(model)
    fleet.stop_worker()
    rank = fleet.worker_index()
    result = {"middle": middle, "end": end, "model": model.state_dict()}
    torch.save(result, Path(sys.argv[2]) / f"result.{rank}.pt")


def other_model() -> None:
    """Another model than the one that was saved."""
    begin(a_sync=False, hidden=3000)
    if fleet.is_server():
        return serve()
    fleet.init_worker()


class Wider(Model):
    """Another table, more words, and so another first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(40, 4, sparse=True)
        self.cities = torch.nn.Embedding(30, 2, sparse=True)
        self.wide = torch.nn.Linear(10, 2100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = [each.mean(1) for each in (self.ids(ids), self.words(ids % 40), self.cities(ids % 30))]
        result: torch.Tensor = self.out(torch.tanh(self.wide(torch.cat(found, dim=1))))[:, 0] / 45
        return result


def warm() -> None:
    """A wider model begins with the tables and the layer that fit."""
    torch.manual_seed(1 + int(sys.argv[2][-1].isdigit()))
    model = Wider()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    fleet.distributed_model(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    optimizer = fleet.distributed_optimizer(adamw, fleet.DistributedStrategy())
    if fleet.is_server():
        fleet.init_server(sys.argv[3], var_names=[*LOADED, *(["no.bias"] if sys.argv[4:] else [])])
        return fleet.run_server()
    fleet.init_worker()
    saved = read_values(sys.argv[3])
    state = model.state_dict()
    for name in ("wide.weight", "wide.bias"):
        assert torch.equal(state[name], first[name]), name
    for name in ("out.weight", "out.bias"):
        assert torch.equal(state[name].flatten(), saved.dense[name]), name
    with torch.no_grad():
        model.eval()
        assert torch.equal(model.ids(KEYS), rows_of(saved, "ids.weight"))
        wanted = torch.cat([rows_of(saved, "words.weight"), first["words.weight"][30:]])
        assert torch.equal(model.words(torch.arange(40)), wanted)
        assert torch.equal(model.cities(torch.arange(30)), first["cities.weight"])
        model.train()
    fleet.barrier_worker()
    train(model, optimizer, range(2))
    fleet.stop_worker()
    say("warm")


LOADED = ("ids.weight", "words.weight", "out.weight", "out.bias")


def rows_of(saved: ModelValues, name: str) -> torch.Tensor:
    """All rows of a table, by key."""
    return saved.sparse[name].values


def modes() -> None:
    """All modes, one after the other, by a trainer alone."""
    model, optimizer = begin(a_sync=True)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    folder = Path(sys.argv[2])
    train(model, optimizer, range(3))
    fleet.save_persistables(folder / "all")
    for start in (3, 6):
        train(model, optimizer, range(start, start + 3))
        fleet.save_persistables(folder / "all", mode=1)
        same(model, read_values(folder / "all"))
    train(model, optimizer, range(9, 12))
    fleet.save_persistables(folder / "values", mode=2)
    same(model, read_values(folder / "values"))
    fleet.save_inference_model(folder / "inference")
    same(model, read_values(folder / "inference"))
    fleet.save_persistables(folder / "aged", mode=3)
    same(model, read_values(folder / "aged"))
    fleet.save_persistables(folder / "aged", mode=1)
    expect_error("Save with mode 0", folder / "all")  # the servers know what has changed since the other
    expect_error("Save with mode 0 there first", folder / "values")
    with_rows = len(read_values(folder / "aged").sparse["ids.weight"].keys)
    for _ in range(2):
        assert fleet.shrink(ShrinkPolicy(delete_threshold=0.0, delete_after_unseen_days=10.0)) == 0
    gone = fleet.shrink(ShrinkPolicy(delete_threshold=0.0, delete_after_unseen_days=3.0))
    assert gone == with_rows, f"four days have passed without a push: {gone} of {with_rows} went"
    fleet.save_persistables(folder / "aged", mode=1)  # it says which rows are gone
    assert len(read_values(folder / "aged").sparse["ids.weight"].keys) == 0
    train(model, optimizer, range(12, 15))
    fleet.save_persistables(folder / "aged", mode=1)
    same(model, read_values(folder / "aged"))
    try:
        fleet.publish()
    except FleetError as error:
        say("to nowhere:", error)
    fleet.stop_worker()
    say("all modes")


def expect_error(words: str, folder: Path) -> None:
    said = ""
    try:
        fleet.save_persistables(folder, mode=1)
    except FleetError as error:
        said = str(error)
    assert words in said, f"mode 1 was not refused with these words: {said}"


@torch.no_grad()
def same(model: Model, saved: ModelValues) -> None:
    """The save holds what the servers have."""
    for name, value in model.state_dict().items():
        if name in saved.dense:
            assert torch.equal(saved.dense[name], value.flatten()), name
    ids, words = saved.sparse["ids.weight"], saved.sparse["words.weight"]
    model.eval()
    assert len(ids.keys)
    assert torch.equal(model.ids(ids.keys), ids.values)
    assert torch.equal(model.words(words.keys), words.values)
    assert len(words.keys) == 30
    model.train()


def together() -> None:
    """All trainers make every save, after the same steps, into one folder and another."""
    model, optimizer = begin(a_sync=False)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    folder, rank = Path(sys.argv[2]), fleet.worker_index()
    train(model, optimizer, range(3))
    fleet.save_persistables(folder / "all")
    train(model, optimizer, range(3, 6))
    for mode, name in ((1, "all"), (2, "values"), (3, "aged")):
        fleet.save_persistables(folder / name, mode=mode)
    fleet.save_inference_model(folder / "program", model, torch.zeros(5, 1, dtype=torch.int64))
    alone = folder / f"alone-{rank}"
    fleet.save_persistables(alone)  # at the same time
    same(model, read_values(alone))
    expected = evaluation(model)
    fleet.barrier_worker()
    for name in ("all", "values", "aged"):
        same(model, read_values(folder / name))
    loaded = load_inference_model(folder / "program")
    assert torch.equal(loaded(KEYS[:, None]), expected)
    train(model, optimizer, range(6, 7))  # the servers serve on
    fleet.stop_worker()
    say("together")


def refused() -> None:
    """A place that cannot be written, then a disk that is full for server 1, then one that is not."""
    model, optimizer = begin(a_sync=True)
    if fleet.is_server():
        if fleet.server_index() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
        return serve()
    fleet.init_worker()
    folder = Path(sys.argv[2])
    (folder / "file").touch()
    train(model, optimizer, range(3))
    fleet.save_persistables(folder / "saved")
    before = evaluation(model)
    try:
        fleet.save_persistables(folder / "file" / "saved")
    except FleetError as error:
        say("unwritable:", error)
    optimizer.minimize(model.ids(torch.arange(MANY)).square().mean())
    try:
        fleet.save_persistables(folder / "saved")
    except FleetError as error:
        say("full:", error)
    torch.save(before, folder / "before.pt")
    train(model, optimizer, range(3, 6))
    fleet.shrink()
    fleet.save_inference_model(folder / "values")
    fleet.stop_worker()
    say("went on")


def killed() -> None:
    """A save for the trainer to be killed in, when there is a file `go`; the next life saves again."""
    model, optimizer = begin(a_sync=True)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    for start in range(0, 4 * MANY, MANY):
        optimizer.minimize(model.ids(torch.arange(start, start + MANY)).square().mean())
    say("saving")
    wait_for(Path(sys.argv[2]) / "go")
    fleet.save_persistables(Path(sys.argv[2]) / "saved")
    say("saved")
    same(model, read_values(Path(sys.argv[2]) / "saved"))
    fleet.stop_worker()


def continued() -> None:
    """A save, after which the trainer is killed; the next life saves what has changed since."""
    model, optimizer = begin(a_sync=True)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    folder = Path(sys.argv[2]) / "saved"
    if not (folder / "manifest.json").exists():
        train(model, optimizer, range(3))
        fleet.save_persistables(folder)
        train(model, optimizer, range(3, 6))  # these changes are recorded too
        say("trained")
        wait_for(Path(sys.argv[2]) / "never")
    train(model, optimizer, range(6, 7))
    fleet.save_persistables(folder, mode=1)
    same(model, read_values(folder))
    fleet.stop_worker()


@torch.no_grad()
def pushed(model: torch.nn.EmbeddingBag) -> float:
    """How many pushes are in the first row."""
    return float(model(torch.zeros(1, 1, dtype=torch.int64))[0, 0])


def beside() -> None:
    """Trainer 1 goes on pushing while trainer 0 saves; every push adds 1 to all rows. No two saves are of the
    same moment.
    """
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    model = torch.nn.EmbeddingBag(40_000, 4, mode="sum", sparse=True)
    torch.nn.init.zeros_(model.weight)
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    if fleet.is_server():
        return serve()
    fleet.init_worker()
    folder = Path(sys.argv[2])
    while fleet.worker_index() == 1 and not (folder / "stop").exists():
        optimizer.minimize(-model(torch.arange(40_000)[None]).sum())
        say("pushed")
        time.sleep(0.001)
    if fleet.is_first_worker():
        wait_for(folder / "save")
        model.eval()
        seen = 1.0
        for number in range(4):
            while pushed(model) <= seen:
                time.sleep(0.001)
            fleet.save_persistables(folder / f"saved{number}")
            seen = pushed(model)
        (folder / "stop").touch()
    fleet.stop_worker()
    say("end", float(model.weight.detach()[0, 0]))


def published() -> None:
    """Trainers publish in turn, and read what is there; then in a place that cannot be written for a while.
    Every step adds 1 to all rows and to `bias`. The last word says who has that.
    """
    folder = Path(sys.argv[2])
    strategy = fleet.DistributedStrategy()
    strategy.dense = sys.argv[3]
    strategy.ps_configs = {"publish": str(folder / "published"), "publish_interval_s": 3600.0}
    model = torch.nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
    torch.nn.init.zeros_(model.weight)
    model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    model.register_parameter("bias", torch.nn.Parameter(torch.zeros(3)))
    fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    if fleet.is_server():
        return serve()
    fleet.init_worker()

    def step() -> None:
        optimizer.minimize(-model(torch.arange(40)[None]).sum() - model.bias.sum())

    def expect(steps: int) -> int:
        number = fleet.publish(buffers=steps == 5)
        found = read_values(folder / "published")
        rows = found.sparse["weight"].values
        assert torch.equal(rows, torch.full((40, 4), float(steps))), (steps, rows)
        if strategy.dense == "servers" or steps == 5:
            assert found.dense["bias"].tolist() == [steps] * 3
        return number

    numbers = []
    for done in range(1, 9):
        step()
        model.seen += 1
        if done % 2 == fleet.worker_index():
            numbers.append(expect(done))
    say("published", *numbers)
    fleet.barrier_worker()
    if fleet.is_first_worker():
        (folder / "published").rename(folder / "aside")
        (folder / "published").touch()
        try:
            fleet.publish()
        except FleetError as error:
            say("unwritable:", error)
        (folder / "published").unlink()
        (folder / "aside").rename(folder / "published")
        expect(8)
    fleet.barrier_worker()
    step()
    fleet.stop_worker()


SCENARIOS = (
    published, halves, second_half, other_model, modes, together, warm, refused, killed, continued, beside,
)  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    fleet.init()
    {each.__name__: each for each in SCENARIOS}[sys.argv[1]]()
