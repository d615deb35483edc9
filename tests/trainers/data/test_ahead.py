import pytest

from trainers.data.ahead import prefetched


def test_the_next_batch_is_prepared_before_the_current_one_is_given() -> None:
    said: list[str] = []
    batches = prefetched(iter("abc"), lambda batch: said.append(f"prepare {batch}"))
    said.extend(f"train {batch}" for batch in batches)
    assert said == ["prepare b", "train a", "prepare c", "train b", "train c"]


def test_no_batches_and_one_batch() -> None:
    assert list(prefetched([], lambda batch: pytest.fail("nothing to prepare"))) == []
    assert list(prefetched([1], lambda batch: pytest.fail("nothing to prepare"))) == [1]
