"""What TorchRec's modules do in a job with parameter servers: `ps_torchrec SCENARIO`. All trainers see the
same batches, so a step is that of one process.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.streamable import Pipelineable

from tests.support.scripts.ps_torch_features import same, serve
from trainers import fleet
from trainers.errors import FleetError, UsageError
from trainers.inference import load_inference_model
from trainers.ps import read_values
from trainers.ps.trainer.weight import ServedWeight

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
BATCH, STEPS = 6, 5
FEATURES = ("a", "b", "c", "d")


def bag(
    name: str, *features: str, rows: int = 20, dim: int = 4, pooling: PoolingType = SUM, **options: Any
) -> Any:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        feature_names=[*features],
        pooling=pooling,
        **options,
    )


def row(name: str, *features: str, rows: int = 20, dim: int = 4, **options: Any) -> Any:
    return EmbeddingConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[*features], **options
    )


TABLES = {
    "plain": [bag("t1", "a"), bag("t2", "b")],
    "dims": [bag("t1", "a"), bag("t2", "b", dim=8), bag("t3", "c"), bag("t4", "d", dim=8)],
    "shared": [bag("t1", "a", "c"), bag("t2", "b", "a"), bag("t3", "d")],
    "mean": [bag("t1", "a", pooling=MEAN), bag("t2", "b"), bag("t3", "d", pooling=MEAN)],
    "reversed": [bag("t1", "d"), bag("t2", "a")],
}


class Model(torch.nn.Module):
    def __init__(self, tables: list[Any], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(tables=tables, **options)
        self.over = torch.nn.Linear(sum(self.ebc._lengths_per_embedding), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.ebc(features)
        return self.over(torch.tanh(found.values())).mean()


def batches(
    *, weighted: bool = False, rows: int = 20, dtype: torch.dtype = torch.int64
) -> list[KeyedJaggedTensor]:
    random = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=random)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=random)
        weights = torch.rand(len(values), generator=random) if weighted else None
        found.append(
            KeyedJaggedTensor.from_lengths_sync(
                [*FEATURES], values.to(dtype), weights=weights, lengths=lengths.to(torch.int32)
            )
        )
    return found


def train(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    some: Sequence[Any],
    between: Callable[[torch.nn.Module], object] = lambda model: None,
) -> list[float]:
    """Return the losses. `between` is called with the model between the backward passes and the steps."""
    losses = []
    for each in some:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(each)
        loss.backward()
        between(model)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def adagrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def descent(model: torch.nn.Module) -> torch.optim.Optimizer:
    """To Adagrad, a gradient that always counts twice is the same."""
    return torch.optim.SGD(model.parameters(), lr=0.5)


def compared(
    make: Callable[[], torch.nn.Module],
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    some: Sequence[Any],
    between: Callable[[torch.nn.Module], object] = lambda model: None,
    **options: object,
) -> None:
    """With servers, it equals TorchRec's modules with torch's optimizer."""
    model, reference = make(), make()
    found = train(model, serve(model, optimizer(model), **options), some, between)
    wanted = train(reference, [optimizer(reference)], some, between)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
    same(model, reference)


def pooled() -> None:
    """Sums and means, tables of several features and features of several tables, in any order."""
    names = Model(TABLES[sys.argv[2]]).ebc(batches()[0]).keys()

    class Named(Model):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            found = self.ebc(features)
            assert found.keys() == names
            assert found.offset_per_key()[-1] == found.values().shape[1]
            return super().forward(features)

    compared(lambda: Named(TABLES[sys.argv[2]]), adagrad, batches())


def in_two_trainers() -> None:
    """Each trainer has half of the examples of each batch."""

    def half(whole: KeyedJaggedTensor) -> KeyedJaggedTensor:
        first, count = fleet.worker_index() * BATCH // 2, BATCH // 2
        parts = {key: whole[key].to_dense()[first : first + count] for key in FEATURES}
        jagged = {
            key: JaggedTensor(torch.cat(some), lengths=torch.tensor([*map(len, some)]))
            for key, some in parts.items()
        }
        return KeyedJaggedTensor.from_jt_dict(jagged)

    model, reference = Model(TABLES["dims"]), Model(TABLES["dims"])
    made = serve(model, torch.optim.SGD(model.parameters(), lr=0.5))
    train(model, made, [half(each) for each in batches()])
    train(reference, [torch.optim.SGD(reference.parameters(), lr=0.5)], batches())
    same(model, reference)


class Weighted(torch.nn.Module):
    """Position weights, which train too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = EmbeddingBagCollection(tables=TABLES["shared"], is_weighted=True)
        places = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, 4))
        self.fp = FeatureProcessedEmbeddingBagCollection(inner, places)
        self.over = torch.nn.Linear(sum(inner._lengths_per_embedding), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(torch.tanh(self.fp(features).values())).mean()


def weighted() -> None:
    compared(lambda: Model(TABLES["shared"], is_weighted=True), adagrad, batches(weighted=True))


def positions() -> None:
    compared(Weighted, adagrad, batches())


def int32_and_unused_keys() -> None:
    compared(lambda: Model(TABLES["reversed"]), adagrad, batches(dtype=torch.int32))


class Sequences(torch.nn.Module):
    """Rows of ids, beside a collection of bags that has one of the tables too, and an embedding of torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [row("s1", "a", "b"), row("s2", "c", "a")]
        self.ec = EmbeddingCollection(tables=tables, need_indices=True)
        self.again = EmbeddingCollection(tables=[row("s1", "d"), row("s3", "c")])
        self.again.embeddings["s1"] = self.ec.embeddings["s1"]
        self.ebc = EmbeddingBagCollection(tables=TABLES["plain"])
        self.plain = torch.nn.Embedding(20, 4, sparse=fleet.is_worker() and self.sparse)

    sparse = True

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found, again = self.ec(features), self.again(features)
        assert list(found) == ["a@s1", "b", "c", "a@s2"]
        assert list(again) == ["d", "c"]
        for name, jagged in found.items():
            given = features[name[0]]
            assert torch.equal(jagged.weights(), given.values())
            assert torch.equal(jagged.lengths(), given.lengths())
            assert jagged.values().shape == (len(given.values()), 4)
        rows = [each.values().sin().sum() for each in (*found.values(), *again.values())]
        bags = self.ebc(features)["a"].cos().sum() + self.plain(features["b"].values()).sum()
        return torch.stack(rows).mean() + bags


class DenseSequences(Sequences):
    sparse = False


def sequences() -> None:
    model, reference = Sequences(), DenseSequences()
    found = train(model, serve(model, adagrad(model)), batches())
    wanted = train(reference, [adagrad(reference)], batches())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=2e-6)
    same(model, reference)


def called_twice() -> None:
    """One collection twice in a step, with a graph that goes back twice."""

    class Twice(Model):
        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            loss = super().forward(features) + super().forward(batches()[0])
            loss.backward(retain_graph=True)
            return loss + super().forward(features)

    compared(lambda: Twice(TABLES["shared"]), adagrad, batches())


def hooked() -> None:
    """A hook of one weight, a frozen table, gradients that the script asks for and reads."""

    class Hooked(Model):
        def __init__(self, tables: list[Any]) -> None:
            super().__init__(tables)
            self.seen: list[torch.Tensor] = []
            if len(sys.argv) > 2 and sys.argv[2] == "frozen":
                self.ebc.embedding_bags["t2"].weight.requires_grad_(False)

        def watch(self) -> None:
            weight = self.ebc.embedding_bags["t1"].weight
            if sys.argv[2] == "hook":
                weight.register_hook(lambda grad: grad * 2)
            if sys.argv[2] == "forward_hook":
                self.ebc.embedding_bags["t1"].register_forward_hook(lambda module, args, out: out * 2)

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            loss = super().forward(features)
            weight = self.ebc.embedding_bags["t1"].weight
            if sys.argv[2] == "grad":
                (found,) = torch.autograd.grad(loss, [weight], retain_graph=True)
                self.seen.append(found.to_dense())
            if sys.argv[2] in ("inputs", "unread"):
                loss.backward(inputs=[weight], retain_graph=True)
            if sys.argv[2] == "inputs":
                self.seen.append(weight.grad.to_dense().clone())
            return loss

    model, reference = Hooked(TABLES["shared"]), Hooked(TABLES["shared"])
    made = serve(model, descent(model))
    model.watch()
    reference.watch()
    found, wanted = train(model, made, batches()), train(reference, [descent(reference)], batches())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
    torch.testing.assert_close(model.seen, reference.seen)
    same(model, reference)


def other_weights() -> None:
    """torch.func.functional_call gives a table another weight."""
    model, reference = Model(TABLES["plain"]), Model(TABLES["plain"])
    serve(model, adagrad(model))
    other = {"ebc.embedding_bags.t1.weight": torch.rand(20, 4, requires_grad=True)}
    found = torch.func.functional_call(model, other, (batches()[0],))
    wanted = torch.func.functional_call(reference, other, (batches()[0],))
    torch.testing.assert_close(found, wanted)
    fleet.stop_worker()


# ---- Configurations, optimizers, pipelines


def on_meta() -> None:
    """Rows appear with the values of init_fn, and within num_embeddings."""
    tables = [
        bag("t1", "a", "c"),
        bag("t2", "b", init_fn=partial(torch.nn.init.normal_, std=0.1)),
        bag("t3", "d", rows=1 << 50, use_virtual_table=True, init_fn=torch.nn.init.ones_),
    ]
    model, reference = Model(tables, device="meta"), Model([*tables[:2], bag("t3", "d")])
    made = serve(model, adagrad(model))
    every = KeyedJaggedTensor(
        [*FEATURES], torch.arange(20).repeat(4), lengths=torch.ones(80, dtype=torch.int32)
    )
    with torch.no_grad():
        first = model.ebc(every).to_dict()
        for table, name in (("t1", "a"), ("t2", "b"), ("t3", "d")):
            reference.ebc.embedding_bags[table].weight.copy_(first[name])
    reference.over.load_state_dict(model.over.state_dict())
    low, high, spread = -(20**-0.5), 20**-0.5, first["b"].std().item()
    assert (first["a"] >= low).all()
    assert (first["a"] < high).all()
    assert 0.05 < spread < 0.2
    assert (first["d"] == 1).all()
    assert not torch.equal(first["a"], first["b"])
    found, wanted = train(model, made, batches()), train(reference, [adagrad(reference)], batches())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
    far = KeyedJaggedTensor(
        [*FEATURES], torch.tensor([1, 2, 20, 1 << 60]), lengths=torch.ones(4, dtype=torch.int32)
    )
    with pytest.raises(IndexError, match=r"'ebc.embedding_bags.t1.weight' has rows 0 to 19.* 20 for .* 'c'"):
        model(far)
    names = {name for name, _ in model.named_parameters()}
    assert {f"ebc.embedding_bags.t{number}.weight" for number in (1, 2, 3)} < names
    fleet.stop_worker()


IN_BACKWARD: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}),
    "row_wise": (RowWiseAdagrad, {"lr": 0.1}),
}


def in_backward() -> None:
    """apply_optimizer_in_backward gives the rule of tables, of collections and of torch's modules."""
    kind, options = IN_BACKWARD[sys.argv[2]]
    embedded = sys.argv[2] != "row_wise"

    class Stepping(Model):
        def __init__(self) -> None:
            super().__init__(TABLES["dims"])
            self.plain = torch.nn.Embedding(20, 4, sparse=embedded)
            tables = [*self.ebc.parameters(), *self.plain.parameters()]
            apply_optimizer_in_backward(kind, tables if embedded else tables[:-1], options)

        def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
            return super().forward(features) + self.plain(features["a"].values()).sin().mean()

    def dense(model: torch.nn.Module) -> torch.optim.Optimizer:
        named = dict(in_backward_optimizer_filter(model.named_parameters()))
        return KeyedOptimizerWrapper(named, lambda some: torch.optim.SGD(some, lr=0.1))

    def changed(model: torch.nn.Module) -> None:
        """The gradients of tables are gone by now, so this changes only the others."""
        for each in model.parameters():
            if each.grad is None:
                each.grad = None
            else:
                each.grad.mul_(0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if isinstance(model.plain.weight, ServedWeight):  # torch would step with it in the next backward pass
            with pytest.raises(UsageError, match="setter of grad"):
                model.plain.weight.grad = torch.zeros(20, 4).to_sparse(1)

    compared(Stepping, dense, batches(), *([changed] if sys.argv[3:] else []))


def combined() -> None:
    """TorchRec's CombinedOptimizer, of torch's optimizers and of RowWiseAdagrad."""

    def both(model: Model) -> torch.optim.Optimizer:
        tables, rest = dict(model.ebc.named_parameters()), dict(model.over.named_parameters())
        return CombinedOptimizer(
            [
                ("ebc", KeyedOptimizerWrapper(tables, lambda some: RowWiseAdagrad(some, lr=0.1))),
                ("over", KeyedOptimizerWrapper(rest, lambda some: torch.optim.Adam(some, lr=0.1))),
            ]
        )

    compared(lambda: Model(TABLES["dims"]), both, batches())


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device, non_blocking))

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> Batch:
        return self


