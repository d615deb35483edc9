"""Entry filters, statistics and shrinking."""

import pytest
import torch

from tests.support.shrinking import shrink
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import (
    Bound,
    Entry,
    EntryKind,
    Initializer,
    InitKind,
    RowOptions,
    ShrinkPolicy,
    TableError,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import SparseRows

pytestmark = pytest.mark.slow

ALL = EntryKind.ALL


def sparse(
    kind: EntryKind = ALL,
    a: float = 0.0,
    *,
    seed: int = 1,
    statistics: bool = False,
    bound: Bound | None = None,
) -> SparseTable:
    init = Initializer(InitKind.UNIFORM, 1.0, 2.0, seed)
    rows = RowOptions(init=init, entry=Entry(kind, a), statistics=statistics, bound=bound)
    return SparseTable(TableSpec(kind=TableKind.SPARSE, name="t", size=2, rule=SGD(), rows=rows))


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def waiting(table: SparseTable) -> dict[int, float]:
    found = table.candidates()
    return dict(zip(found.keys.tolist(), found.counts.tolist(), strict=True))


def everything(table: SparseTable) -> SparseRows:
    with table.cut() as cut:
        return cut.read(0, cut.rows)


def stored(table: SparseTable) -> list[int]:
    return sorted(everything(table).keys.tolist())


# ---- by probability


def test_a_lottery_admits_its_share_and_always_the_same() -> None:
    table, some = sparse(EntryKind.PROBABILITY, 0.3), torch.arange(20_000)
    values = table.pull(some)
    table.apply(some, torch.zeros(20_000, 2), 1.0)
    assert 0.28 < len(table) / 20_000 < 0.32
    admitted = stored(table)
    table.apply(some, torch.ones(20_000, 2), 1.0)
    assert stored(table) == admitted
    moved = (table.pull(some) != values).all(dim=1)
    assert some[moved].tolist() == admitted
    for other, equal in (
        (sparse(EntryKind.PROBABILITY, 0.3), True),
        (sparse(EntryKind.PROBABILITY, 0.3, seed=2), False),
    ):
        other.apply(some.flip(0), torch.ones(20_000, 2), 1.0)
        assert (stored(other) == admitted) is equal


@pytest.mark.parametrize(("chance", "rows"), [(0.0, 0), (1.0, 1000)])
def test_no_chance_and_certainty(chance: float, rows: int) -> None:
    table = sparse(EntryKind.PROBABILITY, chance)
    table.apply(torch.arange(1000), torch.zeros(1000, 2), 1.0)
    assert len(table) == rows


def test_who_is_not_admitted_reads_as_the_initial_value() -> None:
    some = torch.arange(1000)
    wanted = sparse().pull(some)
    assert torch.equal(sparse(EntryKind.PROBABILITY, 0.5).pull(some), wanted)
    assert torch.equal(sparse(EntryKind.COUNT, 2).pull(some), wanted)


# ---- by count


def test_a_key_is_admitted_when_it_was_pulled_often_enough() -> None:
    table = sparse(EntryKind.COUNT, 3)
    table.pull(numbers(1, 2))
    table.pull(numbers(2), insert=False)  # an evaluation does not count
    table.apply(numbers(1, 2), torch.ones(2, 2), 1.0)  # nor does a push, which is dropped
    table.pull(numbers(2, 3))
    assert (len(table), table.step) == (0, 1)
    assert waiting(table) == {1: 1, 2: 2, 3: 1}
    table.pull(numbers(2))
    assert stored(table) == [2]
    assert sorted(table.candidates().keys.tolist()) == [1, 3]
    assert torch.equal(table.pull(numbers(2)), sparse().pull(numbers(2)))
    table.apply(numbers(2, 3), torch.ones(2, 2), 1.0)
    assert torch.equal(table.pull(numbers(2)), sparse().pull(numbers(2)) - 1)
    table.pull(numbers(3, 3))  # twice in one request counts twice
    assert stored(table) == [2, 3]


def test_many_candidates() -> None:
    table, random = sparse(EntryKind.COUNT, 3), torch.Generator().manual_seed(0)
    counts: dict[int, int] = {}
    for _ in range(50):
        some = torch.randint(0, 2000, (100,), generator=random) * 977
        table.pull(some)
        for key in some.tolist():
            counts[key] = counts.get(key, 0) + 1
    assert stored(table) == sorted(key for key, count in counts.items() if count >= 3)
    assert waiting(table) == {key: count for key, count in counts.items() if count < 3}


def test_candidates_are_saved_and_loaded() -> None:
    table, other = sparse(EntryKind.COUNT, 2), sparse(EntryKind.COUNT, 2)
    table.pull(torch.arange(100))
    shrink(table, ShrinkPolicy())
    table.pull(numbers(100))
    other.load_candidates(table.candidates())
    assert all(map(torch.equal, other.candidates().columns, table.candidates().columns))
    other.pull(numbers(5, 500))
    assert stored(other) == [5]
    shrink(other, ShrinkPolicy(delete_after_unseen_days=1))
    assert waiting(other) == {100: 1, 500: 1}
    assert len(sparse().candidates().keys) == 0


@pytest.mark.parametrize(("statistics", "bound"), [(False, None), (True, None), (False, Bound(rows=200_000))])
def test_candidates_that_are_not_pulled_again_are_forgotten(statistics: bool, bound: Bound | None) -> None:
    """Else every key that was ever seen would be there forever: 20,000 more a day."""
    table, often = sparse(EntryKind.COUNT, 5, statistics=statistics, bound=bound), numbers(-1, -2)
    policy = ShrinkPolicy(delete_after_unseen_days=2)
    many = []
    for day in range(6):
        table.pull(torch.arange(20_000) + 20_000 * day)
        if day in (0, 2):
            table.pull(often)
        assert shrink(table, policy) == 0
        many.append(len(table.candidates().keys))
    assert many == [20_002, 40_002, 40_002, 40_002, 40_000, 40_000]
    assert waiting(table).keys() == set(range(80_000, 120_000))
    table.pull(often)
    assert waiting(table)[-1] == 1, "it begins anew"


def test_a_candidate_that_is_pulled_every_now_and_then_is_admitted() -> None:
    table = sparse(EntryKind.COUNT, 3)
    for day in range(7):
        if day % 3 == 0:
            table.pull(numbers(5))
        shrink(table, ShrinkPolicy(delete_after_unseen_days=3))
    assert stored(table) == [5]


def test_assigned_rows_pass_every_filter() -> None:
    for table in (sparse(EntryKind.PROBABILITY, 0.0), sparse(EntryKind.COUNT, 9)):
        table.assign(numbers(4), torch.zeros(1, 2))
        table.apply(numbers(4), torch.ones(1, 2), 1.0)
        assert table.pull(numbers(4)).tolist() == [[-1, -1]]


# ---- statistics


def test_shows_and_clicks_are_added() -> None:
    table = sparse(EntryKind.SHOW_CLICK)
    table.apply(numbers(1, 2), torch.zeros(2, 2), 1.0, torch.tensor([[3.0, 1.0], [1.0, 0.0]]))
    table.apply(numbers(2, 3), torch.zeros(2, 2), 1.0, torch.tensor([[2.0, 2.0], [1.0, 0.0]]))
    table.apply(numbers(3), torch.zeros(1, 2), 1.0)
    rows = everything(table)
    assert rows.statistics is not None
    assert dict(zip(rows.keys.tolist(), rows.statistics.tolist(), strict=True)) == {
        1: [3, 1, 0],
        2: [3, 2, 0],
        3: [1, 0, 0],
    }


def test_statistics_of_another_shape_are_refused() -> None:
    push = numbers(1, 2), torch.zeros(2, 2)
    for stats in (torch.ones(1, 2), torch.ones(2, 3), torch.ones(2, 2, dtype=torch.float64)):
        table = sparse(statistics=True)
        for refuse in (lambda: table.check(*push, stats), lambda: table.apply(*push, 1.0, stats)):  # noqa: B023
            with pytest.raises(TableError, match=r"statistics of shape \[2, 2\]"):
                refuse()
    with pytest.raises(TableError, match="no statistics"):
        sparse().check(*push, torch.ones(2, 2))
    with pytest.raises(TableError, match="NaN or infinity"):
        sparse(statistics=True).check(*push, torch.full((2, 2), float("nan")))


# ---- shrink


def by_the_formula(model: dict[int, list[float]], policy: ShrinkPolicy) -> dict[int, list[float]]:
    kept = {}
    for key, (show, click, days) in model.items():
        show, click, days = (
            show * policy.show_click_decay_rate,
            click * policy.show_click_decay_rate,
            days + 1,
        )
        score = policy.nonclk_coeff * (show - click) + policy.click_coeff * click
        if score >= policy.delete_threshold and days <= policy.delete_after_unseen_days:
            kept[key] = [show, click, days]
    return kept


def test_days_pass() -> None:
    table, random = sparse(statistics=True), torch.Generator().manual_seed(0)
    policy = ShrinkPolicy(show_click_decay_rate=0.75, delete_after_unseen_days=3, delete_threshold=0.6)
    model: dict[int, list[float]] = {}
    gone = 0
    for day in range(12):
        some = torch.randperm(9000, generator=random)[:3000] * 31
        stats = torch.randint(0, 5, (3000, 2), generator=random).float()
        table.apply(some, torch.ones(3000, 2), float(day), stats)
        for key, (show, click) in zip(some.tolist(), stats.tolist(), strict=True):
            old = model.get(key, [0.0, 0.0, 0.0])
            model[key] = [old[0] + show, old[1] + click, 0.0]
        before = table.pull(torch.tensor(list(model)), insert=False)
        values = dict(zip(model, before, strict=True))
        kept = by_the_formula(model, policy)
        assert shrink(table, policy) == len(model) - len(kept)
        gone += len(model) - len(kept)
        model = kept
        rows = everything(table)
        assert rows.statistics is not None
        assert set(rows.keys.tolist()) == model.keys()
        wanted = torch.tensor([model[key] for key in rows.keys.tolist()])
        assert torch.allclose(rows.statistics, wanted, rtol=1e-5)
        assert torch.equal(table.pull(rows.keys), rows.values)
        assert torch.equal(rows.values, torch.stack([values[key] for key in rows.keys.tolist()]))
    assert gone > 500


def test_the_defaults_are_paddles() -> None:
    table = sparse(statistics=True)
    shows = torch.tensor([[0.0, 0.0], [8.0, 0.0], [8.5, 0.0], [1.0, 0.9], [1.0, 0.79]])
    table.apply(torch.arange(5), torch.zeros(5, 2), 1.0, shows)
    assert shrink(table, ShrinkPolicy()) == 3  # scores 0, 0.784, 0.833, 0.892, 0.795
    assert stored(table) == [2, 3]
    many = torch.full((1, 2), 1e6)
    table.apply(numbers(9), torch.zeros(1, 2), 1.0, many)
    for _ in range(30):
        shrink(table, ShrinkPolicy())
    assert stored(table) == [9]
    assert shrink(table, ShrinkPolicy()) == 1  # unseen for 31 days


def test_a_row_that_went_begins_anew() -> None:
    table = sparse(statistics=True)
    begun = table.pull(numbers(1))
    table.apply(numbers(1), torch.ones(1, 2), 1.0)
    assert shrink(table, ShrinkPolicy()) == 1
    assert torch.equal(table.pull(numbers(1)), begun)


def test_a_day_changes_every_row() -> None:
    """Their unseen days: so the next delta has them all."""
    table = sparse(statistics=True)
    table.apply(torch.arange(10), torch.zeros(10, 2), 1.0, torch.full((10, 2), 9.0))
    with table.cut(mark=True) as cut:
        cut.read(0, cut.rows)
    assert shrink(table, ShrinkPolicy()) == 0
    with table.cut(changed_only=True) as cut:
        assert cut.read(0, cut.rows).keys.tolist() == list(range(10))


def test_what_cannot_be_shrunk() -> None:
    with pytest.raises(TableError, match="no statistics"):
        shrink(sparse(), ShrinkPolicy())
    table = sparse(statistics=True)
    with table.cut(), pytest.raises(TableError, match="being saved"):
        shrink(table, ShrinkPolicy())


class Twins:
    """Two tables with which the same is done, but that one of them is shrunk in slices."""

    def __init__(self, kind: EntryKind) -> None:
        self.sliced, self.whole = (sparse(kind, 2.0, statistics=True) for _ in range(2))
        self._random = torch.Generator().manual_seed(0)

    def use(self) -> None:
        random = self._random
        keys = torch.randperm(4000, generator=random)[:200] * 31
        seen, grad = (
            torch.randint(0, 4, (200, 2), generator=random).float(),
            torch.rand(200, 2, generator=random),
        )
        call = int(torch.randint(0, 7, (1,), generator=random))
        if call > 2:
            pulled = [each.pull(keys, insert=call > 3) for each in (self.sliced, self.whole)]
            assert torch.equal(*pulled)
            return
        for each in (self.sliced, self.whole):
            if call == 0:
                each.apply(keys, grad, 0.5, seen)
            elif call == 1:
                each.assign(keys[:5], grad[:5])
            else:
                each.revise(keys[:5], grad[:5])

    def same(self) -> bool:
        return all(map(torch.equal, self._content(self.sliced), self._content(self.whole)))

    @staticmethod
    def _content(table: SparseTable) -> list[torch.Tensor]:
        rows, candidates = everything(table), table.candidates().columns
        assert rows.statistics is not None
        order, by_key = rows.keys.argsort(), candidates[0].argsort()
        columns = (rows.keys, rows.values, rows.statistics)
        return [*(each[order] for each in columns), *(each[by_key] for each in candidates)]


@pytest.mark.parametrize("kind", [ALL, EntryKind.COUNT])
def test_a_shrink_in_slices_is_as_if_it_had_been_at_once(kind: EntryKind) -> None:
    """Whatever is done with the table between the slices, and whichever row takes the place of another."""
    twins, gone = Twins(kind), 0
    policy = ShrinkPolicy(show_click_decay_rate=0.5, delete_threshold=0.2, delete_after_unseen_days=2)
    for _ in range(15):
        for _ in range(20):
            twins.use()
        twins.sliced.begin_shrink(policy)
        wanted = shrink(twins.whole, policy)
        with pytest.raises(TableError, match="being shrunk"):
            twins.sliced.cut()
        slices = 0
        while (removed := twins.sliced.shrink_some(20)) is None:
            slices += 1
            twins.use()
        assert slices > 5
        assert removed == wanted
        gone += removed
        assert twins.same()
    assert gone > 500


def test_a_candidate_that_takes_the_place_of_an_admitted_one_misses_no_day() -> None:
    table = sparse(EntryKind.COUNT, 2)
    table.pull(torch.arange(10))
    table.begin_shrink(ShrinkPolicy())
    assert table.shrink_some(5) is None
    table.pull(numbers(0, 7))  # two leave, from before the next slice and from after it
    while table.shrink_some(1) is None:
        pass
    assert sorted(table.candidates().keys.tolist()) == [1, 2, 3, 4, 5, 6, 8, 9]
    assert table.candidates().days.tolist() == [1.0] * 8
