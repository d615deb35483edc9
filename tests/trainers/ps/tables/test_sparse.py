"""A sparse table against a plain dict, for random requests."""

import math

import pytest
import torch

from trainers.ps.tables.rules import SGD, Adagrad, Adam, Fixed, RMSprop, SparseAdam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import (
    Initializer,
    InitKind,
    KeysError,
    NotFiniteError,
    RowOptions,
    ShapeError,
    TableError,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import SparseRows

SOME = Initializer(InitKind.UNIFORM, -0.5, 0.5, seed=3)


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def sparse(size: int = 2, rule: object = None, **options: object) -> SparseTable:
    rows = RowOptions(**{"init": SOME, **options})  # type: ignore[arg-type]
    spec = TableSpec(kind=TableKind.SPARSE, name="t", size=size, rule=rule or SGD(), rows=rows)  # type: ignore[arg-type]
    return SparseTable(spec)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [1, 2, 9, 512])
def test_random_requests(dim: int) -> None:
    random = torch.Generator().manual_seed(dim)
    table, fresh = sparse(dim), sparse(dim)
    model: dict[int, torch.Tensor] = {}
    pool = torch.cat([torch.randint(-(2**63), 2**63 - 1, (500,), generator=random), keys(0, -1, 2**63 - 1)])

    def begun(key: int) -> torch.Tensor:
        return model[key] if key in model else fresh.pull(keys(key))[0]

    for step in range(40):
        some = pool[torch.randint(len(pool), (60,), generator=random)]
        rows = torch.randn(60, dim, generator=random)
        if step % 4 == 0:
            table.assign(some, rows)
            model.update(zip(some.tolist(), rows, strict=True))
        elif step % 4 == 2:
            table.apply(some, rows, 0.5)
            for key, row in zip(some.tolist(), rows, strict=True):
                model[key] = begun(key) - 0.5 * row
        else:
            read = table.pull(some, insert=step % 4 == 1)
            assert torch.equal(read, torch.stack([begun(key) for key in some.tolist()]))
        assert len(table) == len(model)
    every = torch.tensor(list(model))
    assert torch.equal(table.pull(every), torch.stack(list(model.values())))


def test_pulls_insert_nothing_and_a_push_finds_what_they_saw() -> None:
    table = sparse(9)
    some = torch.arange(-500, 500)
    read = table.pull(some, insert=False)
    assert len(table) == 0
    assert torch.equal(table.pull(some.flip(0)).flip(0), read)
    assert len(table) == 0
    table.apply(some, torch.zeros(1000, 9), 1.0)
    assert len(table) == 1000
    assert torch.equal(table.pull(some), read)


def test_a_pull_of_nothing_and_an_update_of_nothing() -> None:
    table = sparse(3)
    assert table.pull(keys()).shape == (0, 3)
    table.apply(keys(), torch.empty(0, 3), 0.1)
    assert (table.step, len(table)) == (1, 0)


def test_pulled_rows_do_not_change_with_the_table() -> None:
    table = sparse()
    before = table.pull(keys(1))
    kept = before.clone()
    table.apply(keys(1), torch.ones(1, 2), 1.0)
    assert torch.equal(before, kept)


# ---- initial values


def test_initial_values_depend_on_seed_key_and_column_only() -> None:
    first, other = sparse(4), sparse(4, init=Initializer(InitKind.UNIFORM, -0.5, 0.5, seed=4))
    wide = sparse(8)
    some = torch.arange(100)
    values = first.pull(some)
    assert torch.equal(wide.pull(some)[:, :4], values)
    assert len(values.unique()) > 395
    assert not (other.pull(some) == values).any()


def test_uniform_values_fill_their_range() -> None:
    values = sparse(16, init=Initializer(InitKind.UNIFORM, 1.0, 3.0, seed=1)).pull(torch.arange(20_000))
    assert 1.0 <= float(values.min()) < 1.001
    assert 2.999 < float(values.max()) <= 3.0
    assert abs(float(values.mean()) - 2.0) < 0.01
    assert abs(float(values.std()) - 2 / math.sqrt(12)) < 0.01
    assert float(torch.corrcoef(values.T).fill_diagonal_(0).abs().max()) < 0.05
    assert abs(float(torch.corrcoef(torch.stack([values[:-1, 0], values[1:, 0]]))[0, 1])) < 0.05


@pytest.mark.parametrize("dim", [1, 7, 8])
def test_normal_values_are_normal(dim: int) -> None:
    values = sparse(dim, init=Initializer(InitKind.NORMAL, 0.5, 2.0, seed=1)).pull(torch.arange(50_000))
    assert bool(torch.isfinite(values).all())
    assert abs(float(values.mean()) - 0.5) < 0.05
    assert abs(float(values.std()) - 2.0) < 0.05
    share = float(((values - 0.5).abs() < 2.0).float().mean())
    assert abs(share - 0.6827) < 0.01
    if dim > 1:
        assert float(torch.corrcoef(values.T).fill_diagonal_(0).abs().max()) < 0.05