class Stream(torch.utils.data.IterableDataset[Batch]):
    def __init__(self, times: int = 4) -> None:
        self._batches = [Batch(each) for _ in range(times) for each in batches()]

    def __iter__(self) -> Any:
        return iter(self._batches)


class Losses(torch.nn.Module):
    """(loss, outputs), as pipelines need it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = Model(TABLES["dims"], **options)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.model(batch.features)
        return loss, loss.detach()


def counted() -> Counter[str]:
    """From now on, the messages to server 0, by kind."""
    runtime: Any = fleet._fleet._runtime
    client, found = runtime.worker._client, Counter[str]()
    send = client.send

    def counting(requests: Any, *rest: Any) -> Any:
        requests = list(requests)
        found.update(each.kind.name for each in requests if each.server == 0)
        return send(requests, *rest)

    client.send = counting
    return found


def pipelined() -> None:
    """TorchRec's pipelines draw batches ahead: a step is one message all the same."""
    _, kind, mode = sys.argv[1:]
    model, reference = Losses(), Losses()
    (optimizer,) = serve(model, adagrad(model), a_sync=mode == "async")
    pipes = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}
    losses, cpu = [], torch.device("cpu")
    messages, total = counted(), Counter[str]()
    for one, trained in ((model, optimizer), (reference, adagrad(reference))):
        pipe, coming = (
            pipes[kind](one, trained, cpu),
            iter(torch.utils.data.DataLoader(Stream(), batch_size=None)),
        )
        mine: list[float] = []
        with contextlib.suppress(StopIteration):
            while True:
                mine.append(pipe.progress(coming).item())
        losses.append(mine)
        total = total or messages.copy()
    assert len(losses[0]) == 4 * STEPS
    print(total)
    assert total["PUSH"] == 4 * STEPS
    assert total["PULL"] <= 5  # until it has learned what the pipeline does
    if mode == "sync":
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0, atol=1e-6)
        same(model, reference)
    else:
        fleet.stop_worker()


