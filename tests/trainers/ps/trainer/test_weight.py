"""What scripts do with the weight of an embedding: a served one does as torch's own, or is refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch.nn.utils import parametrize

from tests.trainers.ps.trainer.test_pooling import SERVERS, Answers
from trainers.errors import UsageError
from trainers.ps.client import Client
from trainers.ps.optimizer import hidden_gradients
from trainers.ps.tables.rules import SGD, AnyRule, Fixed
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.embedding import ServedEmbedding
from trainers.ps.trainer.group import TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.modules import EmbeddingModule, SparseEmbedding

ROWS, DIM = 12, 3
_SGD = SGD()
FIRST, SECOND = torch.tensor([[1, 4, 1], [9, 1, 0]]), torch.tensor([[4, 4, 7]])


def serve(
    module: EmbeddingModule,
    rows: torch.Tensor,
    rule: AnyRule = SGD(),  # noqa: B008
) -> tuple[ServedEmbedding, TableGroup]:
    group = TableGroup([table(module, 0, "emb.weight", rule)], SERVERS, cast(Client, Answers(rows)))
    return ServedEmbedding("emb.weight", module, group.tables[0], statistics=False), group


def serve_together(modules: Sequence[EmbeddingModule]) -> tuple[list[ServedEmbedding], TableGroup]:
    names = [f"emb{place}.weight" for place in range(len(modules))]
    group = TableGroup(
        [table(module, place, names[place]) for place, module in enumerate(modules)],
        SERVERS,
        cast(Client, Answers(torch.ones(ROWS, DIM))),
    )
    found = zip(names, modules, group.tables, strict=True)
    return [ServedEmbedding(*each, statistics=False) for each in found], group


def table(
    module: EmbeddingModule,
    place: int,
    name: str,
    rule: AnyRule = SGD(),  # noqa: B008
) -> SparseParameter:
    found: Any = SparseParameter(
        name=name,
        module=module,
        group={"lr": 1.0},
        own_lr=None,
        table=place,
        spec=TableSpec(kind=TableKind.SPARSE, name=name, size=DIM, rule=rule),
        rule=rule,
    )
    return found


class Twins:
    """An embedding of torch's and a served one with the same rows."""

    def __init__(self, make: Callable[[], EmbeddingModule]) -> None:
        torch.manual_seed(0)
        self.own, self.served = make(), make()
        self.serving, self.group = serve(self.served, self.own.weight.detach().clone())

    def check(self, use: Callable[[Any, torch.Tensor], object]) -> None:
        """The script does the same with both; then results are equal, and so are the gradients: of the same
        rows, in `weight.grad` and in what is pushed.
        """
        found, wanted = use(self.served, self.served.weight), use(self.own, self.own.weight)
        if isinstance(wanted, torch.Tensor):
            assert isinstance(found, torch.Tensor)
            assert found.requires_grad == wanted.requires_grad
            torch.testing.assert_close(found, wanted)
        else:
            assert found == wanted
        gradient = self.own.weight.grad
        pushed = self.group.take_gradients()
        if gradient is None:
            assert pushed is None
            assert self.served.weight.grad is None
            return
        assert pushed is not None
        keys, rows = gradient.coalesce().indices()[0], gradient.coalesce().values()
        if isinstance(self.own, torch.nn.Embedding):  # of a bag torch's gradient names padding, with zeros
            assert sorted(pushed.keys.tolist()) == keys.tolist()
        dense = torch.zeros(ROWS, DIM).index_add_(0, pushed.keys, pushed.rows)
        torch.testing.assert_close(dense, gradient.to_dense())
        read = self.served.weight.grad
        assert read is not None
        assert read.is_sparse
        torch.testing.assert_close(read.to_dense(), gradient.to_dense())
        again = self.group.take_gradients()
        assert again is not None, "reading a gradient leaves it"
        assert sorted(again.keys.tolist()) == sorted(pushed.keys.tolist())
        assert len(rows) == len(read.coalesce().values()) or not isinstance(self.own, torch.nn.Embedding)


def loss_of(rows: torch.Tensor) -> torch.Tensor:
    return (rows * torch.arange(1.0, rows.numel() + 1).view_as(rows)).sin().sum()


Use = Callable[[Any, Any], object]
USES: dict[str, Use] = {}


def use(function: Use) -> Use:
    USES[function.__name__] = function
    return function


