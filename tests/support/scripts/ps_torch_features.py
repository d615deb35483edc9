"""What scripts written for torch do in a job with parameter servers: `ps_torch_features SCENARIO`. Both
trainers see the same batches, so a step is that of one process; `same` compares with torch's own.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from trainers import fleet
from trainers.collective.averaging import messages_of
from trainers.errors import FleetError
from trainers.ps import SparseEmbedding

ROWS, DIM, STEPS = 20, 4, 5
Optimizers = Sequence[torch.optim.Optimizer]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = torch.nn.Embedding(ROWS, DIM, sparse=True)
        self.out = torch.nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(ids)).mean()


def batches() -> list[torch.Tensor]:
    return list(torch.randint(0, ROWS, (STEPS, 8), generator=torch.Generator().manual_seed(1)))


def serve(
    model: torch.nn.Module, *made: torch.optim.Optimizer, **options: object
) -> list[fleet.DistributedOptimizer]:
    """The optimizers of a trainer, which is in training; a server has served when this raises SystemExit."""
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    for name, value in options.items():
        setattr(strategy, name, value)
    fleet.distributed_model(model)
    optimizers = [fleet.distributed_optimizer(each, strategy) for each in made]
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        raise SystemExit
    fleet.init_worker()
    return optimizers


def train(model: torch.nn.Module, optimizers: Optimizers) -> None:
    """The usual loop; each optimizer's gradients are cleared right after its step."""
    for ids in batches():
        model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    fleet.stop_worker()
    for (name, found), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")


def refused(word: str, call: Callable[[], object]) -> None:
    with pytest.raises(FleetError, match=word):
        call()


# ---- Scenarios


def recipe(model: Model) -> list[torch.optim.Optimizer]:
    """Torch's usual recipe for sparse embeddings."""
    return [
        torch.optim.SparseAdam(model.emb.parameters(), lr=0.1),
        torch.optim.Adam(model.out.parameters(), lr=0.05),
    ]


def two_optimizers() -> None:
    model, reference = Model(), Model()
    train(model, serve(model, *recipe(model)))
    train(reference, recipe(reference))
    same(model, reference)


def minimized() -> None:
    model, reference = Model(), Model()
    optimizers = serve(model, *recipe(model))
    for ids in batches():
        loss = model(ids)
        for optimizer in optimizers:
            optimizer.minimize(loss)
    train(reference, recipe(reference))
    same(model, reference)


def out_of_turn() -> None:
    model = Model()
    rows, dense = serve(model, *recipe(model))
    model(batches()[0]).backward()
    rows.step()
    refused("SparseAdam stepped twice", rows.step)
    refused("zero_grad.* was called while Adam had not stepped", model.zero_grad)
    refused("the model was called", lambda: model(batches()[1]))
    refused("the model was called", torch.no_grad()(lambda: model(batches()[1])))
    refused(r"state_dict\(\) was called", model.state_dict)
    refused("Adam had not stepped", fleet.stop_worker)
    dense.step()
    fleet.stop_worker()


def one_for_two() -> None:
    model = Model()
    one = torch.optim.Adam(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.out.parameters(), lr=0.1)
    if fleet.is_worker():
        refused("2 parameters", lambda: serve(model, one, other))


def scaler() -> None:
    model = Model()
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(batches()[0])).backward()
    refused("GradScaler", lambda: scaler.step(optimizer))
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(batches()[0])).backward()
    off.step(optimizer)
    fleet.stop_worker()


def served_weight() -> None:
    """What needs its values is refused; what does not works as before; afterwards it is a parameter."""
    model = Model()
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model.emb.weight
    for read in (
        lambda: (weight**2).sum(),
        lambda: torch.norm(weight),
        lambda: torch.sum(torch.square(weight)),
        lambda: weight.data.mul_(2),
        lambda: weight.detach() + 1,
        lambda: weight[0],
        lambda: torch.nn.functional.embedding(batches()[0], weight),
        lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
    ):
        refused("sparse=False", read)
    assert sum(each.numel() for each in model.parameters()) == ROWS * DIM + DIM + 1
    assert (weight.requires_grad, weight.dtype, weight.device.type, str(weight)[:9]) == (
        True, torch.float32, "cpu", "Parameter"
    )  # fmt: skip
    model(batches()[0]).backward()
    with pytest.raises(NotImplementedError):  # as torch itself of sparse gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(model.out.parameters(), 1.0)
    optimizer.step()
    assert type(model.state_dict()["emb.weight"]) is torch.Tensor
    fleet.stop_worker()
    assert type(weight) is torch.nn.Parameter
    assert (weight**2).sum() > 0