def looped() -> None:
    """In a loop over a loader, or over fleet.prefetch, a step is one message."""
    _, kind, mode = sys.argv[1:]
    model, reference = Sequences(), DenseSequences()
    (optimizer,) = serve(model, adagrad(model), a_sync=mode == "async", ps_configs={"read_ahead": True})
    data = Stream()
    messages = counted()

    def step(features: KeyedJaggedTensor) -> None:
        model(features).backward()
        optimizer.step()
        optimizer.zero_grad()

    if kind == "loader":
        for batch in torch.utils.data.DataLoader(data, batch_size=None):
            step(batch.features)
    else:

        def ids(batch: Batch) -> dict[torch.nn.Module, Any]:
            jagged = batch.features
            called = dict.fromkeys((model.ec, model.again, model.ebc), jagged)
            return {**called, model.plain: jagged["b"].values()}

        for batch in fleet.prefetch(data, ids):
            step(batch.features)
    print(dict(messages))
    assert messages["PUSH"] == 4 * STEPS
    assert messages["PULL"] <= 6, messages
    if mode == "sync":
        train(reference, [adagrad(reference)], [each.features for each in data])
        same(model, reference)
    else:
        fleet.stop_worker()


def skipped() -> None:
    """Batches that are drawn and not trained, or changed before their turn, do no harm."""
    model, reference = Model(TABLES["dims"]), Model(TABLES["dims"])
    (optimizer,) = serve(model, adagrad(model), ps_configs={"read_ahead": True})
    made = adagrad(reference)
    for number, batch in enumerate(torch.utils.data.DataLoader(Stream(), batch_size=None)):
        features = batch.features
        if number % 3 == 1:
            continue
        ids, lengths = features.values().numpy(), features.lengths().numpy()
        if number % 3 == 0 and number % 2:
            ids[:] = (ids + 1) % 20
        elif number % 3 == 0:
            lengths[:2] = lengths[1], lengths[0]
        for one, trained in ((model, optimizer), (reference, made)):
            one(features).backward()
            trained.step()
            trained.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(model(features), reference(features))
    same(model, reference)