@use
def plainly(module: Any, weight: Any) -> object:
    loss_of(module(FIRST)).backward()
    return module(SECOND)


@use
def in_eval_mode(module: Any, weight: Any) -> object:
    loss_of(module.eval()(FIRST)).backward()
    return None


@use
def one_result_is_detached(module: Any, weight: Any) -> object:
    (loss_of(module(FIRST)) + loss_of(module(SECOND).detach())).backward()
    return None


@use
def one_result_is_not_used(module: Any, weight: Any) -> object:
    first, second = module(FIRST), module(SECOND)
    loss_of(first).backward()
    return second.detach()


@use
def in_two_losses(module: Any, weight: Any) -> object:
    rows = module(FIRST)
    loss_of(rows).backward(retain_graph=True)
    (loss_of(rows) + loss_of(module(SECOND))).backward()
    return None


@use
def without_gradients(module: Any, weight: Any) -> object:
    with torch.no_grad():
        first = module(FIRST)
    with torch.inference_mode():
        module(SECOND)
    return first


@use
def frozen(module: Any, weight: Any) -> object:
    weight.requires_grad_(False)
    return module(FIRST)


@use
def frozen_after_the_first_call(module: Any, weight: Any) -> object:
    first = module(FIRST)
    weight.requires_grad = False
    second = module(SECOND)
    weight.requires_grad = True
    (loss_of(first) + loss_of(second)).backward()
    return None


@use
def with_a_hook(module: Any, weight: Any) -> object:
    seen: list[Any] = []
    handle = weight.register_hook(lambda grad: seen.append((tuple(grad.shape), grad.is_sparse)) or grad * 0.5)
    (loss_of(module(FIRST)) + loss_of(module(SECOND))).backward()
    handle.remove()
    loss_of(module(SECOND)).backward()
    return seen


@use
def with_a_hook_that_comes_late(module: Any, weight: Any) -> object:
    loss = loss_of(module(FIRST))
    weight.register_hook(lambda grad: grad * 3)
    loss.backward()
    return None


@use
def with_a_mask_of_rows(module: Any, weight: Any) -> object:
    mask = torch.zeros(ROWS, 1)
    mask[:5] = 1.0

    def keep_some(parameter: Any) -> None:
        parameter.grad = parameter.grad * mask

    weight.register_post_accumulate_grad_hook(keep_some)
    loss_of(module(FIRST)).backward()
    return None


@use
def a_hook_takes_the_gradient(module: Any, weight: Any) -> object:
    taken: list[torch.Tensor] = []

    def take(parameter: Any) -> None:
        taken.append(parameter.grad.to_dense())
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(take)
    loss_of(module(FIRST)).backward()
    return torch.stack(taken)


@use
def for_some_inputs(module: Any, weight: Any) -> object:
    other = torch.ones(DIM, requires_grad=True)
    loss_of(module(FIRST) * other).backward(inputs=[other])
    loss_of(module(SECOND) * other).backward(inputs=[weight])
    return other.grad


@use
def by_autograd_grad(module: Any, weight: Any) -> object:
    other = torch.ones(DIM, requires_grad=True)
    torch.autograd.grad(loss_of(module(FIRST) * other), [other])
    found, _ = torch.autograd.grad(loss_of(module(FIRST) * other), [weight, other])
    return found.to_dense()


@use
def read_between_two_passes(module: Any, weight: Any) -> object:
    loss_of(module(FIRST)).backward()
    first = weight.grad.to_dense()
    loss_of(module(SECOND)).backward()
    return first


@use
def set_to_none(module: Any, weight: Any) -> object:
    loss_of(module(FIRST)).backward()
    weight.grad = None
    loss_of(module(SECOND)).backward()
    return None


@use
def scaled_in_place(module: Any, weight: Any) -> object:
    loss_of(module(FIRST)).backward()
    weight.grad.mul_(0.25)
    return None


@use
def set_by_the_script(module: Any, weight: Any) -> object:
    loss_of(module(FIRST)).backward()
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[2, 5]]), torch.ones(2, DIM), (ROWS, DIM), check_invariants=True
    )
    return None


@use
def zeroed_by_the_module(module: Any, weight: Any) -> object:
    loss_of(module(FIRST)).backward()
    module.zero_grad()
    return weight.grad is None