def one_cycle() -> None:
    """A scheduler that keeps values of its own in the groups."""
    model, reference = Model(), Model()

    def cycle(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=9, cycle_momentum=False)
        for ids in batches():
            optimizer.zero_grad()
            module(ids).backward()
            optimizer.step()
            schedule.step()

    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cycle(optimizer, model)
    cycle(torch.optim.SGD(reference.parameters(), lr=0.1), reference)
    same(model, reference)


def compiled(whole: torch.nn.Module, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The embedding is outside of the graph, in training and in evaluation."""
    train(whole, [optimizer])
    with torch.no_grad():
        whole.eval()(batches()[0])
    assert set(model.state_dict()) == {"emb.weight", "out.weight", "out.bias"}
    reference = Model()
    rows = torch.optim.SparseAdam([reference.emb.weight], lr=0.1)
    train(reference, [rows, torch.optim.Adam(reference.out.parameters(), lr=0.1)])
    same(model, reference)


def compiled_before() -> None:
    model = Model()
    whole = torch.compile(model, backend="aot_eager")
    (optimizer,) = serve(whole, torch.optim.Adam(model.parameters(), lr=0.1))
    compiled(whole, model, optimizer)


def compiled_after() -> None:
    model = Model()
    (optimizer,) = serve(model, torch.optim.Adam(model.parameters(), lr=0.1))
    compiled(torch.compile(model, backend="aot_eager"), model, optimizer)


def lazy() -> None:
    if fleet.is_server():
        return
    model = torch.nn.Sequential(torch.nn.LazyLinear(1))
    refused("'0.weight' has no shape", lambda: serve(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def copied() -> None:
    """Refused while it is served; afterwards and of its dense modules it is as ever."""
    model = Model()
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for copy_of in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        refused(
            "'emb.weight' is on parameter servers and cannot be copied",
            lambda copy_of=copy_of: copy_of(model),
        )
    average = torch.optim.swa_utils.AveragedModel(model.out)
    train(model, [optimizer])
    average.update_parameters(model.out)
    torch.testing.assert_close(average.module.weight, model.out.weight)
    fleet.stop_worker()
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(again(batches()[0]), model(batches()[0]))


def copied_without_embeddings() -> None:
    """A copy of a model whose parameters are all dense is an ordinary module, on its own."""
    model = torch.nn.Linear(1, 1)
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.1), a_sync=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model(torch.ones(1, 1)).backward()
        copied(torch.ones(1, 1)).backward()
        copied.zero_grad()
        assert copied.weight.grad is None
        copied.clear_gradients()
        assert optimizer.has_gradients(), "the model's own gradients"
        torch.nn.init.constant_(copied.weight, 7.0)
        copied.load_state_dict(copied.eval().state_dict())
        model.clear_gradients()
        assert not optimizer.has_gradients()
    fleet.stop_worker()
    assert model.weight.item() != 7.0


def other_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {name: torch.randn(each.shape, generator=generator) for name, each in Model().named_parameters()}


def loaded_while_served() -> None:
    """The servers take trainer 0's values; the moments of Adam stay, as in torch."""
    model, reference = Model(), Model()
    optimizers = serve(model, *recipe(model))
    theirs = recipe(reference)
    train(model, optimizers)
    train(reference, theirs)
    state = other_state()
    reference.load_state_dict(state)
    if fleet.worker_index():
        state = {name: torch.full_like(each, 7.0) for name, each in state.items()}
    model.load_state_dict(state)
    for (name, found), wanted in zip(model.state_dict().items(), other_state().values(), strict=True):
        assert torch.equal(found, wanted), name
    train(model, optimizers)
    train(reference, theirs)
    part = {"weight": torch.ones(1, DIM), "bias": torch.zeros(1)}
    for module in (model, reference):
        module.out.load_state_dict(part)
        module.emb.load_state_dict({"weight": torch.ones(ROWS, DIM)})
        assert module.load_state_dict({"out.bias": torch.ones(1)}, strict=False).missing_keys
    train(model, optimizers)
    train(reference, theirs)
    same(model, reference)


def loaded_amid_prefetching() -> None:
    """What was fetched in advance is of no use afterwards."""
    model, reference = Model(), Model()
    optimizers = serve(model, *recipe(model))
    theirs = recipe(reference)
    for step, ids in enumerate(fleet.prefetch(batches(), lambda ids: ids)):
        for module, steppers in ((model, optimizers), (reference, theirs)):
            if step == 2:
                module.load_state_dict(other_state())
            module(ids).backward()
            for optimizer in steppers:
                optimizer.step()
                optimizer.zero_grad()
    same(model, reference)


def loaded_wrongly() -> None:
    """As in torch: what fits is loaded, and an error tells the rest."""
    model = torch.nn.ModuleDict({"known": Model(), "any": SparseEmbedding(2)})
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.1))
    whole = model.state_dict()
    refused("unbounded", lambda: model.load_state_dict(whole))
    state = {name: each for name, each in whole.items() if name != "any.weight"}
    refused("assign", lambda: model.load_state_dict(state, strict=False, assign=True))
    wrong = {**state, "known.emb.weight": torch.zeros(ROWS - 1, DIM), "known.out.bias": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"known\.emb\.weight"):
        model.load_state_dict(wrong, strict=False)
    assert model.state_dict()["known.out.bias"] == 1
    assert torch.equal(model.state_dict()["known.emb.weight"], state["known.emb.weight"])
    refused("init_server", lambda: optimizer.load_state_dict({"state": {0: {}}, "param_groups": []}))
    fleet.stop_worker()


