"""Questions of one node to the others, in simulated jobs: which nodes answer, and that no keys remain."""

import json

import pytest

from fleetrun.elastic.inquiry import LARGEST, RANKS_WITHIN, WITHIN, Inquiry
from fleetrun.elastic.rendezvous import records
from fleetrun.envs.contract import NodeLoss
from fleetrun.pod.events import Detail
from fleetrun.pod.policy import Budget
from fleetrun.stacks.helper import _LATER, _SOON
from tests.support.simulation import SimulatedJob


def attach(inquiry, membership):
    inquiry.membership = membership
    membership.when_looked.append(inquiry.look)


class Asking:
    """A job of nodes that have met; each answers with its id, or as `told` says."""

    def __init__(self, count: int, **policy) -> None:
        self.job = SimulatedJob(**{"fewest": count, "most": count, **policy})
        self.options: list[tuple[str, bool, int]] = []
        self.told: dict[str, bytes] = {}
        self.ranks_take = 0.0
        self.detail: list[Detail] = []
        self.inquiries: list[Inquiry] = []
        for _ in range(count):
            self.add()
        self.job.until(self.job.all_run())
        self.inquiries.sort(key=lambda each: self.player(each).running.rank)

    def add(self):
        player = self.job.add()
        me, loop = player.node.id, self.job.loop
        inquiry = Inquiry(loop, me, self.teller(me), self.tell_ranks, wall=lambda: loop.now)
        attach(inquiry, player.membership)
        self.inquiries.append(inquiry)
        return player

    def player(self, inquiry):
        return next(each for each in self.job.players if each.node.id == inquiry._me)

    def teller(self, me):
        def tell(brief, most):
            self.options.append((me, brief, most))
            return self.told.get(me, me.encode())

        return tell

    def tell_ranks(self, most, detail, then):
        self.detail.append(detail)
        self.job.loop.after(self.ranks_take, lambda: then(b"here"))

    def ask(self, asker, rank=None, brief=False):
        """A list that the answers come into."""
        found = []
        self.inquiries[asker].ask(rank, brief, found.append)
        return found

    def left(self):
        """Keys of questions and answers that stand in the store."""
        ledger = self.job.ledger
        return [*ledger.range(records.ASKS_PREFIX), *ledger.range(records.ANSWERS_PREFIX)]

    def settle(self):
        self.job.loop.run_for(0.5)


def ids(nodes, *ranks):
    return {rank: nodes.inquiries[rank]._me.encode() for rank in ranks}


def test_all_others_are_heard_at_once_and_nothing_is_left():
    nodes = Asking(4)
    began = nodes.job.loop.now
    found = nodes.ask(1)
    nodes.job.until(lambda: found)
    assert found == [ids(nodes, 0, 2, 3)]
    assert nodes.job.loop.now - began < 0.1
    nodes.settle()
    assert nodes.left() == []
    assert all(
        "answers/" not in prefix for each in nodes.job.players for prefix in each.store._mirror.prefixes
    )


def test_each_question_is_answered_anew():
    nodes = Asking(3)
    for said in (b"first", b"second"):
        nodes.told = {nodes.inquiries[2]._me: said}
        found = nodes.ask(0)
        nodes.job.until(lambda found=found: found)
        assert found[0][2] == said


def test_one_node_alone():
    nodes = Asking(4)
    found = nodes.ask(0, rank=2)
    nodes.job.until(lambda: found)
    assert found == [ids(nodes, 2)]
    assert [me for me, _, _ in nodes.options] == [nodes.inquiries[2]._me]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_node_asks_neither_itself_nor_a_missing_rank(rank):
    nodes = Asking(4)
    assert nodes.ask(0, rank=rank) == [{}]
    assert nodes.options == []


def test_a_node_outside_the_rendezvous_asks_no_node():
    job = SimulatedJob(fewest=2, most=2)
    player = job.add()
    alone = Inquiry(job.loop, player.node.id, lambda brief, most: b"", lambda most, detail, then: None)
    found = []
    alone.ask(None, False, found.append)
    attach(alone, player.membership)
    job.loop.run_for(1.0)
    alone.ask(None, False, found.append)
    assert found == [{}, {}]


def test_who_does_not_answer_is_waited_for_no_longer_than_said():
    nodes = Asking(3)
    nodes.player(nodes.inquiries[2]).store.cut()
    began = nodes.job.loop.now
    found = nodes.ask(0)
    nodes.job.until(lambda: found)
    assert found == [{**ids(nodes, 1), 2: None}]
    assert nodes.job.loop.now - began == pytest.approx(WITHIN)
    nodes.player(nodes.inquiries[2]).store.heal()
    nodes.settle()
    assert nodes.left() == []
    assert [me for me, _, _ in nodes.options] == [nodes.inquiries[1]._me], "no node waits for it any more"


def test_where_ranks_stand_may_take_a_node_longer():
    """On a slow machine: as long as its helper process may take."""
    nodes = Asking(2)
    nodes.ranks_take = _SOON + _LATER
    found = []
    began = nodes.job.loop.now
    nodes.inquiries[0].ask_ranks(Detail.OUTSIDE, found.append)
    nodes.job.loop.run_for(RANKS_WITHIN)
    (answer,) = (answers[1] for answers in found)
    assert (answer.data, answer.asked) == (b"here", began)
    assert answer.heard - began == pytest.approx(nodes.ranks_take, abs=0.1)
    assert nodes.detail == [Detail.OUTSIDE]
    nodes.settle()
    assert nodes.left() == []


