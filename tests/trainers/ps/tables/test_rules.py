"""Every rule against the torch optimizer that it stands for."""

import struct
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.support.training import Make, step_lazily
from tests.support.update_rules import update
from trainers.errors import UsageError
from trainers.ps.configs import TableConfigs
from trainers.ps.tables.dense import DenseMemory, DenseRun, DenseTable, make_dense
from trainers.ps.tables.rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AnyRule,
    RMSprop,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseAdam,
    options_of,
    same_state,
    wrong_option,
)
from trainers.ps.tables.sparse import make_table
from trainers.ps.tables.spec import SpecError, TableKind, TableSpec
from trainers.ps.trainer.layout import rule_for

DENSE: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "adagrad_start": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, eps=1e-6),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam_decay": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, eps=1e-4, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.01),
    "rmsprop_momentum": lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.9, momentum=0.8, eps=1e-4),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(
        p, lr=0.1, alpha=0.9, momentum=0.8, centered=True, weight_decay=0.01, eps=1e-3
    ),
}
LAZY = sorted(DENSE.keys() - {"sgd", "adagrad_start", "adam"})
"""Those that torch has only for dense gradients."""
SPARSE: dict[str, Make] = {
    "sgd": DENSE["sgd"],
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-4),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_block_follows_torch(name: str) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(67))  # no multiple of any vector's length
    optimizer = DENSE[name]([parameter])
    rule = rule_for(optimizer, optimizer.param_groups[0], sparse=False, name="w")
    table = make_table(TableSpec(kind=TableKind.DENSE, name="w", size=67, rule=rule))
    table.assign(None, parameter.detach())
    for step in range(100):
        parameter.grad = torch.randn(67) * 10.0 ** (step % 3 - 1)
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (1 + step)
        optimizer.step()
        table.apply(parameter.grad, lr)
        assert float((table.values - parameter.detach()).abs().max()) <= 1e-6


@pytest.mark.parametrize(
    "rule", [SGD(weight_decay=0.01), SGD(momentum=0.9, dampening=0.2, weight_decay=0.01)]
)
def test_a_block_without_square_roots_is_torchs_bit_for_bit(rule: SGD) -> None:
    torch.manual_seed(0)
    table = make_table(TableSpec(kind=TableKind.DENSE, name="w", size=4099, rule=rule))
    values, state = torch.zeros(4099), [torch.zeros(4099) for _ in range(rule.states)]
    for step in range(1, 20):
        grad = torch.randn(4099)
        table.apply(grad, 0.1)
        update(rule, values, grad, state, step, 0.1)
    assert torch.equal(table.values, values)


@pytest.mark.parametrize("rule", [SGD(momentum=0.5), Adagrad(), Adam(), FTRL()])
def test_a_gradient_may_lie_anywhere_in_a_message(rule: AnyRule) -> None:
    content = torch.zeros(4 * 8 + 1, dtype=torch.uint8)
    grad = torch.frombuffer(content.numpy().data, dtype=torch.float32, offset=1, count=8)
    grad.fill_(0.5)
    odd, even = (make_table(TableSpec(kind=TableKind.DENSE, name="w", size=8, rule=rule)) for _ in "ab")
    odd.apply(grad, 0.1)
    even.apply(torch.full((8,), 0.5), 0.1)
    assert torch.equal(odd.values, even.values)
    assert odd.values.any()