def geo() -> None:
    compared(lambda: Model(TABLES["dims"]), adagrad, batches(), a_sync=True, a_sync_configs={"k_steps": 1})


def wrong() -> None:
    """Wrong ids and features are refused before a kernel reads them, and training goes on."""
    model, reference = Model(TABLES["shared"], is_weighted=True), Model(TABLES["shared"], is_weighted=True)
    made = serve(model, adagrad(model))
    good = batches(weighted=True)
    keys, ids, weights, lengths = [*FEATURES], good[0].values(), good[0].weights(), good[0].lengths()

    def jagged(**changes: Any) -> KeyedJaggedTensor:
        given = {"keys": keys, "values": ids, "weights": weights, "lengths": lengths, **changes}
        return KeyedJaggedTensor(**given)

    negative = lengths.clone()
    negative[:2] += torch.tensor([-5, 5])
    offsets = torch.cat([torch.zeros(1), lengths.cumsum(0)]).long()
    strides = [[BATCH]] * 4
    for error, word, features in (
        (IndexError, "rows 0 to 19, but was given the id 20 for the feature", jagged(values=ids * 0 + 20)),
        (IndexError, "the id -1 for the feature", jagged(values=ids * 0 - 1)),
        (TypeError, "int64 or int32", jagged(values=ids.to(torch.int16))),
        (KeyError, "d", jagged(keys=["a", "b", "c", "other"])),
        (FleetError, "wrong lengths", jagged(lengths=negative)),
        (FleetError, "wrong lengths", jagged(lengths=lengths[:-1])),
        (FleetError, "wrong lengths", jagged(values=ids[:-1], weights=weights[:-1])),
        (FleetError, "wrong offsets", jagged(lengths=None, offsets=offsets + 1)),
        (FleetError, "one weight for each value", jagged(weights=weights[:-1])),
        (AssertionError, "have weights", jagged(weights=None)),
        (FleetError, "equally many examples", jagged(stride_per_key_per_rank=strides)),
        (FleetError, "equally many examples", jagged(inverse_indices=(keys, torch.arange(4)))),
    ):
        with pytest.raises(error, match=word):
            model(features)
    with pytest.raises(FleetError, match="cannot be copied"):
        copy.deepcopy(model)
    some = [jagged(lengths=None, offsets=offsets), *good]
    found, wanted = train(model, made, some), train(reference, [adagrad(reference)], some)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
    same(model, reference)