def loaded_in(**options: object) -> None:
    """Values before and after, of trainers that go on their own."""
    model = Model()
    (optimizer,) = serve(model, torch.optim.Adam(model.parameters(), lr=0.1), **options)
    train(model, [optimizer])
    model.load_state_dict(other_state())
    for name, wanted in other_state().items():
        torch.testing.assert_close(model.state_dict()[name], wanted)
    torch.testing.assert_close(model.emb(torch.arange(ROWS)), other_state()["emb.weight"])
    fleet.barrier_worker()
    train(model, [optimizer])
    fleet.stop_worker()
    assert (model.emb.weight - other_state()["emb.weight"]).abs().max() > 0.1


def loaded_in_async() -> None:
    loaded_in(a_sync=True)


def loaded_in_geo() -> None:
    loaded_in(a_sync=True, a_sync_configs={"k_steps": 3})


def loaded_in_allreduce() -> None:
    loaded_in(dense="allreduce")


def averaged_gradients() -> None:
    """Of dense parameters that no server holds: more than go into one message, and one trainer lacks some."""
    model = torch.nn.ModuleDict({"rows": Model(), "wide": torch.nn.Linear(6, 1_000_000), "last": Model().out})
    dense = [model["wide"].weight, model["wide"].bias, model["last"].weight]
    before = [each.detach().clone() for each in dense]
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=1.0), dense="allreduce")
    drawn = [
        [torch.randn(each.shape, generator=torch.Generator().manual_seed(rank)) for each in dense]
        for rank in range(2)
    ]
    assert [len(each) for each in messages_of(reversed(dense))] == [2, 1]
    drawn[1][2].zero_()
    for parameter, grad in zip(dense, drawn[fleet.worker_index()], strict=True):
        parameter.grad = grad.clone() if grad.any() else None
    optimizer.step()
    for parameter, was, first, second in zip(dense, before, *drawn, strict=True):
        assert torch.equal(parameter, was - (first + second) / 2)
    assert torch.equal(model["rows"].out.weight, Model().out.weight), "zeros are no step of SGD"
    fleet.stop_worker()


def averaged() -> None:
    """An exponential moving average of the dense modules: by torch's class, and by hand."""
    model, reference = Model(), Model()
    optimizers = serve(model, *recipe(model))
    theirs = recipe(reference)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    served, own = (
        torch.optim.swa_utils.AveragedModel(each.out, multi_avg_fn=decay) for each in (model, reference)
    )
    by_hand: dict[str, torch.Tensor] = {}
    for ids in batches():
        for module, steppers, average in ((model, optimizers, served), (reference, theirs, own)):
            module(ids).backward()
            for one in steppers:
                one.step()
                one.zero_grad()
            average.update_parameters(module.out)
        for name, each in model.out.named_parameters():
            by_hand.setdefault(name, each.detach().clone()).lerp_(each.detach(), 0.1)
    assert (own.module.weight - reference.out.weight).abs().max() > 1e-3
    for name, wanted in own.module.named_parameters():
        torch.testing.assert_close(served.module.get_parameter(name), wanted)
        torch.testing.assert_close(by_hand[name], wanted)
    served.module.load_state_dict(
        pickle.loads(pickle.dumps(served.module)).state_dict()
    )  # concerns no server
    model.out.load_state_dict(served.module.state_dict())  # this does, as for an evaluation or at the end
    reference.out.load_state_dict(own.module.state_dict())
    same(model, reference)


