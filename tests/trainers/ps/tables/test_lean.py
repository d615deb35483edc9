"""Rows in 16 bits and row-wise rules, against torch's types and plain formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.update_rules import KNOWN, update
from trainers.ps.kernels.rounding import narrow, narrow_randomly, widen, word_of
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
    state_widths,
)
from trainers.ps.tables.run import Lines
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Initializer, InitKind, RowOptions, RowType, TableKind, TableSpec
from trainers.ps.tables.storage import SparseRows

pytestmark = pytest.mark.slow

SHORT = [RowType.BFLOAT16, RowType.FLOAT16]
RULES: list[AnyRule] = [
    SGD(weight_decay=0.1),
    SGD(momentum=0.9),
    Adagrad(lr_decay=0.1),
    Adam(weight_decay=0.1, amsgrad=1.0),
    SparseAdam(),
    RMSprop(centered=1.0, momentum=0.5),
    FTRL(l1=0.01),
    RowWiseAdagrad(),
    RowWiseAdagrad(weight_decay=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    RowWiseAdagrad(weight_decay=0.1, decoupled=1.0),
    RowWiseAdam(),
    RowWiseAdam(beta1=0.8, beta2=0.95, eps=1e-4, weight_decay=0.1),
    RowWiseAdam(weight_decay=0.1, decoupled=1.0),
]


def spec(size: int, rule: AnyRule, dtype: RowType = RowType.FLOAT32, **options: float) -> TableSpec:
    init = Initializer(InitKind.NORMAL, 0.0, 0.5, seed=3)
    rows = RowOptions(init=init, dtype=dtype, **options)  # type: ignore[arg-type]
    return TableSpec(kind=TableKind.SPARSE, name="t", size=size, rule=rule, rows=rows)


def everything(table: SparseTable) -> SparseRows:
    with table.cut() as cut:
        return cut.read(0, cut.rows)


def same(left: SparseRows, right: SparseRows) -> bool:
    pairs = [(left.keys, right.keys), (left.values, right.values), *zip(left.state, right.state, strict=True)]
    return all(torch.equal(one, other) for one, other in pairs)


# ---- Rounding.


def shorter(values: torch.Tensor, dtype: RowType, word: np.uint32 | None = None) -> torch.Tensor:
    halves = np.empty(len(values), np.uint16)
    if word is None:
        narrow(values.numpy(), halves, 0, int(dtype))
    else:
        narrow_randomly(values.numpy(), halves, 0, int(dtype), word)
    return torch.from_numpy(halves).view(dtype.dtype)


@pytest.mark.parametrize("dtype", SHORT)
def test_every_value_of_16_bits_is_read_as_torch_reads_it(dtype: RowType) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(len(halves), np.float32)
    widen(halves, 0, int(dtype), out)
    wanted = torch.from_numpy(halves).view(dtype.dtype).float()
    assert torch.equal(torch.from_numpy(out).nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))
    kept = wanted.isfinite()
    assert torch.equal(shorter(wanted, dtype)[kept].float(), wanted[kept])
    assert torch.equal(shorter(wanted, dtype, np.uint32(5))[kept].float(), wanted[kept]), "nothing to round"


@pytest.mark.parametrize("dtype", SHORT)
def test_the_nearest_is_torchs_and_what_is_too_large_becomes_the_largest(dtype: RowType) -> None:
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0))
    near = torch.linspace(-2e-4, 2e-4, 100_001)
    values = torch.cat([bits.to(torch.int32).view(torch.float32), near, torch.tensor([0.0, -0.0, math.nan])])
    largest = torch.finfo(dtype.dtype).max
    wanted = values.clamp(-largest, largest).to(dtype.dtype)
    for found in (shorter(values, dtype), shorter(values, dtype, np.uint32(9))):
        assert torch.equal(found.isnan(), values.isnan())
        assert float(found.float().nan_to_num().abs().max()) == largest
    assert torch.equal(shorter(values, dtype).float().nan_to_num(), wanted.float().nan_to_num())


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("value", [1.001, -3.3, 1e-5, 7e-8])
def test_random_rounding_gives_the_two_neighbours_and_the_mean(dtype: RowType, value: float) -> None:
    values = torch.full((64,), value)
    found = torch.cat([shorter(values, dtype, word_of(1, step, 5)).double() for step in range(4000)])
    low, high = sorted(found.unique().tolist())
    assert low <= values[0] <= high
    assert abs(float(found.mean()) - float(values[0])) < 0.01 * (high - low)
    bits = torch.tensor([low, high]).to(dtype.dtype).view(torch.int16)
    assert abs(int(bits[0]) - int(bits[1])) == 1


def test_random_rounding_is_a_function_of_seed_key_step_and_column() -> None:
    values = torch.full((512,), 1.001)
    drawn = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)]
    *others, again = [shorter(values, RowType.BFLOAT16, word_of(*each)).tolist() for each in drawn]
    assert again == others[0]
    assert len({tuple(each) for each in others}) == 4


# ---- Rules.


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, RowWiseAdagrad | RowWiseAdam)])
@pytest.mark.parametrize("dim", [1, 3, 16])
def test_row_wise_rules_follow_their_formulas(rule: RowWiseAdagrad | RowWiseAdam, dim: int) -> None:
    """In float64, row by row."""
    torch.manual_seed(0)
    table = SparseTable(spec(dim, rule))
    table.assign(torch.arange(20), torch.randn(20, dim))
    values = table.pull(torch.arange(20)).double()
    initial = rule.initial_state
    first, second = torch.zeros(20, dim, dtype=torch.float64), torch.full((20,), initial, dtype=torch.float64)
    for step in range(1, 40):
        lr, keys = 0.1 / (1 + step % 10), torch.randperm(20)[: step % 7]
        grad = torch.randn(len(keys), dim) * 10.0 ** (step % 5 - 2)
        table.apply(keys, grad, lr)
        for key, slope in zip(keys.tolist(), grad.double(), strict=True):
            adagrad = isinstance(rule, RowWiseAdagrad)
            rate = lr / (1 + (step - 1) * rule.lr_decay) if isinstance(rule, RowWiseAdagrad) else lr
            if rule.decoupled:
                kept = 1 - rate * rule.weight_decay
            else:
                kept, slope = 1.0, slope + rule.weight_decay * values[key]
            mean = (slope * slope).mean()
            if isinstance(rule, RowWiseAdagrad):
                second[key] += mean
                values[key] = kept * values[key] - rate * slope / (second[key].sqrt() + rule.eps)
            else:
                first[key] = rule.beta1 * first[key] + (1 - rule.beta1) * slope
                second[key] = rule.beta2 * second[key] + (1 - rule.beta2) * mean
                root = (second[key] / (1 - rule.beta2**step)).sqrt() + rule.eps
                values[key] = kept * values[key] - rate * first[key] / (1 - rule.beta1**step) / root
            assert adagrad is not isinstance(rule, RowWiseAdam)
    pulled = table.pull(torch.arange(20)).double()
    assert float((pulled - values).abs().max()) <= 1e-5 * float(values.abs().max())


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, KNOWN)])
def test_the_same_formulas_as_torch_operations(rule: AnyRule) -> None:
    torch.manual_seed(0)
    table, values = SparseTable(spec(5, rule)), torch.randn(6, 5)
    table.assign(torch.arange(6), values)
    state = [torch.full((6, width), rule.initial_state) for width in state_widths(rule, 5)]
    for step in range(1, 20):
        grad = torch.randn(6, 5)
        update(rule, values, grad, state, step, 0.05)
        table.apply(torch.arange(6), grad, 0.05)
    found = everything(table)
    for mine, theirs in zip([found.values, *found.state], [values, *state], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("rule", RULES)
def test_an_update_in_16_bits_is_that_in_32_and_then_rounded(rule: AnyRule, dtype: RowType) -> None:
    torch.manual_seed(0)
    wide, short = SparseTable(spec(5, rule)), SparseTable(spec(5, rule, dtype))
    keys = torch.arange(70) * 7919  # more than a block of a kernel
    short.assign(keys, short.pull(keys))
    for step in range(8):
        with short.cut() as cut:
            wide.load(cut.read(0, cut.rows))  # its values are in float32 too
        grad = torch.randn(70, 5)
        for table in (wide, short):
            table.apply(keys, grad, 0.05)
        exact, rounded = everything(wide), everything(short)
        assert rounded.values.dtype is dtype.dtype
        for mine, theirs in zip(rounded.state, exact.state, strict=True):
            assert torch.equal(mine, theirs)
        bits = rounded.values.view(torch.int16)
        near = torch.stack([bits - 1, bits, bits + 1]).view(dtype.dtype)
        around = near.float().nan_to_num()  # below the bits of zero are those of NaN
        assert bool((around.min(0).values <= exact.values).all())
        assert bool((exact.values <= around.max(0).values).all())
        if step:
            assert not torch.equal(rounded.values, exact.values.to(dtype.dtype)), "not to the nearest"


@pytest.mark.parametrize("dtype", SHORT)
def test_updates_that_are_smaller_than_a_value_in_16_bits_can_tell_are_not_lost(dtype: RowType) -> None:
    table = SparseTable(spec(64, SGD(), dtype))
    table.assign(torch.tensor([1]), torch.ones(1, 64))
    for _ in range(1000):
        table.apply(torch.tensor([1]), torch.ones(1, 64), 1e-4)
    assert abs(float(table.pull(torch.tensor([1])).mean()) - 0.9) < 0.01


@pytest.mark.parametrize("dtype", SHORT)
def test_no_value_in_16_bits_is_rounded_beyond_the_bounds(dtype: RowType) -> None:
    table = SparseTable(spec(64, SGD(), dtype, low=-0.1001, high=0.3003))
    for _ in range(20):
        table.apply(torch.tensor([1, 2]), torch.tensor([[1.0], [-1.0]]).expand(2, 64), 0.05)
    low, high = table.pull(torch.tensor([1, 2])).numpy()
    assert -0.1001 <= low.min() == low.max() < -0.099
    assert 0.298 < high.min() == high.max() <= 0.3003


# ---- Records.


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("dim", [1, 4, 9])
def test_rows_without_a_record_read_as_they_will_begin(dtype: RowType, dim: int) -> None:
    table, keys = SparseTable(spec(dim, SGD(), dtype)), torch.arange(-50, 50)
    read = table.pull(keys, insert=False)
    assert torch.equal(table.pull(keys), read)
    wide = SparseTable(spec(dim, SGD())).pull(keys)
    assert torch.equal(read, wide.to(dtype.dtype).float())


@pytest.mark.parametrize("dim", [1, 4, 9])
@pytest.mark.parametrize("rule", [SGD(), RowWiseAdagrad(), RowWiseAdam(), Adam()])
def test_a_cut_is_what_was_there_and_loads_as_it_was(rule: AnyRule, dim: int) -> None:
    torch.manual_seed(0)
    table = SparseTable(spec(dim, rule, RowType.BFLOAT16, statistics=True))
    keys = torch.arange(300) * 7919
    table.apply(keys, torch.randn(300, dim), 0.1, torch.rand(300, 2))
    before = everything(table)
    with table.cut() as cut:
        table.apply(keys.flip(0)[:200], torch.randn(200, dim), 0.1, torch.rand(200, 2))
        table.revise(keys[:9], torch.zeros(9, dim))
        seen = cut.read(0, cut.rows)
    assert same(seen, before)
    other, wide = SparseTable(table.spec), SparseTable(replace(table.spec, rows=RowOptions(statistics=True)))
    for each in (other, wide):
        each.load(seen)
    assert same(everything(other), seen)
    assert torch.equal(everything(wide).values, seen.values.float())
    other.load(everything(wide))
    assert same(everything(other), seen), "from float32 and back"


def test_a_repeated_step_gives_the_same_bits() -> None:
    """A server that applies its log again continues from a snapshot: its table counts on."""
    tables = [SparseTable(spec(16, RowWiseAdagrad(), RowType.BFLOAT16)) for _ in range(3)]
    keys, grads = torch.arange(100), [torch.randn(100, 16) for _ in range(6)]
    for grad in grads[:3]:
        tables[0].apply(keys, grad, 0.1)
    tables[1].load(everything(tables[0]))
    tables[1].step = tables[0].step
    tables[2].load(everything(tables[0]))  # of another step
    for grad in grads[3:]:
        for table in tables:
            table.apply(keys, grad, 0.1)
    assert same(everything(tables[0]), everything(tables[1]))
    assert not same(everything(tables[0]), everything(tables[2]))


@pytest.mark.parametrize("rule", [RowWiseAdagrad(weight_decay=0.1), RowWiseAdam(), Adam()])
def test_a_run_does_what_its_tables_do(rule: AnyRule) -> None:
    torch.manual_seed(0)
    specs = [spec(4, rule, RowType.BFLOAT16, high=bound) for bound in (0.5, math.inf)]
    alone, together = ([SparseTable(each) for each in specs] for _ in range(2))
    run = Lines(dict(enumerate(together))).run(0, 2)
    for _ in range(5):
        spans, keys, grad = np.array([40, 30]), torch.randint(0, 90, (70,)), torch.randn(70, 4)
        run.apply(spans, keys, grad, 0.1)
        asked = torch.randint(0, 99, (70,))
        for insert in (False, True):
            found = run.pull(spans, asked, insert=insert)
            parts = [slice(0, 40), slice(40, 70)]
            if not insert:
                for table, some in zip(alone, parts, strict=True):
                    table.apply(keys[some], grad[some], 0.1)
            mine = [table.pull(asked[some], insert=insert) for table, some in zip(alone, parts, strict=True)]
            assert torch.equal(torch.cat(mine), found)
    for one, other in zip(alone, together, strict=True):
        assert same(everything(one), everything(other))


def test_a_row_of_16_values_needs_44_bytes() -> None:
    """Key, values in bfloat16, and the float of row-wise Adagrad; the index and a flag are beside it."""
    table = SparseTable(spec(16, RowWiseAdagrad(), RowType.BFLOAT16))
    assert 4 * table._storage.stride == 8 + 2 * 16 + 4
