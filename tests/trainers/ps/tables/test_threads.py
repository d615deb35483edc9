"""Requests that several threads work on: the result is that of one thread, to the bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from trainers.errors import UsageError
from trainers.ps.configs import PsConfigs
from trainers.ps.server.store import Store
from trainers.ps.tables import run as runs
from trainers.ps.tables.rules import Adagrad, AnyRule, RowWiseAdagrad, SparseAdam
from trainers.ps.tables.run import NOT_IN, Lines, Threads
from trainers.ps.tables.sparse import SparseTable, make_tables
from trainers.ps.tables.spec import (
    Bound,
    Initializer,
    InitKind,
    RowOptions,
    RowType,
    TableKind,
    TableSpec,
)  # fmt: skip
from trainers.ps.wire import Field, Part, bytes_part

pytestmark = pytest.mark.slow

TABLES, DIM = 7, 4


def spec_of(number: int, rule: AnyRule, **options: object) -> TableSpec:
    init = Initializer(InitKind.UNIFORM, -1, 1, seed=number)
    rows = RowOptions(init=init, **options)  # type: ignore[arg-type]
    return TableSpec(kind=TableKind.SPARSE, name=f"ids{number}", size=DIM, rule=rule, rows=rows)


def content(tables: list[SparseTable]) -> list[torch.Tensor]:
    found = []
    for table in tables:
        with table.cut() as cut:
            rows = cut.read(0, cut.rows)
        order = rows.keys.argsort()
        statistics = [] if rows.statistics is None else [rows.statistics]
        found += [each[order] for each in (rows.keys, rows.values, *rows.state, *statistics)]
    return found


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (Adagrad(), {}),
        (SparseAdam(), {"bound": Bound(rows=900, shared=True)}),
        (RowWiseAdagrad(), {"dtype": RowType.BFLOAT16}),
    ],
)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_the_result_is_that_of_one_thread(
    count: int, rule: AnyRule, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_WORTH", 8 * DIM)
    made = [make_tables({t: spec_of(t, rule, **options) for t in range(TABLES)}) for _ in range(2)]
    sides = [[each for each in tables.values() if isinstance(each, SparseTable)] for tables in made]
    one, several = (
        Lines(dict(enumerate(side)), Threads(each)).run(0, TABLES)
        for side, each in zip(sides, (1, count), strict=True)
    )
    random = np.random.default_rng(count)
    cuts = []
    for step in range(60):
        sizes = random.choice([0, 0, 1, 5, 40, 300], TABLES)
        keys = torch.from_numpy(
            np.concatenate([random.choice(600 + 20 * step, size, replace=False) for size in sizes])
        )
        grad = torch.from_numpy(random.standard_normal((len(keys), DIM)).astype(np.float32))
        spans = sizes.astype(np.int64)
        for insert in (False, step % 2 == 0):
            assert torch.equal(one.pull(spans, keys, insert=insert), several.pull(spans, keys, insert=insert))
        spans[sizes == 0] = random.choice([0, NOT_IN])
        one.apply(spans, keys, grad, 0.1)
        several.apply(spans, keys, grad, 0.1)
        if step == 30:  # while they are saved
            expected = content(sides[0])
            cuts = [table.cut() for table in sides[1]]
        if step == 40:
            rows = [cut.read(0, cut.rows) for cut in cuts]
            assert all(
                torch.equal(each.keys.sort().values, keys)
                for each, keys in zip(rows, expected[:: len(expected) // TABLES], strict=True)
            )
            values = [each.values[each.keys.argsort()] for each in rows]
            assert all(map(torch.equal, values, expected[1 :: len(expected) // TABLES]))
            for cut in cuts:
                cut.close()
    assert [table.step for table in sides[0]] == [table.step for table in sides[1]]
    assert all(map(torch.equal, content(sides[0]), content(sides[1])))


@pytest.mark.parametrize("count", [1, 3])
def test_a_server_has_its_threads(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Pool(ThreadPoolExecutor):
        """It starts a thread only while the others are busy, so what runs does not say its size."""

        def __init__(self, size: int, name: str) -> None:
            super().__init__(size, name)
            sizes.append(size)

    monkeypatch.setattr(runs, "ThreadPoolExecutor", Pool)
    before = set(threading.enumerate())
    store = Store(threads=count)
    store.declare(0, [bytes_part(Field.SPEC, spec_of(0, Adagrad()).encode(), 0)])
    store.pull([Part(0, Field.KEYS, torch.arange(100_000))])
    started = {each.name for each in set(threading.enumerate()) - before}
    assert sizes == ([2] if count == 3 else [])
    assert ("rows_0" in started) == (count == 3)


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_an_invalid_number_of_threads_is_refused(count: object) -> None:
    with pytest.raises(UsageError, match="server_threads"):
        PsConfigs(server_threads=count)  # type: ignore[arg-type]
