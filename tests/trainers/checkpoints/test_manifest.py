"""Small values to JSON and back."""

import json
import math

import pytest

from trainers.checkpoints.manifest import from_json, to_json
from trainers.errors import UsageError


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": 1, "b": [1.5, "x", None, True], "c": {}},
        {30: 1, 60: 2},
        {"__items__": 1},
        {"outer": {1: {"inner": {2.5: [3]}}}},
        0.1 + 0.2,
        10**30,
    ],
)
def test_there_and_back(value: object) -> None:
    assert from_json(json.loads(json.dumps(to_json("it", value)))) == value


def test_tuples_come_back_as_lists_and_infinity_as_itself() -> None:
    assert from_json(json.loads(json.dumps(to_json("it", {"betas": (0.9, math.inf)})))) == {
        "betas": [0.9, math.inf]
    }


def test_anything_else_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"sampler\.inner is of type set and cannot be kept"):
        to_json("sampler", {"inner": {1}})
