import pytest

from trainers.data.loop import prefetched


def said(batches: str, ahead: int) -> list[str]:
    told: list[str] = []
    given = prefetched(iter(batches), lambda batch: told.append(f"prepare {batch}"), ahead)
    told.extend(f"train {batch}" for batch in given)
    return told


def test_the_next_batch_is_prepared_before_the_current_one_is_given() -> None:
    assert said("abc", 1) == ["prepare b", "train a", "prepare c", "train b", "train c"]


def test_two_batches_ahead() -> None:
    wanted = ["prepare b", "prepare c", "train a", "prepare d", "train b", "train c", "train d"]
    assert said("abcd", 2) == wanted
    assert said("ab", 2) == ["prepare b", "train a", "train b"]


@pytest.mark.parametrize("ahead", [1, 2])
def test_no_batches_and_one_batch(ahead: int) -> None:
    assert said("", ahead) == []
    assert said("a", ahead) == ["train a"]
