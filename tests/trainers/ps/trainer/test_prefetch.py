import pytest
import torch

from trainers.errors import UsageError
from trainers.ps.trainer.prefetch import by_module, prefetched


def test_the_next_batch_is_prepared_before_the_current_one_is_given() -> None:
    said: list[str] = []
    batches = prefetched(iter("abc"), lambda batch: said.append(f"prepare {batch}"))
    said.extend(f"train {batch}" for batch in batches)
    assert said == ["prepare b", "train a", "prepare c", "train b", "train c"]


def test_no_batches_and_one_batch() -> None:
    assert list(prefetched([], lambda batch: pytest.fail("nothing to prepare"))) == []
    assert list(prefetched([1], lambda batch: pytest.fail("nothing to prepare"))) == [1]


def test_ids_of_the_only_module_need_no_name() -> None:
    module, ids = torch.nn.Identity(), torch.arange(3)
    assert by_module(ids, [module]) == {module: [ids]}
    assert by_module([ids, ids], [module]) == {module: [ids, ids]}
    assert by_module({module: ids}, [torch.nn.Identity(), module]) == {module: [ids]}


def test_ids_that_belong_nowhere_are_refused() -> None:
    with pytest.raises(UsageError, match="2 embeddings are served"):
        by_module(torch.arange(3), [torch.nn.Identity(), torch.nn.Identity()])
    with pytest.raises(UsageError, match="which no server serves"):
        by_module({torch.nn.Identity(): torch.arange(3)}, [torch.nn.Identity()])
