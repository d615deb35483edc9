"""Several machines that check themselves together, over a store in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from fleetrun.doctor import node_group
from fleetrun.doctor import node_records as cards
from fleetrun.doctor.node_group import NODES, SET, Gathering, NodeGroup, _elsewhere, chosen
from fleetrun.doctor.node_records import Link, NodeRecord
from fleetrun.doctor.requirements import Plan
from fleetrun.elastic.memory_store import MemoryStore
from fleetrun.elastic.store import Ledger
from fleetrun.envs.settings import command_line
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError
from fleetrun.pod.loop import Loop
from tests.support.pods import Clock

# ---- Machines in one loop, over a store in memory: who takes part, what comes of it, who goes when.

HANG = 60.0


@dataclass
class Measured:
    """A surveyor that has always measured already, unless it is `lame`."""

    lame: bool = False
    links: dict[str, Link] = field(default_factory=dict)
    news: int = field(default_factory=lambda: os.eventfd(0))
    done: bool = False

    def survey(self, cards: Sequence[NodeRecord], me: int) -> None:
        self.links = {each.id: Link(round_trip=me + 1.0) for each in cards[me + 1 :]}
        if not self.lame:
            self.finish()

    def finish(self) -> None:
        self.done = True
        os.eventfd_write(self.news, 1)


class Town:
    """Machines that come one after the other."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.ledger = Ledger()
        self.there: dict[str, Gathering] = {}
        self.stores: dict[str, MemoryStore] = {}
        self.counts: list[int] = []
        self.over: list[str] = []
        self._until = 0
        self.surveyors: list[Measured] = []

    def come(
        self, id_: str, nnodes: tuple[int, int] = (2, 2), *, rank: int = -1, lame: bool = False,
        patience: float = 0.0, timeout: float = HANG,
    ) -> Gathering:  # fmt: skip
        self.stores[id_] = MemoryStore(self.ledger, self.loop, id_)
        card = NodeRecord(id=id_, name=id_, address="10.0.0.1", port=1, rank=rank)
        self.surveyors.append(Measured(lame))
        found = Gathering(
            self.stores[id_], self.loop, card, self.surveyors[-1], nnodes,
            show_present=lambda here: self.counts.append(len(here)), show_outage=lambda why: None,
        )  # fmt: skip
        self.there[id_] = found

        def over() -> None:
            self.over.append(id_)
            if len(self.over) >= self._until:
                self.loop.stop()

        found.when_over = over
        found.join(patience, timeout)
        return found

    def until_over(self, count: int) -> list[NodeGroup]:
        self._until = count
        if len(self.over) < count:
            limit = self.loop.after(HANG, self.loop.stop)
            self.loop.run()
            limit.cancel()
        assert len(self.over) >= count, f"only {self.over} have ended"
        return [self.there[id_].group for id_ in self.there]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = self.clock() + HANG
        while not condition():
            assert self.clock() < deadline
            self.loop.after(0.001, self.loop.stop)
            self.loop.run()

    def close(self) -> None:
        for each in self.stores.values():
            each.close()
        self.loop.close()
        for surveyor in self.surveyors:
            os.close(surveyor.news)


@pytest.fixture
def town() -> Iterator[Town]:
    made = Town()
    yield made
    made.close()


def names(group: NodeGroup) -> list[str]:
    return [card.id for card in group.members]


def test_all_know_all_and_nothing_is_left(town: Town) -> None:
    for id_ in "abc":
        town.come(id_, (3, 3))
    parties = town.until_over(3)
    for group in parties:
        assert (names(group), group.error, group.departed) == (["a", "b", "c"], "", set())
        assert {pair: link.round_trip for pair, link in group.links.items()} == {
            ("a", "b"): 1.0, ("a", "c"): 1.0, ("b", "c"): 2.0,
        }  # fmt: skip
    assert town.ledger.range("") == {}


def test_the_order_is_that_of_the_ranks(town: Town) -> None:
    town.come("a", rank=1)
    town.come("b", rank=0)
    for group in town.until_over(2):
        assert names(group) == ["b", "a"]


def test_too_few(town: Town) -> None:
    town.come("a", (2, 2))
    town.until(lambda: town.counts)
    town.clock.advance(HANG)
    (group,) = town.until_over(1)
    assert group.error == "1 of 2 nodes joined within 60 s"
    assert town.counts == [1]