def empty() -> None:
    """Batches without ids, and without examples."""
    none = KeyedJaggedTensor([*FEATURES], torch.tensor([]).long(), lengths=torch.zeros(4 * BATCH).int())
    compared(lambda: Model(TABLES["dims"]), adagrad, [none, *batches(), none])


def nothing() -> None:
    model = Sequences()
    serve(model, adagrad(model))
    no_examples = KeyedJaggedTensor([*FEATURES], torch.tensor([]).long(), lengths=torch.tensor([]).int())
    assert model.ebc(no_examples).values().shape == (0, 8)
    assert [each.values().shape for each in model.ec(no_examples).values()] == [(0, 4)] * 4
    doubled = model.ec(KeyedJaggedTensor.concat([batches()[0]] * 2))  # of a key that comes twice, the last
    for name, wanted in model.ec(batches()[0]).items():
        assert torch.equal(doubled[name].values(), wanted.values())
        assert torch.equal(doubled[name].lengths(), wanted.lengths())
    fleet.stop_worker()


def half_rows() -> None:
    """Tables in float16 are computed in float32, as FBGEMM does."""
    half, full = DataType.FP16, DataType.FP32

    def make(kind: DataType) -> Model:
        return Model([bag("t1", "a", data_type=kind), bag("t2", "b", pooling=MEAN, data_type=kind)])

    model, reference = make(half), make(full)
    with torch.no_grad():
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            other.copy_(one)
    (made,) = serve(model, adagrad(model))
    features = batches()[0]
    assert model.ebc(features).values().dtype is torch.float32
    torch.testing.assert_close(model(features), reference(features))
    model(features).backward()
    made.step()
    fleet.stop_worker()
    assert model.ebc.embedding_bags["t1"].weight.dtype is torch.float16