@use
def as_another_weight(module: Any, weight: Any) -> object:
    other = torch.nn.Parameter(torch.ones(ROWS, DIM))
    rows = torch.func.functional_call(module, {"weight": other}, (FIRST,))
    loss_of(rows).backward()
    return rows


@use
def frozen_before_the_backward_pass(module: Any, weight: Any) -> object:
    other = torch.ones(DIM, requires_grad=True)
    first, second = loss_of(module(FIRST) * other), loss_of(module(SECOND) * other)
    weight.requires_grad = False
    first.backward()
    second.backward(inputs=[other])
    return other.grad


@use
def with_a_gradient_that_is_negated_later(module: Any, weight: Any) -> object:
    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return torch._neg_view(grads[0].contiguous())

    loss_of(Negated.apply(module(FIRST))).backward()  # type: ignore[no-untyped-call]  # torch's
    return None


@use
def read_in_inference_mode(module: Any, weight: Any) -> object:
    loss_of(module(FIRST)).backward()
    with torch.inference_mode():
        found = weight.grad.to_dense()
    weight.grad.mul_(0.5)
    loss_of(module(SECOND)).backward()
    return found


@use
def with_a_gradient_that_is_followed(module: Any, weight: Any) -> object:
    loss_of(module(SECOND)).backward()
    with warnings.catch_warnings(category=UserWarning, action="ignore"):  # of a cycle of references
        loss_of(module(FIRST)).backward(create_graph=True)
    return weight.grad.requires_grad


@use
def a_hook_raises(module: Any, weight: Any) -> object:
    def stop(grad: torch.Tensor) -> None:
        raise RuntimeError("stop")

    handle = weight.register_hook(stop)
    with pytest.raises(RuntimeError, match="stop"):
        loss_of(module(FIRST)).backward()
    handle.remove()
    return None


@use
def its_shape(module: Any, weight: Any) -> object:
    assert hash(weight)
    return (
        len(weight), weight.shape, weight.numel(), weight.dtype, weight.device, weight.dim(),
        weight.requires_grad, weight.is_leaf, sum(each.numel() for each in module.parameters()),
        module.to("cpu") is module,
        module.float() is module, weight.to(torch.float32) is weight, weight.is_sparse,
    )  # fmt: skip


MODULES: dict[str, Callable[[], EmbeddingModule]] = {
    "rows": lambda: torch.nn.Embedding(ROWS, DIM, padding_idx=4, sparse=True),
    "sums": lambda: torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=4, sparse=True),
    "means": lambda: torch.nn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=True),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("module", MODULES)
def test_a_use_is_as_in_torch(module: str, name: str) -> None:
    Twins(MODULES[module]).check(USES[name])


def test_gradients_of_rows_that_are_looked_up_together_are_apart() -> None:
    """One call of a batch that was prepared is made, one is detached, and one is never made."""
    twins = Twins(MODULES["rows"])
    calls = [FIRST, SECOND, torch.tensor([10, 11])]
    twins.group.send(twins.group.prepare({0: calls}))
    twins.check(lambda module, _: loss_of(module(calls[0])).backward() or module(calls[1]).detach())


def test_hooks_of_rows_that_are_looked_up_together_are_apart() -> None:
    twins = Twins(MODULES["rows"])
    twins.group.send(twins.group.prepare({0: [FIRST, SECOND]}))
    seen: list[Any] = []
    first, second = twins.served(FIRST), twins.served(SECOND)
    first.register_hook(seen.append)
    loss_of(second).backward()
    assert not seen
    loss_of(first.mul_(2)).backward()
    assert len(seen) == 1


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_that_no_backward_pass_reached_are_not_called(kind: str, early: bool) -> None:
    modules = [torch.nn.Embedding(ROWS, DIM, sparse=True) for _ in range(2)]
    servings, group = serve_together(modules)
    assert len(servings) == 2
    seen: list[Any] = []

    def hook() -> None:
        getattr(modules[0].weight, kind)(lambda given: seen.append(given))

    if early:
        hook()
    group.send(group.prepare({0: [FIRST], 1: [SECOND]}))
    outputs = modules[0](FIRST), modules[1](SECOND)
    if not early:
        hook()
    loss_of(outputs[1]).backward()
    assert not seen
    loss_of(outputs[0]).backward()
    assert len(seen) == 1
    assert seen[0] is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, dtype=torch.bfloat16),
        lambda: torch.nn.Embedding(ROWS, DIM, sparse=True, scale_grad_by_freq=True),
    ],
)
def test_a_call_that_is_detached_gives_no_row_a_gradient(make: Callable[[], EmbeddingModule]) -> None:
    """Of modules that neither `embed` nor `pool` computes, when the calls were prepared together."""
    module = make()
    _, group = serve(module, module.weight.detach().float().clone())
    group.send(group.prepare({0: [FIRST, SECOND]}))
    first, second = module(FIRST), module(SECOND)
    first.sum().backward()
    pushed = group.take_gradients()
    assert pushed is not None
    assert sorted(pushed.keys.tolist()) == FIRST.unique().tolist()
    assert second.shape[-1] == DIM