def test_zeros() -> None:
    assert sparse(3, init=Initializer()).pull(keys(4, 5)).tolist() == [[0, 0, 0]] * 2


# ---- bounds, and what is refused


@pytest.mark.parametrize("rule", [SGD(), SGD(momentum=0.9), Adagrad(), Adam(), SparseAdam(), RMSprop()])
def test_no_value_leaves_the_bounds(rule: object) -> None:
    table = sparse(3, rule, low=-0.25, high=0.125)
    table.apply(keys(1, 2), torch.tensor([[9.0, -9.0, 0.0]] * 2), 10.0)
    rows = table.pull(keys(1, 2))
    assert rows[:, :2].tolist() == [[-0.25, 0.125]] * 2
    assert float(rows.abs().max()) <= 0.25


@pytest.mark.parametrize(
    ("ids", "grad", "error"),
    [
        (keys(1), torch.ones(1, 3), ShapeError),
        (keys(1), torch.ones(2, 2), ShapeError),
        (keys(1), torch.ones(1, 2, dtype=torch.float64), ShapeError),
        (torch.ones(1, dtype=torch.int32), torch.ones(1, 2), KeysError),
        (keys(1)[None], torch.ones(1, 2), KeysError),
        (None, torch.ones(2), KeysError),
        (keys(1), torch.tensor([[1.0, math.nan]]), NotFiniteError),
        (keys(1), torch.tensor([[math.inf, 1.0]]), NotFiniteError),
    ],
)
def test_what_does_not_fit_is_refused(
    ids: torch.Tensor | None, grad: torch.Tensor, error: type[TableError]
) -> None:
    with pytest.raises(error, match="'t'"):
        sparse().check(ids, grad)


def test_a_table_that_is_not_trained() -> None:
    table = sparse(rule=Fixed())
    table.assign(keys(1), torch.ones(1, 2))
    assert table.pull(keys(1)).tolist() == [[1, 1]]
    for refuse in (table.check, lambda *push: table.apply(*push, 0.1)):
        with pytest.raises(TableError, match="'t' is not trained"):
            refuse(keys(1), torch.ones(1, 2))


# ---- assign and load


def test_assigned_rows_begin_anew() -> None:
    table, other = sparse(rule=SparseAdam()), sparse(rule=SparseAdam())
    table.apply(keys(1), torch.ones(1, 2), 0.1)
    table.assign(keys(1), torch.zeros(1, 2))
    other.assign(keys(1), torch.zeros(1, 2))
    other.step = table.step
    for each in (table, other):
        each.apply(keys(1), torch.full((1, 2), 3.0), 0.1)
    assert torch.equal(table.pull(keys(1)), other.pull(keys(1)))


def test_revised_rows_keep_state_and_statistics() -> None:
    table, other = sparse(2, SparseAdam(), statistics=True), sparse(2, SparseAdam(), statistics=True)
    for each in (table, other):
        each.apply(keys(1), torch.ones(1, 2), 0.1, torch.ones(1, 2))
    with table.cut() as cut:
        table.revise(keys(1, 2), torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
        seen = cut.read(0, cut.rows)
    assert torch.equal(seen.values, other.pull(keys(1))), "the cut is as of the moment before"
    found, former = whole(table), whole(other)
    assert found.values.tolist() == [[5, 6], [7, 8]]
    for mine, theirs in zip(found.state, former.state, strict=True):
        assert torch.equal(mine[:1], theirs)
    assert found.statistics is not None
    assert former.statistics is not None
    assert torch.equal(found.statistics[:1], former.statistics)


def test_loaded_rows_go_on_as_the_saved_ones() -> None:
    table, other = sparse(3, SparseAdam(), statistics=True), sparse(3, SparseAdam(), statistics=True)
    some = torch.arange(1000) * 7919
    for step in range(3):
        table.apply(
            some[step * 100 :], torch.randn(1000 - step * 100, 3), 0.1, torch.rand(1000 - step * 100, 2)
        )
    with table.cut() as cut:
        for start in range(0, cut.rows, 300):
            other.load(cut.read(start, min(start + 300, cut.rows)))
        other.step = cut.step
    grad = torch.randn(1000, 3)
    for each in (table, other):
        each.apply(some, grad, 0.1)
    assert torch.equal(table.pull(some), other.pull(some))
    mine, theirs = whole(table), whole(other)
    assert mine.statistics is not None
    assert theirs.statistics is not None
    assert torch.equal(mine.statistics, theirs.statistics)


def whole(table: SparseTable) -> SparseRows:
    with table.cut() as cut:
        return cut.read(0, cut.rows)


def test_rows_of_another_table_are_not_loaded() -> None:
    rows = whole_of_one(sparse(2, SparseAdam()))
    with pytest.raises(ShapeError, match="1 states"):
        sparse(2, Adagrad()).load(rows)
    with pytest.raises(ShapeError, match="statistics"):
        sparse(2, SparseAdam(), statistics=True).load(rows)
    with pytest.raises(ShapeError):
        sparse(3, SparseAdam()).load(rows)


def whole_of_one(table: SparseTable) -> SparseRows:
    table.pull(keys(1))
    return whole(table)
