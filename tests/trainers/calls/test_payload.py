"""What trainers tell each other, as bytes and as one."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainers.errors import UsageError
from trainers.util import packed, reduced, unpacked


def alike(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


@pytest.mark.parametrize(
    "value",
    [
        7,
        2**70,
        0.1,
        math.inf,
        "a text\nof two lines",
        "",
        [1, 2],
        [[0.5, 1], [2, 3]],
        [],
        np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
        np.float32(0.1),
        np.zeros((0, 3)),
        np.array([1 + 2j]),
        torch.tensor(3),
        torch.empty(0, 2),
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.arange(6).view(2, 3).t(),
        torch.rand(1, 3)[:, 0],
    ],
)
def test_what_comes_is_what_was_given(value: Any) -> None:
    found = unpacked(packed(value, "all_gather")).value
    wanted = np.asarray(value).tolist() if isinstance(value, list) else value
    assert alike(found, wanted)


def over(mode: str, *values: Any) -> Any:
    return reduced([unpacked(packed(value, f"all_reduce {mode}")) for value in values], mode)


@pytest.mark.parametrize(
    ("mode", "values", "wanted"),
    [
        ("sum", (2**62, 2**62, 1), 2**63 + 1),
        ("sum", ([1, 2], [3, 4]), [4, 6]),
        ("sum", ([1, 2], [0.5, 0.5]), [1.5, 2.5]),
        ("max", ([1, 2], [0.5, 2.5]), [1.0, 2.5]),
        ("max", (1, 2.5), 2.5),
        ("min", (np.int8(3), np.int8(-3)), np.int8(-3)),
        ("sum", (np.full(2, 100, np.uint8), np.full(2, 27, np.uint8)), np.full(2, 127, np.uint8)),
        ("max", (torch.tensor([1, 5]), torch.tensor([2, 4])), torch.tensor([2, 5])),
        ("min", (torch.tensor(1.5), torch.tensor(-1.5)), torch.tensor(-1.5)),
        ("sum", (torch.ones(2).bfloat16(), torch.ones(2).bfloat16()), torch.full((2,), 2.0).bfloat16()),
    ],
)
def test_all_of_them_as_one(mode: str, values: tuple[Any, ...], wanted: Any) -> None:
    assert alike(over(mode, *values), wanted)


def test_sums_of_floats_lose_nothing_on_the_way() -> None:
    small = [torch.tensor([1.0]), *[torch.tensor([2.0**-24])] * 2]
    assert over("sum", *small).item() == 1.0 + 2.0**-23
    assert over("sum", *(each.numpy() for each in small)).item() == 1.0 + 2.0**-23


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1, [1]), r"a number on trainer 0, but trainer 1 called all_reduce sum with a list of shape \[1\]"),
        ((torch.ones(2), torch.ones(3)), r"a tensor of shape \[2\] of float32 .* of shape \[3\] of float32"),
        ((torch.ones(1), torch.ones(1).double()), "float32 .* float64"),
        (("a", "b"), "a text, which cannot be reduced"),
        ((torch.ones(1).bool(),), "give integers"),
        ((np.ones(1, bool),), "give integers"),
    ],
)
def test_what_cannot_be_added_up(values: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        over("sum", *values)


def test_who_asks_for_something_else_is_told() -> None:
    with pytest.raises(UsageError, match="trainer 1 called all_reduce max"):
        reduced([unpacked(packed(1, "all_reduce sum")), unpacked(packed(1, "all_reduce max"))], "sum")


@pytest.mark.parametrize(
    "value", [None, {}, ["a"], [[1], [1, 2]], np.array(["a"]), torch.eye(2).to_sparse(), object()]
)
def test_what_cannot_be_told(value: Any) -> None:
    with pytest.raises(UsageError, match=r"fleet\.util\.all_gather"):
        packed(value, "all_gather")


@pytest.mark.parametrize("mode", ["sum", "max", "min"])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan), (1, math.nan, 3)])
def test_a_number_that_is_none_is_not_lost(mode: str, values: tuple[float, ...]) -> None:
    assert math.isnan(over(mode, *values))
    assert math.isnan(over(mode, *([value] for value in values))[0])


def test_whole_numbers_of_a_list_have_no_bound() -> None:
    assert over("sum", [2**62, -1], [2**62, 4], [2**62, 5]) == [3 * 2**62, 8]
    assert over("max", [[2**63 - 1]], [[7]]) == [[2**63 - 1]]
    assert over("sum", [1, 2], [0.5, 1]) == [1.5, 3.0]