def test_those_beyond_the_fewest_are_waited_for_but_not_for_ever(town: Town) -> None:
    town.come("a", (1, 2), patience=0.0)
    (group,) = town.until_over(1)
    assert names(group) == ["a"]
    town.come("b", (2, 3), patience=HANG)
    town.come("c", (2, 3), patience=HANG)
    town.until(lambda: town.counts[-2:] == [2, 2])
    assert town.over == ["a"]
    town.come("d", (2, 3), patience=HANG)
    for group in town.until_over(4)[1:]:
        assert names(group) == ["b", "c", "d"]


def test_one_too_many_is_told_so(town: Town) -> None:
    for id_ in "ab":
        town.come(id_, lame=True)
    town.until(lambda: all(each.group.members for each in town.there.values()))
    late = town.come("c")
    town.until_over(1)
    assert town.over == ["c"]
    assert "2 nodes already run a check there" in late.group.error


def test_one_that_goes_before_it_has_measured_is_named(town: Town) -> None:
    town.come("a")
    town.come("b", lame=True)
    town.until(lambda: town.there["b"].group.members and town.there["a"].group.members)
    town.stores["b"].close()
    town.until_over(1)
    assert town.there["a"].group.departed == {"b"}
    assert town.there["a"].group.error == ""


def test_one_that_never_measures_is_not_waited_for_for_ever(town: Town) -> None:
    town.come("a")
    town.come("b", lame=True)
    town.until(lambda: all(each.group.members for each in town.there.values()))
    assert town.over == []
    town.clock.advance(node_group.ALLOWED + node_group.LATE)
    first, _ = town.until_over(2)
    assert names(first) == ["a", "b"]


def test_a_link_that_could_not_be_measured_is_told_to_all(town: Town) -> None:
    town.come("a", lame=True)
    town.come("b", lame=True)
    town.until(lambda: all(each.group.members for each in town.there.values()))
    one, other = town.surveyors
    one.links = {"b": Link(error="refused")}
    one.finish()
    other.finish()
    for group in town.until_over(2):
        assert group.links == {("a", "b"): Link(error="refused")}


def test_a_stranger_in_the_store(town: Town) -> None:
    town.ledger.put(f"{NODES}x", b"garbage")
    town.come("a")
    (group,) = town.until_over(1)
    assert "does not understand" in group.error


def test_a_set_that_is_none(town: Town) -> None:
    town.ledger.put(SET, b"7")
    town.come("a")
    (group,) = town.until_over(1)
    assert "does not understand" in group.error


def test_a_store_that_refuses(town: Town) -> None:
    found = town.come("a")
    found.lost(UsageError("no", hint="why"))
    (group,) = town.until_over(1)
    assert (group.error, group.hint) == ("no", "why")
    found.changed()  # what comes later changes nothing
    found.lost(UsageError("other"))
    assert group.error == "no"


def test_a_reason_to_give_up_counts_only_while_nobody_answered(town: Town) -> None:
    found = town.come("a")
    found._check_start(lambda: None)
    assert town.over == []
    town.until(lambda: found.reached)
    found._check_start(lambda: UsageError("no"))
    assert town.over == []


@pytest.mark.parametrize(
    ("ranks", "fewest", "most", "waited", "expected"),
    [
        ({"a": -1}, 2, 2, False, ()),
        ({"a": -1, "b": -1}, 2, 2, False, ("a", "b")),
        ({"a": -1, "b": 0}, 2, 2, False, ("b", "a")),
        ({"a": 1, "b": 0, "c": 2}, 2, 2, False, ("b", "a")),
        ({"a": -1, "b": -1}, 2, 3, False, ()),
        ({"a": -1, "b": -1}, 2, 3, True, ("a", "b")),
        ({"a": -1}, 2, 3, True, ()),
    ],
)
def test_who_takes_part(
    ranks: dict[str, int], fewest: int, most: int, waited: bool, expected: tuple[str, ...]
) -> None:
    here = {id_: NodeRecord(id=id_, name="h", address="1", rank=rank) for id_, rank in ranks.items()}
    arrival = {id_: number for number, id_ in enumerate(ranks)}
    assert chosen(here, arrival, fewest, most, waited=waited) == expected


def test_members_as_they_are_written() -> None:
    assert cards.unpack_members(cards.pack_members(("a", "b"))) == ("a", "b")


# ---- What is to be typed on the other machines.


@pytest.mark.parametrize(
    ("named", "line"),
    [(True, ("--nnodes=2", "train.py")), (False, ("--nnodes=2",))],
)
def test_a_script_is_named_only_where_a_person_named_it(named: bool, line: tuple[str, ...]) -> None:
    resolved = resolve(command_line.read(["--nnodes", "2", "--host", "10.0.0.1", "train.py"]), {})
    assert _elsewhere(resolved, Plan(names_script=named)) == line