class ManyTables(torch.nn.Module):
    """26 tables of three widths, so that servers and trainers handle some together: with padding, in a bag,
    not trained, called twice, and not called in every step.
    """

    BAG, FROZEN, TWICE, SELDOM = 7, 9, 11, 13

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = torch.nn.ModuleList(self._table(number) for number in range(26))
        self.tables[self.FROZEN].weight.requires_grad_(False)
        self.out = torch.nn.Linear(1, 1)

    def _table(self, number: int) -> torch.nn.Module:
        dim = (4, 8, 16)[number % 3]
        if number == self.BAG:
            return torch.nn.EmbeddingBag(ROWS, dim, mode="sum", sparse=True)
        return torch.nn.Embedding(ROWS, dim, sparse=True, padding_idx=0 if number % 5 == 0 else None)

    def calls(self, ids: torch.Tensor, step: int) -> list[tuple[torch.nn.Module, torch.Tensor]]:
        """(26, 8) ids: which table is called with which of them."""
        made = [(table, ids[number].view(2, 4)) for number, table in enumerate(self.tables)]
        made.append((self.tables[self.TWICE], ids[0]))
        return [each for each in made if each[0] is not self.tables[self.SELDOM] or step % 2 == 0]

    def forward(self, calls: list[tuple[torch.nn.Module, torch.Tensor]]) -> torch.Tensor:
        rows = [table(ids).flatten().sin() * (number + 1) for number, (table, ids) in enumerate(calls)]
        return self.out(torch.cat(rows).mean().view(1)).sum()

    def optimizers(self) -> list[torch.optim.Optimizer]:
        trained = [each.weight for each in self.tables if each.weight.requires_grad]
        return [torch.optim.SparseAdam(trained, lr=0.1), torch.optim.Adam(self.out.parameters(), lr=0.05)]


