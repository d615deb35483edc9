import pytest
import torch

from trainers.errors import UsageError
from trainers.ps import (
    Constant,
    CountFilterEntry,
    Normal,
    ProbabilityEntry,
    ShowClickEntry,
    SparseEmbedding,
    Uniform,
)
from trainers.ps.tables.spec import EntryKind, Initializer, InitKind
from trainers.ps.trainer.modules import find_embeddings, row_limit, rows_of


def test_what_a_script_says_becomes_row_options() -> None:
    table = SparseEmbedding(3, init=Normal(0, 2, seed=5), entry=CountFilterEntry(4), low=-1, high=1)
    rows = rows_of(table)
    assert rows.init == Initializer(InitKind.NORMAL, 0, 2, 5)
    assert (rows.entry.kind, rows.entry.a) == (EntryKind.COUNT, 4)
    assert (rows.low, rows.high, rows.statistics) == (-1, 1, False)
    assert rows_of(SparseEmbedding(3, entry=ShowClickEntry())).statistics
    assert Constant(0.5) == Uniform(0.5, 0.5)
    assert ProbabilityEntry(0.25).a == 0.25


def test_it_is_found_without_being_asked_and_has_no_end() -> None:
    model = torch.nn.ModuleDict(
        {
            "ids": SparseEmbedding(3),
            "far": torch.nn.Embedding(10, 3, sparse=True, device="meta"),
            "near": torch.nn.Embedding(10, 3, sparse=True),
        }
    )
    assert {name: row_limit(module) for name, module in find_embeddings(model)} == {
        "ids": None,
        "far": None,
        "near": 10,
    }
    assert rows_of(model["far"]).init == Initializer(InitKind.NORMAL, 0, 1)


def test_it_cannot_be_called_without_servers() -> None:
    with pytest.raises(UsageError, match=r"between fleet\.init_worker\(\) and fleet\.stop_worker\(\)"):
        SparseEmbedding(3)(torch.arange(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SparseEmbedding(0), "from 1 to 512"),
        (lambda: SparseEmbedding(513), "from 1 to 512"),
        (lambda: SparseEmbedding(3, low=1, high=1), "low"),
        (lambda: Uniform(1, 0), "low"),
        (lambda: Uniform(seed=-1), "the seed is -1"),
        (lambda: Normal(0, -1), "at least 0"),
        (lambda: ProbabilityEntry(0), "above 0"),
        (lambda: CountFilterEntry(0), "at least 1"),
    ],
)
def test_nonsense_is_refused_with_its_value(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=words):
        make()