@pytest.mark.parametrize("rule", [SGD(), SGD(momentum=0.5), Adagrad(), Adam(amsgrad=1.0), Adam(), FTRL()])
def test_a_run_of_blocks_is_updated_as_each_of_them(rule: AnyRule) -> None:
    """Blocks 3 to 5 share memory, block 7 does not; in the middle block 4 is a step ahead of the others."""
    torch.manual_seed(0)
    sizes = {3: 67, 4: 1, 5: 40, 7: 9}
    specs = {
        number: TableSpec(kind=TableKind.DENSE, name=f"w{number}", size=size, rule=rule)
        for number, size in sizes.items()
    }
    made, apart = make_dense(specs), {number: DenseTable(spec) for number, spec in specs.items()}
    assert DenseMemory.joined([made[number].memory for number in (3, 4, 5)]) is not None
    assert DenseMemory.joined([made[number].memory for number in (5, 7)]) is None
    run = DenseRun(list(made.values()))
    adjacent = DenseRun([made[3], made[4], made[5]])

    def update(some: DenseRun, numbers: Sequence[int]) -> None:
        shares = [torch.randn(sizes[number]) for number in numbers]
        some.apply(torch.cat(shares), 0.1)
        for number, share in zip(numbers, shares, strict=True):
            apart[number].apply(share, 0.1)

    for step in range(9):
        if step == 4:
            update(DenseRun([made[4]]), [4])
        update(*((run, [3, 4, 5, 7]) if step % 3 else (adjacent, [3, 4, 5])))
    for some in (made, apart):
        assert [table.step for table in some.values()] == [9, 10, 9, 6]
    kept = run.values()
    for number, share in zip(sizes, kept.split(list(sizes.values())), strict=True):
        assert torch.allclose(share, apart[number].values, rtol=1e-6, atol=0)
    for mine, other in zip(made[5].state, apart[5].state, strict=True):
        assert torch.allclose(mine, other, rtol=1e-6, atol=0)
    joined, before = adjacent.values(), kept.clone()
    update(run, [3, 4, 5, 7])
    assert torch.equal(kept, before)
    assert torch.equal(joined, before[:-9]), "copies"
    assert not torch.equal(adjacent.values(), joined)


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("dim", [1, 3, 9, 64])
def test_sparse_rows_follow_torch_on_sparse_gradients(name: str, dim: int) -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        follow_torch(name, dim)


def follow_torch(name: str, dim: int) -> None:
    torch.manual_seed(0)
    rows = 20
    parameter = torch.nn.Parameter(torch.randn(rows, dim))
    optimizer = SPARSE[name]([parameter])
    rule = rule_for(optimizer, optimizer.param_groups[0], sparse=True, name="w")
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=dim, rule=rule))
    table.assign(torch.arange(rows), parameter.detach())
    for step in range(60):
        keys = torch.randperm(rows)[: step % 7]  # no row at all now and then
        values = torch.randn(len(keys), dim) * 10.0 ** (step % 5 - 2)
        parameter.grad = torch.sparse_coo_tensor(keys[None], values, (rows, dim)).coalesce()
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (1 + step % 10)
        optimizer.step()
        table.apply(keys, values, lr)
        pulled = table.pull(torch.arange(rows))
        assert float((pulled - parameter.detach()).abs().max()) <= 1e-6 * max(1, float(pulled.abs().max()))


def follow_lazily(name: str, dim: int, some: Callable[[int], torch.Tensor]) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(20, dim))
    optimizer = DENSE[name]([parameter])
    rule = rule_for(optimizer, optimizer.param_groups[0], sparse=True, name="w")
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=dim, rule=rule))
    table.assign(torch.arange(20), parameter.detach())
    for step in range(60):
        keys = some(step)
        values = torch.randn(len(keys), dim) * 10.0 ** (step % 5 - 2)
        parameter.grad = torch.zeros_like(parameter).index_copy_(0, keys, values)
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (1 + step % 10)
        step_lazily(optimizer, parameter, keys)
        table.apply(keys, values, lr)
        pulled = table.pull(torch.arange(20))
        assert float((pulled - parameter.detach()).abs().max()) <= 2e-6 * max(1, float(pulled.abs().max()))


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("dim", [1, 9, 64])
def test_rows_of_a_step_follow_torch_and_no_other_row_moves(name: str, dim: int) -> None:
    follow_lazily(name, dim, lambda step: torch.randperm(20)[: step % 7])


@pytest.mark.parametrize("name", LAZY)
def test_where_every_row_has_a_gradient_it_is_torchs_dense_optimizer(name: str) -> None:
    follow_lazily(name, 9, lambda step: torch.randperm(20))


def test_options_change_the_meaning_of_the_state_or_not() -> None:
    assert same_state(SparseAdam(), Adam(weight_decay=0.1, decoupled=1.0))
    assert same_state(RMSprop(momentum=0.9), RMSprop(momentum=0.5, weight_decay=0.1))
    assert not same_state(RMSprop(momentum=0.9), RMSprop(centered=1.0)), "each has one state more"
    assert not same_state(Adam(), Adam(amsgrad=1.0))
    assert not same_state(Adagrad(), RMSprop())


def test_a_spec_of_an_earlier_version_has_fewer_options() -> None:
    """Adam had four."""
    spec = TableSpec(kind=TableKind.SPARSE, name="w", size=2, rule=Adam(weight_decay=0.5))
    content = spec.encode()
    options = struct.pack("<6d", *options_of(spec.rule))
    assert content.count(options) == 1
    former = content[:2] + struct.pack("<H", 4) + content[4:].replace(options, options[:32])
    assert TableSpec.decode(former) == TableSpec.decode(content) == spec


