"""Feeds: what they take, what they refuse, and which slots of a data set they are."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from trainers import static
from trainers.data.slots import Bag, Batch, Layout, Slot
from trainers.errors import UsageError

BAG = Bag(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3]))


@pytest.mark.parametrize(
    ("feed", "value", "wanted"),
    [
        (static.data("x", [None, 2]), np.ones((3, 2), np.float32), torch.ones(3, 2)),
        (static.data("x", [-1, 2], "float64"), torch.ones(1, 2).double(), torch.ones(1, 2).double()),
        (static.data("x", [2], torch.float32), [1, 2.5], torch.tensor([1.0, 2.5])),
        (static.data("x", [2], "float32"), [1, 2], torch.tensor([1.0, 2.0])),
        (static.data("y", [None], "int64"), (3, 4), torch.tensor([3, 4])),
        (static.data("scale", [], "float64"), 2.5, torch.tensor(2.5).double()),
        (static.data("mask", [None], "bool"), [True], torch.tensor([True])),
        (static.data("none", [None, 2]), np.ones((0, 2), np.float32), torch.ones(0, 2)),
    ],
)
def test_values_become_tensors_of_the_declared_type(
    feed: static.Data, value: Any, wanted: torch.Tensor
) -> None:
    torch.testing.assert_close(feed.checked(value), wanted, rtol=0, atol=0)


def test_arrays_are_not_copied_unless_they_must_not_be_written() -> None:
    feed = static.data("x", [None], "float32")
    array = np.zeros(2, np.float32)
    feed.checked(array)[0] = 1
    assert array[0] == 1
    array.flags.writeable = False
    feed.checked(array)[0] = 2
    assert array[0] == 1


@pytest.mark.parametrize(
    ("feed", "value", "message"),
    [
        (
            static.data("x", [None, 2]),
            np.ones((3, 2)),
            "feed 'x' (float32, shape [any, 2]) was given float64. Convert it first",
        ),
        (static.data("x", [None, 2]), np.ones((3, 1), np.float32), "was given shape [3, 1]"),
        (static.data("x", [None, 2]), np.ones(2, np.float32), "was given shape [2]"),
        (static.data("x", [None]), torch.ones(2, dtype=torch.int64), "was given int64"),
        (static.data("y", [None], "int64"), [1.5], "was given float32. Convert it first"),
        (static.data("y", [None], "uint8"), [300, -1], "was given numbers from -1 to 300"),
        (static.data("x", [None]), "words", "was given a str, which torch cannot convert"),
        (static.data("x", [None]), [[1.0], [1.0, 2.0]], "was given a list, which torch cannot convert"),
        (static.data("ids", [None, 1], "int64", lod_level=1), torch.ones(2), "was given a Tensor. Pass a"),
        (static.data("ids", [None, 1], "float32", lod_level=1), BAG, "was given values of int64"),
    ],
)
def test_what_a_feed_refuses(feed: static.Data, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        feed.checked(value)


@pytest.mark.parametrize(
    ("words", "settings", "message"),
    [
        (("", [None]), {}, "was given the name ''"),
        (("x", [None], "float"), {}, "dtype 'float'; it must be one of bool, uint8"),
        (("x", [None], torch.complex64), {}, "dtype torch.complex64"),
        (("x", 3), {}, "has shape 3"),
        (("x", [None, -2]), {}, "has shape [None, -2]"),
        (("x", [None, "2"]), {}, "has shape [None, '2']"),
        (("x", [None, 1], "int64"), {"lod_level": 2}, "lod_level 2; 0 is a tensor and 1 a Bag"),
        (("x", [None, 2], "int64"), {"lod_level": 1}, "its shape is [None, 1]"),
        (("x", [None, 5], "int64"), {"joins": ("a", "b")}, "joins 2 slots"),
    ],
)
def test_what_cannot_be_declared(words: tuple[Any, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        static.data(*words, **settings)


FEEDS = [
    static.data("image", [None, 2, 2]),
    static.data("ids", [None, 2], "int64", joins=("C1", "C2")),
    static.data("label", [None]),
    static.data("words", [None, 1], "int64", lod_level=1),
]


def test_a_data_set_is_told_its_slots_by_feeds() -> None:
    assert Layout.of(FEEDS).slots == (
        Slot("image", torch.float32, 4),
        Slot("C1", torch.int64, 1),
        Slot("C2", torch.int64, 1),
        Slot("label", torch.float32, 1),
        Slot("words", torch.int64, None),
    )
    assert Layout.of([FEEDS[2], Slot("more")]).slots[1] == Slot("more")


def test_each_feed_takes_its_part_of_a_batch() -> None:
    dense = torch.arange(10.0).view(2, 5)
    ids = torch.tensor([[1, 2], [3, 4]])
    batch = Batch(Layout.of(FEEDS), dense, ids, bags=BAG)
    image, joined, label, words = (feed.of(batch) for feed in FEEDS)
    assert torch.equal(image, dense[:, :4].view(2, 2, 2))
    assert torch.equal(joined, ids)
    assert torch.equal(label, dense[:, 4])
    assert torch.equal(words.values, BAG.values)
    assert torch.equal(words.offsets, BAG.offsets)


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        (static.data("other", [None, 1]), "The batch has no slot 'other'"),
        (static.data("image", [None, 3]), "feed 'image' (float32, shape [any, 3]) was given shape [2, 4]"),
        (static.data("image", [None, 4], "int64"), "was given float32"),
        (static.data("words", [None, 1], "int64"), "Slot 'words' has no fixed length"),
    ],
)
def test_a_batch_of_another_kind(feed: static.Data, message: str) -> None:
    batch = Batch(Layout.of(FEEDS), torch.zeros(2, 5), torch.zeros(2, 2, dtype=torch.int64), bags=BAG)
    with pytest.raises(UsageError, match=re.escape(message)):
        feed.of(batch)


def test_a_feed_of_any_size_is_in_no_line_of_text() -> None:
    with pytest.raises(UsageError, match="only the first dimension may have any size"):
        Layout.of([static.data("picture", [None, 3, None, None])])
