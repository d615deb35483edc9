"""The costs of tests, and the list of those that only `make test-all` runs."""

import re
from pathlib import Path

import pytest

from tests.support.costs import beyond, group, listed_as_thorough

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("line", listed_as_thorough())
def test_what_is_left_out_exists(line):
    file, _, test = line.partition("::")
    path = TESTS / file
    assert path.exists()
    assert not test or re.search(rf"^ *def {re.escape(test.partition('[')[0])}\(", path.read_text(), re.M)


def test_a_group_may_cost_a_fifth_more_and_a_little():
    budget = {"e2e": {"cpu": 100.0, "torch": 10}}
    assert beyond({"e2e": {"cpu": 127.0, "torch": 19}}, budget, ["cpu", "torch"]) == []
    assert beyond({"e2e": {"cpu": 129.0, "torch": 21}}, budget, ["cpu", "torch"]) == [
        "tests of e2e: 129 CPU seconds, the budget is 100",
        "tests of e2e: 21 imports of torch, the budget is 10",
    ]
    assert beyond({"e2e": {"cpu": 129.0, "torch": 0}}, budget, ["torch"]) == []


def test_a_new_group_needs_a_budget():
    assert beyond({"new": {"cpu": 20.0, "torch": 0}}, {}, ["cpu"]) != []


def test_groups_are_folders():
    files = [
        "e2e/test_top.py",
        "trainers/ps/tables/test_disk.py",
        "trainers/test_stopping.py",
        "test_help.py",
    ]
    assert [group(each) for each in files] == ["e2e", "trainers/ps", "trainers", "top"]