def test_without_a_store_no_node_is_asked_and_no_request_waits():
    nodes = Asking(3)
    store = nodes.player(nodes.inquiries[0]).store
    store.cut()
    nodes.settle()
    before = store.asked.copy()
    assert [nodes.ask(0) for _ in range(50)] == [[{1: None, 2: None}]] * 50
    assert nodes.ask(0, rank=2) == [{2: None}]
    assert store.asked == before
    store.heal()
    nodes.settle()
    assert nodes.options == []
    found = nodes.ask(0)
    nodes.job.until(lambda: found)
    assert found == [ids(nodes, 1, 2)]


def test_many_ask_at_once():
    nodes = Asking(4)
    found = [nodes.ask(asker) for asker in range(4)] + [nodes.ask(0, brief=True), nodes.ask(0, rank=3)]
    nodes.job.until(lambda: all(found))
    for asker in range(4):
        assert found[asker] == [ids(nodes, *({0, 1, 2, 3} - {asker}))]
    assert found[4:] == [[ids(nodes, 1, 2, 3)], [ids(nodes, 3)]]
    nodes.settle()
    assert nodes.left() == []


def test_who_asks_the_same_meanwhile_hears_the_same_answers():
    nodes = Asking(3)
    found = [nodes.ask(0) for _ in range(50)]
    nodes.job.until(lambda: all(found))
    assert found == [[ids(nodes, 1, 2)]] * 50
    assert len(nodes.options) == 2


def test_an_asker_that_vanishes_leaves_nothing():
    nodes = Asking(4, on_loss=NodeLoss.SHRINK)
    nodes.ask(3)
    asker = nodes.player(nodes.inquiries[3])
    nodes.job.until(lambda: len(nodes.job.ledger.range(records.ANSWERS_PREFIX)) == 3)
    asker.crash()
    nodes.job.loop.run_for(30.0)
    assert nodes.left() == []


def test_one_that_leaves_meanwhile_was_silent_or_is_no_member_any_more():
    nodes = Asking(3, fewest=2)
    nodes.player(nodes.inquiries[2]).store.cut()
    found = nodes.ask(0)
    nodes.player(nodes.inquiries[1]).leave()
    nodes.job.until(lambda: found)
    assert set(found[0].values()) <= {None, nodes.inquiries[1]._me.encode()}


def test_an_asking_node_that_ends_meanwhile_gets_no_answers():
    nodes = Asking(2)
    nodes.player(nodes.inquiries[1]).store.cut()
    found = nodes.ask(0)
    nodes.player(nodes.inquiries[0]).membership.close()
    nodes.job.until(lambda: found)
    assert found == [{}]


@pytest.mark.parametrize(
    "said",
    [
        b"", b"\xff", b"{}", b"[1]", b"null", b'"x"', b'{"only": ""}', b'{"only":"","brief":1,"most":"x"}',
        b'{"only":"","brief":true,"most":1e999}', b"[" * 9999,
    ],
)  # fmt: skip
def test_a_question_that_is_none_is_not_answered(said):
    nodes = Asking(2)
    nodes.player(nodes.inquiries[0]).store.put(records.ask_key("somebody.1"), said)
    nodes.settle()
    assert nodes.options == []
    found = nodes.ask(0)
    nodes.job.until(lambda: found)
    assert found == [ids(nodes, 1)]


def test_a_question_whose_answer_could_have_no_key_ends_no_job():
    nodes = Asking(2)
    store = nodes.player(nodes.inquiries[1]).store
    answers = []
    store.put = lambda key, value, **rest: answers.append(key)
    said = json.dumps({"only": "", "brief": False, "most": 100}).encode()
    name = "x" * (1024 - len(records.ASKS_PREFIX))
    nodes.player(nodes.inquiries[0]).store.put(records.ask_key(name), said)
    nodes.settle()
    assert answers == []


def test_no_answer_is_larger_than_the_limit():
    nodes = Asking(2)
    said = json.dumps({"only": "", "brief": False, "most": 1 << 60}).encode()
    nodes.player(nodes.inquiries[0]).store.put(records.ask_key("somebody.1"), said)
    nodes.settle()
    assert {most for _, _, most in nodes.options} == {LARGEST}


def test_answers_of_strangers_and_those_that_are_too_large_are_none():
    nodes = Asking(2)
    me, other = (each._me for each in nodes.inquiries)
    nodes.told = {other: b"x" * (LARGEST + 1)}
    found = nodes.ask(0)
    store = nodes.player(nodes.inquiries[1]).store
    for name in ("stranger", me, "", "a/b", f"{other}/"):
        store.put(f"{records.answers_prefix(f'{me}.1')}{name}", b"hello")
    nodes.job.until(lambda: found)
    assert found == [{1: None}]


def test_those_of_another_generation_are_asked_too():
    nodes = Asking(3, budget=Budget(3))
    nodes.player(nodes.inquiries[1]).fail(restart=True)
    nodes.job.until(nodes.job.all_run_again(*nodes.job.players))
    found = nodes.ask(0)
    nodes.job.until(lambda: found)
    assert found == [ids(nodes, 1, 2)]


@pytest.mark.slow
def test_a_question_to_hundreds_is_two_messages_to_each_and_one_from_it():
    count = 300
    nodes = Asking(count, rdzv_timeout=300)
    before = [each.store.asked.copy() for each in nodes.job.players]
    for asker in (0, count // 2):
        found = nodes.ask(asker, brief=True)
        nodes.job.until(lambda found=found: found)
        assert None not in found[0].values()
        assert len(found[0]) == count - 1
    nodes.settle()
    assert nodes.left() == []
    askers = {nodes.inquiries[asker]._me for asker in (0, count // 2)}
    for player, earlier in zip(nodes.job.players, before, strict=True):
        if player.node.id not in askers:
            more = player.store.asked - earlier
            assert (more["put"], more["told"], more.total()) == (2, 4, 6)