def test_gradients_that_are_set_to_none_leave_nothing() -> None:
    twins = Twins(MODULES["rows"])
    for _ in range(3):
        loss_of(twins.served(FIRST)).backward()
        twins.group.take_gradients()
        twins.served.weight.grad = None
    assert not twins.group.collected.batches


def test_what_happens_to_a_gradient_shows_in_its_state() -> None:
    twins = Twins(MODULES["rows"])
    states = [twins.group.collected.state]

    def changed(use: object = None) -> bool:
        states.append(twins.group.collected.state)
        return states[-1] not in states[:-1]

    weight: Any = twins.served.weight
    assert changed(loss_of(twins.served(FIRST)).backward())
    assert changed(weight.grad)
    assert not changed(weight.grad)
    assert changed(weight.grad.mul_(2))
    assert changed(setattr(weight, "grad", None))


def test_a_gradient_of_a_gradient_of_the_weight_is_refused() -> None:
    twins = Twins(MODULES["rows"])
    loss = loss_of(twins.served(FIRST))
    (found,) = torch.autograd.grad(loss, [twins.served.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + torch.sparse.sum(found * found)).backward()  # type: ignore[no-untyped-call]  # torch's


def test_to_unscale_gradients_changes_no_message() -> None:
    _, group = serve(torch.nn.Embedding(ROWS, DIM, sparse=True), torch.ones(ROWS, DIM))
    keys, rows = torch.tensor([1, 4]), torch.ones(2, DIM)
    group.collected.add(0, keys, rows)
    group.collected.unscale(2.0)
    assert torch.equal(rows, torch.ones(2, DIM))


def write_at_once(state: dict[str, torch.Tensor]) -> None:
    state["weight"].mul_(2)


def write_a_part(state: dict[str, torch.Tensor]) -> None:
    state["weight"][0] = 1.0


def write_by_numpy(state: dict[str, torch.Tensor]) -> None:
    state["weight"].numpy()[0] = 1.0


def write_by_data(state: dict[str, torch.Tensor]) -> None:
    state["weight"].data[0] = 1.0


@pytest.mark.parametrize(
    ("write", "keep"),
    [
        (write_at_once, False),
        (write_at_once, True),
        (write_a_part, False),
        (write_a_part, True),
        (write_by_numpy, True),
        (write_by_data, True),
    ],
)
def test_rows_of_a_state_dict_that_are_written_are_refused(
    write: Callable[[dict[str, torch.Tensor]], None], keep: bool
) -> None:
    """In torch they are the weight."""
    twins = Twins(MODULES["rows"])
    with pytest.raises(UsageError, match="named_parameters"):
        twins.served.state_dict(keep_vars=True)
    state = twins.served.state_dict()
    clone = {name: each.clone() for name, each in state.items()}
    write(clone)
    twins.serving.check()
    write(state if keep else twins.served.state_dict())
    with pytest.raises(UsageError, match="in a state dict"):
        twins.served(FIRST)
    with pytest.raises(UsageError, match="load_state_dict"):
        twins.serving.check()
    twins.serving.forget_given()
    with torch.inference_mode():
        twins.served.state_dict()
    twins.served(FIRST)
    del state
    for _ in range(3):
        twins.served.state_dict()
    assert len(twins.serving.given) == 1


def test_transforms_of_torch_func_are_refused() -> None:
    twins = Twins(MODULES["rows"])
    module = twins.served

    def of_weights(weights: Any) -> torch.Tensor:
        return loss_of(torch.func.functional_call(module, weights, (FIRST,)))

    with pytest.raises(UsageError, match=r"torch\.func"):
        torch.func.grad(of_weights)(dict(module.named_parameters()))
    with pytest.raises(UsageError, match=r"torch\.func"):
        torch.func.vmap(module)(FIRST)
    other = {"weight": torch.ones(ROWS, DIM)}
    assert torch.func.grad(of_weights)(other)["weight"].shape == (ROWS, DIM)


def test_a_sparse_embedding_has_no_rows_for_another_weight() -> None:
    module = SparseEmbedding(DIM)
    serve(module, torch.ones(ROWS, DIM))
    with pytest.raises(UsageError, match="was called with another weight"):
        torch.func.functional_call(module, {"weight": torch.ones(ROWS, DIM)}, (FIRST,))
    assert torch.func.functional_call(module, dict(module.named_parameters()), (FIRST,)).shape[-1] == DIM


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
def test_a_served_embedding_cannot_be_traced(inside: bool) -> None:
    module: Any = Twins(MODULES["rows"]).served
    with pytest.raises(UsageError, match=r"save_inference_model"):
        torch.jit.trace(torch.nn.Sequential(module) if inside else module, (FIRST,))


def test_a_gradient_stays_until_it_is_dropped_and_a_message_keeps_its_own() -> None:
    twins = Twins(MODULES["rows"])
    rows = twins.served(FIRST)
    loss_of(rows).backward(retain_graph=True)
    sent = twins.group.take_gradients()
    assert sent is not None
    before = sent.rows.clone()
    loss_of(rows).backward()
    more = twins.group.take_gradients()
    assert more is not None
    assert torch.equal(sent.rows, before), "a message may be sent again"
    torch.testing.assert_close(more.rows, 2 * before)
    twins.group.drop_gradients(set_to_none=False)
    zeros = twins.group.take_gradients()
    assert zeros is not None, "torch counts the step"
    assert (len(zeros.keys), int(zeros.spans.max())) == (0, 0)
    twins.group.drop_gradients()
    assert twins.group.take_gradients() is None


def test_a_weight_that_no_optimizer_has_keeps_its_gradient_here() -> None:
    module = torch.nn.Embedding(ROWS, DIM, sparse=True)
    _, group = serve(module, torch.ones(ROWS, DIM), Fixed())
    module(SECOND).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.to_dense()[:, 0].tolist() == [0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 0]
    assert group.take_gradients() is None


def test_a_gradient_is_added_to_one_without_rows() -> None:
    """That of an empty batch."""
    module = torch.nn.Embedding(ROWS, DIM, sparse=True)
    serve(module, torch.ones(ROWS, DIM), Fixed())
    for ids in (SECOND[:0], SECOND):
        module(ids).sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.to_dense()[:, 0].tolist() == [0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("first", [SECOND[:0], SECOND[:, :1], FIRST])
def test_a_gradient_of_torchs_own_is_added_to_after_it_was_sent(first: torch.Tensor) -> None:
    module = torch.nn.Embedding(ROWS, DIM, sparse=True)
    _, group = serve(module, torch.ones(ROWS, DIM))
    module.weight.register_hook(lambda grad: grad * 2)
    module(first).sum().backward()
    sent = group.take_gradients()
    assert sent is not None
    keys, before = sent.keys.numpy(), sent.keys.tolist()  # a message has this memory
    module(SECOND).sum().backward()
    assert keys.tolist() == before
    assert module.weight.grad is not None
    expected = torch.bincount(torch.cat([first.flatten(), SECOND.flatten()]), minlength=ROWS)
    assert module.weight.grad.to_dense()[:, 0].tolist() == (2 * expected).tolist()


def test_hidden_gradients_are_collected_all_the_same() -> None:
    twins = Twins(MODULES["rows"])
    loss_of(twins.served(FIRST)).backward()
    with hidden_gradients():
        assert twins.served.weight.grad is None
    assert twins.group.take_gradients() is not None


def test_a_dense_gradient_is_refused_when_it_is_pushed() -> None:
    twins = Twins(MODULES["rows"])
    twins.served.weight.grad = torch.ones(ROWS, DIM)
    with pytest.raises(UsageError, match=r"'emb\.weight' into a dense tensor"):
        twins.group.take_gradients()


REFUSED: dict[str, Use] = {
    "pow": lambda module, weight: (weight**2).sum(),
    "norm": lambda module, weight: torch.norm(weight),
    "square": lambda module, weight: torch.sum(torch.square(weight)),
    "mul_": lambda module, weight: weight.data.mul_(2),
    "add": lambda module, weight: weight.detach() + 1,
    "getitem": lambda module, weight: weight[0],
    "zero_": lambda module, weight: torch.nn.init.zeros_(weight),
    "normal_": lambda module, weight: torch.nn.init.normal_(weight),
    "copy_": lambda module, weight: weight.data.copy_(torch.ones(ROWS, DIM)),
    "setter of data": lambda module, weight: setattr(weight, "data", torch.ones(ROWS, DIM)),
    "embedding": lambda module, weight: torch.nn.functional.embedding(FIRST, weight),
    "linear": lambda module, weight: torch.nn.functional.linear(torch.ones(1, DIM), weight),
    "clamp_": lambda module, weight: weight.data.clamp_(-1, 1),
    "numpy": lambda module, weight: weight.detach().numpy(),
    "tolist": lambda module, weight: weight.tolist(),
    "double": lambda module, weight: module.double(),
    "deepcopy": lambda module, weight: copy.deepcopy(weight),
    "pickling": lambda module, weight: pickle.dumps(weight),
    "pickling of data": lambda module, weight: torch.save(weight.data, io.BytesIO()),
    "normal_ by the module": lambda module, weight: module.reset_parameters(),
    "to a vector": lambda module, weight: torch.nn.utils.parameters_to_vector(module.parameters()),
    "a parametrization": lambda module, weight: parametrize.register_parametrization(
        module, "weight", torch.nn.Softplus()
    ),
    "another gradient": lambda module, weight: setattr(weight.data, "grad", torch.ones(ROWS, DIM)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_rows_is_refused_by_name(name: str) -> None:
    twins = Twins(MODULES["rows"])
    with pytest.raises(UsageError, match=r"on parameter servers"):
        REFUSED[name](twins.served, twins.served.weight)
    assert "emb.weight" in repr(twins.serving._weight)


def test_a_weight_that_was_replaced_is_torchs_and_no_step_is_made() -> None:
    twins = Twins(MODULES["rows"])
    former = twins.served.weight
    twins.served.weight = torch.nn.Parameter(torch.ones(ROWS, DIM))
    assert torch.equal(twins.served(SECOND), torch.ones(1, 3, DIM))
    assert torch.equal(twins.served.state_dict()["weight"], torch.ones(ROWS, DIM))
    with pytest.raises(UsageError, match=r"replaced the weight of embedding 'emb\.weight'"):
        twins.serving.check()
    twins.served.weight = former
    twins.serving.check()


def test_hooks_of_an_unbounded_table_are_refused_and_its_rows_have_them() -> None:
    module = SparseEmbedding(DIM)
    _, group = serve(module, torch.ones(ROWS, DIM))
    with pytest.raises(UsageError, match=r"rows\.register_hook"):
        module.weight.register_hook(lambda grad: grad)
    module(FIRST).sum().backward()
    with pytest.raises(UsageError, match="unbounded"):
        _ = module.weight.grad
    assert group.take_gradients() is not None, "what is refused leaves it"
    with pytest.raises(UsageError, match="unbounded"):
        torch.autograd.grad(module(FIRST).sum(), [module.weight])


def test_an_unbounded_table_that_no_optimizer_has_is_only_read() -> None:
    module = SparseEmbedding(DIM)
    _, group = serve(module, torch.ones(ROWS, DIM), Fixed())
    other = torch.ones(DIM, requires_grad=True)
    (module(FIRST) * other).sum().backward()
    assert other.grad is not None
    assert not group.collected.tables


def test_hooks_from_before_training_and_values_from_after_it() -> None:
    module = torch.nn.Embedding(ROWS, DIM, sparse=True)
    seen: list[bool] = []
    module.weight.register_hook(lambda grad: seen.append(grad.is_sparse))
    serving, _ = serve(module, torch.ones(ROWS, DIM))
    weight = module.weight
    module(FIRST).sum().backward()
    serving.end(torch.full((ROWS, DIM), 2.0))
    assert type(weight) is torch.nn.Parameter
    assert weight is module.weight
    module(FIRST).sum().backward()
    assert seen == [True, True]
    assert weight.sum() == 2.0 * ROWS * DIM