WARM_UP = [0.0, 0.0, 0.05, 0.1, 0.0, 0.1]


@pytest.mark.parametrize("name", DENSE)
def test_steps_at_learning_rate_zero_are_torchs(name: str) -> None:
    """As at the start of a warm-up. Every row has a gradient, so lazy rules are torch's too."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = DENSE[name]([parameter])
    group, keys = optimizer.param_groups[0], torch.arange(3)
    whole = rule_for(optimizer, group, sparse=False, name="w")
    lazy = rule_for(optimizer, group, sparse=True, name="w")
    dense = make_table(TableSpec(kind=TableKind.DENSE, name="w", size=15, rule=whole))
    rows = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=5, rule=lazy))
    dense.assign(None, parameter.detach().reshape(-1))
    rows.assign(keys, parameter.detach())
    for lr in WARM_UP:
        before = parameter.detach().clone()
        parameter.grad = torch.randn(3, 5)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        dense.apply(parameter.grad.reshape(-1), lr)
        rows.apply(keys, parameter.grad, lr)
        assert torch.equal(parameter.detach(), before) == (lr == 0)
        assert float((dense.values.view(3, 5) - parameter.detach()).abs().max()) <= 1e-6
        assert float((rows.pull(keys) - parameter.detach()).abs().max()) <= 2e-6


FTRLS = [FTRL(), FTRL(l1=0.3, l2=0.2), FTRL(beta=1.0, l1=0.1), FTRL(lr_power=-0.7, l1=0.1, beta=0.5)]


@pytest.mark.parametrize("rule", FTRLS)
@pytest.mark.parametrize("smallest", [0.0, 1e-42, 1e-35])
def test_ftrl_at_learning_rate_zero_changes_nothing(rule: FTRL, smallest: float) -> None:
    """It divides by the learning rate. A warm-up that starts at 0 is as without these steps."""
    torch.manual_seed(0)
    begin, grads, keys = torch.randn(1, 5), torch.randn(6, 1, 5), torch.tensor([7])
    tables = [
        make_table(TableSpec(kind=kind, name="w", size=5, rule=rule))
        for kind in (TableKind.DENSE, TableKind.SPARSE, TableKind.SPARSE)
    ]
    dense, rows, without = tables
    dense.assign(None, begin[0])
    rows.assign(keys, begin)
    without.assign(keys, begin)
    for lr, grad in zip((smallest, smallest, 0.1, 0.1, smallest, 0.1), grads, strict=True):
        dense.apply(grad[0], lr)
        rows.apply(keys, grad, lr)
        if lr == 0.1:
            without.apply(keys, grad, lr)
        assert torch.equal(rows.pull(keys), without.pull(keys))
        assert torch.allclose(dense.values, rows.pull(keys)[0], atol=2e-6)
    assert not torch.equal(rows.pull(keys), begin)


@pytest.mark.parametrize("rule", [FTRL(), FTRL(lr_power=-0.7)])
def test_ftrl_takes_a_gradient_whose_square_is_nothing(rule: FTRL) -> None:
    """1e-25 squared is 0 in float32."""
    dense = make_table(TableSpec(kind=TableKind.DENSE, name="w", size=2, rule=rule))
    dense.assign(None, torch.full((2,), 0.5))
    dense.apply(torch.full((2,), 1e-25), 0.1)
    assert torch.equal(dense.values, torch.full((2,), 0.5))
    dense.apply(torch.ones(2), 0.1)
    assert torch.allclose(dense.values, torch.full((2,), 0.4))
    sparse, key = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=2, rule=rule)), torch.tensor([7])
    sparse.assign(key, torch.full((1, 2), 0.5))
    sparse.apply(key, torch.full((1, 2), 1e-25), 0.1)
    assert torch.equal(sparse.pull(key), torch.full((1, 2), 0.5))
    sparse.apply(key, torch.ones(1, 2), 0.1)
    assert torch.allclose(sparse.pull(key), torch.full((1, 2), 0.4))


WRONG: list[AnyRule] = [
    *(FTRL(lr_power=0.5), RMSprop(alpha=1.5), Adam(beta1=1.0), SparseAdam(beta2=1.0), Adam(eps=-1e-8)),
    *(SGD(weight_decay=1e39), Adagrad(initial_accumulator_value=float("inf")), RowWiseAdam(eps=float("nan"))),
    RowWiseAdagrad(lr_decay=-0.1),
]
RIGHT: list[AnyRule] = [
    *(FTRL(lr_power=0.0), FTRL(lr_power=-2.0), RMSprop(alpha=1.0), RMSprop(alpha=0.0), Adam(beta1=0.0)),
    *(SGD(momentum=2.0, dampening=-3.0), Adagrad(eps=0.0), SparseAdam(beta2=1 - 2**-53)),
]


@pytest.mark.parametrize("rule", WRONG)
def test_options_that_divide_by_zero_or_make_nan_are_refused(rule: AnyRule) -> None:
    with pytest.raises(UsageError, match="rule has"):
        TableConfigs(rule=rule)
    with pytest.raises(SpecError, match=f"{type(rule).__name__} has"):
        TableSpec.decode(TableSpec(kind=TableKind.SPARSE, name="w", size=2, rule=rule).encode())


@pytest.mark.parametrize("rule", RIGHT)
def test_extreme_options_give_numbers(rule: AnyRule) -> None:
    assert not wrong_option(rule)
    keys = torch.tensor([7])
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=2, rule=rule))
    for grad in (1.0, -0.5, 2.0):
        table.apply(keys, torch.full((1, 2), grad), 0.1)
        assert torch.isfinite(table.pull(keys)).all()


def ftrl_by_the_paper(rule: FTRL, grads: list[list[float]], begin: list[float], lr: float) -> list[float]:
    """McMahan et al. 2013, algorithm 1, number by number in float64."""
    power, weights = -rule.lr_power, []
    for column, weight in enumerate(begin):
        n = z = 0.0
        for grad in grads:
            g = grad[column]
            sigma = ((n + g * g) ** power - n**power) / lr
            z, n = z + g - sigma * weight, n + g * g
            sign = (z > 0) - (z < 0)
            scale = (rule.beta + n**power) / lr + 2 * rule.l2
            weight = 0.0 if abs(z) <= rule.l1 else -(z - sign * rule.l1) / scale
        weights.append(weight)
    return weights


@pytest.mark.parametrize("rule", FTRLS)
def test_ftrl_follows_the_paper(rule: FTRL) -> None:
    torch.manual_seed(0)
    begin, grads = torch.randn(5), torch.randn(60, 5) * 0.3
    wanted = torch.tensor(ftrl_by_the_paper(rule, grads.tolist(), begin.tolist(), 0.1))
    dense = make_table(TableSpec(kind=TableKind.DENSE, name="w", size=5, rule=rule))
    rows = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=5, rule=rule))
    dense.assign(None, begin)
    rows.assign(torch.tensor([7]), begin[None])
    for grad in grads:
        dense.apply(grad, 0.1)
        rows.apply(torch.tensor([7]), grad[None], 0.1)
    assert torch.allclose(dense.values, wanted, atol=2e-5)
    assert torch.allclose(rows.pull(torch.tensor([7]))[0], dense.values, atol=2e-6)


def test_ftrl_makes_weights_zero() -> None:
    rule = FTRL(l1=5.0)
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=1, rule=rule))
    table.apply(torch.tensor([1, 2]), torch.tensor([[1.0], [50.0]]), 0.1)
    small, large = table.pull(torch.tensor([1, 2])).flatten().tolist()
    assert small == 0.0
    assert large < 0.0


def test_a_gradient_of_zero_moves_no_row_that_never_had_another() -> None:
    for make in SPARSE.values():
        optimizer = make([torch.nn.Parameter(torch.zeros(2, 2))])
        rule: AnyRule = rule_for(optimizer, optimizer.param_groups[0], sparse=True, name="w")
        table = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=2, rule=rule))
        table.assign(torch.tensor([3]), torch.ones(1, 2))
        table.apply(torch.tensor([3]), torch.zeros(1, 2), 0.1)
        assert table.pull(torch.tensor([3])).tolist() == [[1, 1]]


def test_adam_on_rows_is_sparse_adam() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    adam, lazy = torch.optim.Adam([parameter]), torch.optim.SparseAdam([parameter])
    assert rule_for(adam, adam.param_groups[0], sparse=True, name="w") == rule_for(
        lazy, lazy.param_groups[0], sparse=True, name="w"
    )


@pytest.mark.parametrize("rule", [RowWiseAdagrad(), RowWiseAdam(), SparseAdam()])
def test_a_rule_for_rows_is_refused_on_a_dense_table(rule: AnyRule) -> None:
    spec = TableSpec(kind=TableKind.DENSE, name="w", size=3, rule=rule)
    with pytest.raises(SpecError, match=f"{type(rule).__name__} is for rows, but the table is dense"):
        TableSpec.decode(spec.encode())