def trained_with_many_tables(*, prefetch: bool = False, backwards: int = 1, **options: object) -> None:
    """`backwards`: batches whose gradients make one step."""
    model, reference = ManyTables(), ManyTables()
    before = reference.tables[ManyTables.SELDOM].weight.detach().clone()
    drawn = torch.randint(0, ROWS, (6 * backwards, 26, 8), generator=torch.Generator().manual_seed(1))
    served = serve(model, *model.optimizers(), **options)
    for each, optimizers in ((model, served), (reference, reference.optimizers())):
        coming: Iterable[Any] = [each.calls(ids, number // backwards) for number, ids in enumerate(drawn)]
        if prefetch and each is model:
            coming = fleet.prefetch(coming, by_module)
        for number, calls in enumerate(coming, 1):
            each(calls).backward()
            if number % backwards == 0:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    assert not torch.equal(before, reference.tables[ManyTables.SELDOM].weight)
    same(model, reference)


def by_module(calls: list[tuple[torch.nn.Module, torch.Tensor]]) -> dict[torch.nn.Module, list[torch.Tensor]]:
    found: dict[torch.nn.Module, list[torch.Tensor]] = {}
    for module, ids in calls:
        found.setdefault(module, []).append(ids)
    return found


def many_tables() -> None:
    trained_with_many_tables()


def many_tables_prefetched() -> None:
    """Small tables are whole on one server: some of each width are shared by both."""
    shared = {f"tables.{number}.weight": {"servers": 2} for number in (0, 1, 2, 15, ManyTables.TWICE)}
    trained_with_many_tables(prefetch=True, sparse_table_configs=shared)


def many_tables_with_accumulated_gradients() -> None:
    trained_with_many_tables(prefetch=True, backwards=3)


def many_tables_from_a_loader() -> None:
    """Nothing declares which tensors of a batch are ids. The second loop draws random numbers in the order of
    torch.
    """

    class Drawn(torch.utils.data.Dataset[tuple[torch.Tensor]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, number: int) -> tuple[torch.Tensor]:
            return (torch.randint(0, ROWS, (26, 8)),)

    def train(each: ManyTables, optimizers: Optimizers) -> None:
        torch.manual_seed(3)
        for data in (torch.utils.data.TensorDataset(drawn), Drawn()):
            for number, (ids,) in enumerate(torch.utils.data.DataLoader(data, shuffle=True)):
                sign = torch.randn(()).sign()
                (each(each.calls(ids[0], number // 4)) * sign).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    drawn = torch.randint(0, ROWS, (12, 26, 8), generator=torch.Generator().manual_seed(1))
    model, reference = ManyTables(), ManyTables()
    train(reference, reference.optimizers())  # while nothing looks into loops
    train(model, serve(model, *model.optimizers()))
    same(model, reference)


def many_tables_in_geo() -> None:
    """Gradients that do not depend on the rows, so that the trainers may exchange in any order."""
    model, reference = ManyTables(), ManyTables()
    drawn = torch.randint(0, ROWS, (7, 26, 8), generator=torch.Generator().manual_seed(1))
    trained = [
        torch.optim.SGD([each.weight for each in one.tables if each.weight.requires_grad], lr=0.1)
        for one in (model, reference)
    ]
    options = {"a_sync": True, "a_sync_configs": {"k_steps": 2}}
    (served,) = serve(model, trained[0], **options)
    for each, optimizer in ((model, served), (reference, trained[1])):
        coming = [each.calls(ids, number) for number, ids in enumerate(drawn)]
        for calls in fleet.prefetch(coming, by_module) if each is model else coming:
            sum(table(ids).sum() * (number + 1) for number, (table, ids) in enumerate(calls)).backward()
            optimizer.step()
            optimizer.zero_grad()
    fleet.barrier_worker()
    same(model, reference)


def many_tables_in_short_rows() -> None:
    """An exact comparison is not possible: it must come close."""
    model = ManyTables()
    first = model.tables[0].weight.detach().clone()
    served = serve(model, *model.optimizers(), ps_configs={"wire_dtype": "bfloat16"}, a_sync=True)
    for ids in torch.randint(0, ROWS, (6, 26, 8), generator=torch.Generator().manual_seed(1)):
        model(model.calls(ids, 0)).backward()
        for optimizer in served:
            optimizer.step()
            optimizer.zero_grad()
    fleet.barrier_worker()
    fleet.stop_worker()
    moved = (model.tables[0].weight - first).abs()
    assert moved[0].max() < 0.01, "padding is not trained"  # bfloat16 rounds it
    assert 0.05 < moved[1:].mean() < 2.0


def written() -> None:
    """Weights are clipped after each step, a layer is initialized again, and a part of it is loaded."""
    model, reference = Model(), Model()
    stray = torch.optim.SGD(model.out.parameters(), lr=0.1)
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.5))
    own = torch.optim.SGD(reference.parameters(), lr=0.5)
    for module, stepped in ((model, optimizer), (reference, own)):
        for step, ids in enumerate(batches()):
            module(ids).backward()
            if step == 2:
                torch.nn.init.constant_(module.out.weight, 0.3)
            stepped.step()
            stepped.zero_grad()
            for each in module.out.parameters():
                each.data.clamp_(-0.1, 0.1)
            if step == 3:
                module.out.weight.detach().numpy()[:] = 2
                module.out.load_state_dict({"bias": torch.ones(1)}, strict=False)
    refused("fleet does not have this optimizer", stray.step)
    for (name, found), wanted in zip(model.state_dict().items(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, msg=name)
    weight = model.out.weight
    model.out.weight = torch.nn.Parameter(weight.detach().clone())
    refused("'out.weight' was replaced", lambda: fleet.save_persistables("nowhere"))
    model.out.weight = weight
    same(model, reference)
    stray.step()


def written_in_async() -> None:
    model = Model()
    (optimizer,) = serve(model, torch.optim.SGD(model.parameters(), lr=0.5), a_sync=True)
    model(batches()[0]).backward()
    optimizer.step()
    fleet.barrier_worker()
    kept = model.state_dict()["out.bias"].clone()
    model.out.bias.data.fill_(3)
    refused("changed parameter 'out.bias'", optimizer.step)
    refused("changed parameter 'out.bias'", model.state_dict)
    refused("changed parameter 'out.bias'", lambda: model.eval()(batches()[1]))
    model.out.bias.data.copy_(kept)
    fleet.stop_worker()


SCENARIOS: tuple[Callable[[], None], ...] = (
    written,
    written_in_async,
    many_tables,
    many_tables_prefetched,
    many_tables_with_accumulated_gradients,
    many_tables_from_a_loader,
    many_tables_in_geo,
    many_tables_in_short_rows,
    two_optimizers,
    minimized,
    out_of_turn,
    one_for_two,
    scaler,
    served_weight,
    one_cycle,
    compiled_before,
    compiled_after,
    lazy,
    copied,
    copied_without_embeddings,
    averaged,
    averaged_gradients,
    loaded_while_served,
    loaded_amid_prefetching,
    loaded_wrongly,
    loaded_in_async,
    loaded_in_geo,
    loaded_in_allreduce,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    fleet.init()
    {each.__name__: each for each in SCENARIOS}[sys.argv[1]]()
