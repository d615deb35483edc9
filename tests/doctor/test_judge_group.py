"""Several machines: tables of what they told and measured."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from fleetrun.doctor import judge_group
from fleetrun.doctor.facts import Finding, Verdict, warned
from fleetrun.doctor.node_records import Link, NodeRecord
from fleetrun.host.software import Software, packed

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL

ONE = NodeRecord(
    id="a", name="h1", address="10.0.0.1", fleetrun="0.1", python="3.11.7", torch="2.6.0+cu126", nccl="2.21",
    driver="550", kinds=("H100",), script="abc", options={"--nnodes": "2"},
)  # fmt: skip
OTHER = replace(ONE, id="b", name="h2", address="10.0.0.2")
GOOD = Link(round_trip=0.0001, there=1e9, back=1e9, ahead=0.0001)


def bad(findings: Iterable[Finding]) -> dict[str, Verdict]:
    return {each.check: each.verdict for each in findings if each.verdict is not PASS}


@pytest.mark.parametrize(
    ("different", "expected"),
    [
        ({}, {}),
        ({"fleetrun": "0.2"}, {"fleetrun": FAIL}),
        ({"torch": "2.7.0+cu126"}, {"torch": FAIL}),
        ({"torch": "2.6.0+cpu"}, {}),
        ({"torch": ""}, {"torch": FAIL}),
        ({"nccl": "2.22"}, {"NCCL": FAIL}),
        ({"python": "3.11.9"}, {}),
        ({"python": "3.12.1"}, {"python": WARN}),
        ({"driver": "560"}, {"driver": WARN}),
        ({"kinds": ("A100",)}, {"devices": WARN}),
        ({"kinds": ("H100", "H100")}, {"devices": WARN}),
        ({"script": "def"}, {"script": WARN}),
        ({"script": ""}, {"script": WARN}),
    ],
)
def test_versions(different: dict[str, Any], expected: dict[str, Verdict]) -> None:
    assert bad(judge_group.versions([ONE, replace(OTHER, **different)])) == expected


def test_what_nobody_has_is_not_mentioned() -> None:
    plain = replace(ONE, nccl="", kinds=(), script="", torch="")
    checks = [each.check for each in judge_group.versions([plain, replace(plain, id="b")])]
    assert checks == ["fleetrun", "python"]


def test_packages_that_differ_are_told_as_a_launch_tells_them() -> None:
    one, other = (replace(card, software=packed(Software("3", {"a": card.id}))) for card in (ONE, OTHER))
    (finding,) = (each for each in judge_group.versions([one, other]) if each.check == "packages")
    assert finding.verdict is WARN
    assert finding.found == "1 package differs: a is b on h2 (10.0.0.2), a elsewhere"
    assert bad(judge_group.versions([one, one])) == {}


def test_options_that_differ_are_named_with_their_machines() -> None:
    (finding,) = judge_group.options([ONE, replace(OTHER, options={"--nnodes": "3"})])
    assert finding.verdict is FAIL
    assert finding.found == "--nnodes 2 on h1 (10.0.0.1); --nnodes 3 on h2 (10.0.0.2)"


@pytest.mark.parametrize(("ranks", "fine"), [((-1, -1), True), ((0, 1), True), ((1, 1), False)])
def test_ranks(ranks: tuple[int, int], fine: bool) -> None:
    found = bad(judge_group.options([replace(ONE, rank=ranks[0]), replace(OTHER, rank=ranks[1])]))
    assert found == ({} if fine else {"options": FAIL})


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (GOOD, {}),
        (Link(error="port 5: Connection refused"), {"connections": FAIL}),
        (replace(GOOD, round_trip=0.02), {"round trips": WARN}),
        (replace(GOOD, there=1e6), {"bandwidth": WARN}),
        (replace(GOOD, back=0.0), {"bandwidth": WARN}),
        (replace(GOOD, ahead=-5.0), {"clocks": WARN}),
        (replace(GOOD, ahead=5.0), {"clocks": WARN}),
        (replace(GOOD, ahead=5.0, round_trip=10.0), {"round trips": WARN}),
    ],
)
def test_links(link: Link, expected: dict[str, Verdict]) -> None:
    assert bad(judge_group.links([ONE, OTHER], {("a", "b"): link}, set())) == expected


def test_one_way_that_is_slower_than_the_others_is_named() -> None:
    cards = [replace(ONE, id=id_, name=id_) for id_ in "abcd"]
    ways = {(one, other): GOOD for one in "abc" for other in "bcd" if one < other}
    ways["b", "d"] = replace(GOOD, back=1e8)
    found = [each for each in judge_group.links(cards, ways, set()) if each.verdict is WARN]
    assert [each.check for each in found] == ["bandwidth"]
    assert "b (10.0.0.1) to d" in found[0].found


def test_one_that_has_gone_is_named_once_and_its_ways_are_not() -> None:
    found = list(judge_group.links([ONE, OTHER], {("a", "b"): Link(error="refused")}, {"b"}))
    assert [(each.check, each.verdict) for each in found] == [("machines", FAIL)]
    assert "h2 (10.0.0.2)" in found[0].found


def test_links_of_strangers_count_for_nothing() -> None:
    assert list(judge_group.links([ONE, OTHER], {("a", "x"): GOOD, ("y", "b"): GOOD}, set())) == []


def test_what_others_found_is_told_once() -> None:
    same = warned("load", "load 9 on 2 cores", "top")
    cards = [replace(ONE, id=id_, name=id_, findings=(same,)) for id_ in "abcdef"]
    (finding,) = judge_group.others(cards, "a")
    assert finding.found.startswith("b (10.0.0.1), c (10.0.0.1), d (10.0.0.1) and 2 more: load 9")
    assert finding.verdict is WARN


def test_what_was_typed_is_not_told_twice() -> None:
    secret = warned("secret", "there is none", "give one")
    cards = [replace(ONE, findings=(secret,)), replace(OTHER, findings=(secret,))]
    assert list(judge_group.others(cards, "a")) == []


def test_too_few_came() -> None:
    assert judge_group.counted([ONE, OTHER], 2).verdict is PASS
    assert judge_group.counted([ONE], 2).verdict is FAIL