# ---- Saves, states, exports


def saved() -> None:
    """Tables are saved and loaded by the names of TorchRec's state_dict, and so is its state."""
    folder, first = Path(sys.argv[2]), sys.argv[3] == "first"
    model, reference = Model(TABLES["dims"], device="meta"), Model(TABLES["dims"])
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    fleet.distributed_model(model)
    made = fleet.distributed_optimizer(adagrad(model), strategy)
    if fleet.is_server():
        fleet.init_server(None if first else folder / "saved")
        fleet.run_server()
        return
    fleet.init_worker()
    if first:
        train(model, [made], batches())
        torch.save(model(batches()[0]), folder / "wanted")
        fleet.save_persistables(folder / "saved")
    else:
        with torch.no_grad():
            torch.testing.assert_close(model(batches()[0]), torch.load(folder / "wanted"))
        tables = read_values(folder / "saved").sparse
        assert set(tables) == {f"ebc.embedding_bags.t{number}.weight" for number in range(1, 5)}
        assert set(tables) < set(reference.state_dict())
    fleet.stop_worker()


def loaded() -> None:
    """A state of TorchRec's module is loaded, and returned after training."""
    model, reference = Model(TABLES["dims"]), Model(TABLES["dims"])
    made = serve(model, adagrad(model))
    with torch.no_grad():
        for each in reference.parameters():
            each.add_(0.25)
    model.load_state_dict(reference.state_dict())
    found, wanted = train(model, made, batches()), train(reference, [adagrad(reference)], batches())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    torch.testing.assert_close(state, reference.state_dict())
    train(model, made, batches())  # while the script has the state
    fleet.stop_worker()


class Served(torch.nn.Module):
    """A model of tensors, as a server of models calls it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(tables=TABLES["mean"], **options)
        self.weighted = EmbeddingBagCollection(tables=TABLES["shared"], is_weighted=True, **options)
        self.ec = EmbeddingCollection(tables=[row("s1", "a", "b")], **options)
        self.over = torch.nn.Linear(sum(self.ebc._lengths_per_embedding), 2)

    def forward(self, lengths: torch.Tensor, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor([*FEATURES], values, weights, lengths=lengths)
        rows = self.ec(features)
        more = self.weighted(features).values().sum(1, keepdim=True)
        return self.over(self.ebc(features).values()) + rows["b"].values().sum() + more


def exported() -> None:
    """A program for serving equals the model. It needs neither TorchRec nor FBGEMM."""
    _, folder, device = sys.argv[1:]
    model = Served(device=None if device == "cpu" else torch.device(device))
    (made,) = serve(model, adagrad(model))
    some = batches(weighted=True)
    called = [(each.lengths(), each.values(), each.weights()) for each in some]
    for each in called:
        model(*each).sum().backward()
        made.step()
        made.zero_grad()
    model.eval()
    fleet.save_inference_model(Path(folder) / "program", model, called[0])
    program = load_inference_model(Path(folder) / "program")
    assert "fbgemm" not in str(program._module)
    for each in called:
        with torch.no_grad():
            torch.testing.assert_close(program(*each), model(*each))
    fleet.stop_worker()


SCENARIOS = [
    pooled,
    in_two_trainers,
    weighted,
    positions,
    int32_and_unused_keys,
    sequences,
    called_twice,
    hooked,
    other_weights,
    on_meta,
    in_backward,
    combined,
    pipelined,
    looped,
    skipped,
    geo,
    wrong,
    empty,
    nothing,
    half_rows,
    saved,
    loaded,
    exported,
]

if __name__ == "__main__":
    torch.set_num_threads(1)
    fleet.init()
    {each.__name__: each for each in SCENARIOS}[sys.argv[1]]()
