"""Questions of one node to the others, in simulated jobs: which nodes answer, and that no keys remain."""

import pytest

from fleetrun.elastic.answer import Answers
from fleetrun.elastic.ask import WITHIN, OtherNodes
from fleetrun.elastic.ask_wire import LARGEST, Piece, Request, pack_piece, pack_request, unpack_piece
from fleetrun.elastic.rendezvous import records
from fleetrun.envs.contract import NodeLoss
from fleetrun.pod.events import Detail
from fleetrun.pod.policy import Budget
from fleetrun.stacks.helper import _LATER, _SOON
from tests.support.simulation import SimulatedJob

SECRET = "correct horse battery staple"


class Asking:
    """A job of nodes that have met; each answers with its id, or as `told` says."""

    def __init__(self, count: int, token: str = "", **policy) -> None:
        self.job = SimulatedJob(**{"fewest": count, "most": count, **policy})
        self.token = token
        self.options: list[tuple[str, bool, int]] = []
        self.told: dict[str, bytes] = {}
        self.ranks_take = 0.0
        self.detail: list[Detail] = []
        self.nodes: list[OtherNodes] = []
        for _ in range(count):
            self.add()
        self.job.until(self.job.all_run())
        self.nodes.sort(key=lambda each: self.player(each).running.rank)

    def add(self):
        player = self.job.add()
        me, loop, membership = player.node.id, self.job.loop, player.membership
        others = OtherNodes(loop, me, self.token, wall=lambda: loop.now)
        others.join(membership)
        self.nodes.append(others)
        Answers(
            loop, membership, me, "pod", set(), self.token,
            state=self.teller(me), ranks=self.tell_ranks, stop=pytest.fail, restart=pytest.fail,
        )  # fmt: skip
        return player

    def player(self, others):
        return next(each for each in self.job.players if each.node.id == others._me)

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
        self.nodes[asker].ask("state", {"brief": brief}, lambda answers: found.append(data(answers)), rank)
        return found

    def put(self, value, name="somebody.1"):
        """Write a request as somebody who can reach the store."""
        self.player(self.nodes[0]).store.put(records.request_key(name), value)
        self.settle()

    def left(self):
        """Keys of questions and answers that stand in the store."""
        ledger = self.job.ledger
        return [*ledger.range(records.REQUESTS_PREFIX), *ledger.range(records.ANSWERS_PREFIX)]

    def settle(self):
        self.job.loop.run_for(0.5)


def data(answers):
    return {rank: answer and answer.data for rank, answer in answers.items()}


def ids(nodes, *ranks):
    return {rank: nodes.nodes[rank]._me.encode() for rank in ranks}


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
        nodes.told = {nodes.nodes[2]._me: said}
        found = nodes.ask(0)
        nodes.job.until(lambda found=found: found)
        assert found[0][2] == said


def test_one_node_alone():
    nodes = Asking(4)
    found = nodes.ask(0, rank=2)
    nodes.job.until(lambda: found)
    assert found == [ids(nodes, 2)]
    assert [me for me, _, _ in nodes.options] == [nodes.nodes[2]._me]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_node_asks_neither_itself_nor_a_missing_rank(rank):
    nodes = Asking(4)
    assert nodes.ask(0, rank=rank) == [{}]
    assert nodes.options == []


def test_a_node_outside_the_rendezvous_asks_no_node():
    job = SimulatedJob(fewest=2, most=2)
    player = job.add()
    alone = OtherNodes(job.loop, player.node.id, "")
    found = []
    alone.ask("state", {"brief": False}, found.append)
    alone.join(player.membership)
    job.loop.run_for(1.0)
    alone.ask("state", {"brief": False}, found.append)
    assert found == [{}, {}]


def test_who_does_not_answer_is_waited_for_no_longer_than_said():
    nodes = Asking(3)
    nodes.player(nodes.nodes[2]).store.cut()
    began = nodes.job.loop.now
    found = nodes.ask(0)
    nodes.job.until(lambda: found)
    assert found == [{**ids(nodes, 1), 2: None}]
    assert nodes.job.loop.now - began == pytest.approx(WITHIN["state"])
    nodes.player(nodes.nodes[2]).store.heal()
    nodes.settle()
    assert nodes.left() == []
    assert [me for me, _, _ in nodes.options] == [nodes.nodes[1]._me], "no node waits for it any more"


def test_where_ranks_stand_may_take_a_node_longer():
    """On a slow machine: as long as its helper process may take."""
    nodes = Asking(2)
    nodes.ranks_take = _SOON + _LATER
    found = []
    began = nodes.job.loop.now
    nodes.nodes[0].ask("ranks", {"detail": "outside"}, found.append)
    nodes.job.loop.run_for(WITHIN["ranks"])
    (answer,) = (answers[1] for answers in found)
    assert (answer.data, answer.asked) == (b"here", began)
    assert answer.received - began == pytest.approx(nodes.ranks_take, abs=0.1)
    assert nodes.detail == [Detail.OUTSIDE]
    nodes.settle()
    assert nodes.left() == []


def test_without_a_store_no_node_is_asked_and_no_request_waits():
    nodes = Asking(3)
    store = nodes.player(nodes.nodes[0]).store
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
    asker = nodes.player(nodes.nodes[3])
    nodes.job.until(lambda: len(nodes.job.ledger.range(records.ANSWERS_PREFIX)) == 3)
    asker.crash()
    nodes.job.loop.run_for(30.0)
    assert nodes.left() == []


def test_one_that_leaves_meanwhile_was_silent_or_is_no_member_any_more():
    nodes = Asking(3, fewest=2)
    nodes.player(nodes.nodes[2]).store.cut()
    found = nodes.ask(0)
    nodes.player(nodes.nodes[1]).leave()
    nodes.job.until(lambda: found)
    assert set(found[0].values()) <= {None, nodes.nodes[1]._me.encode()}


def test_an_asking_node_that_ends_meanwhile_gets_no_answers():
    nodes = Asking(2)
    nodes.player(nodes.nodes[1]).store.cut()
    found = nodes.ask(0)
    nodes.player(nodes.nodes[0]).membership.close()
    nodes.job.until(lambda: found)
    assert found == [{}]


@pytest.mark.parametrize(
    "options", [{"brief": 1}, {"most": "x"}, {"most": True}, {"brief": True, "more": 1}, {"detail": "all"}]
)
def test_a_question_with_wrong_options_is_refused(options):
    nodes = Asking(2)
    nodes.put(pack_request("somebody.1", Request(verb="state", options=options), ""))
    assert nodes.options == []
    answers = nodes.job.ledger.range(records.ANSWERS_PREFIX).values()
    assert [unpack_piece(each.value).code for each in answers] == [2, 2]


@pytest.mark.parametrize(("most", "given"), [(1 << 60, LARGEST), (-1, 0), (100, 100)])
def test_no_answer_is_larger_than_the_limit(most, given):
    nodes = Asking(2)
    nodes.put(pack_request("somebody.1", Request(verb="state", options={"most": most}), ""))
    assert {most for _, _, most in nodes.options} == {given}


@pytest.mark.parametrize("theirs", ["", SECRET[::-1]])
def test_with_a_secret_nodes_answer_only_their_own_job(theirs):
    nodes = Asking(2, SECRET)
    request = Request(verb="state", options={})
    nodes.put(pack_request("somebody.1", request, theirs))
    assert nodes.options == []
    found = nodes.ask(0)
    nodes.job.until(lambda: found)
    assert found == [ids(nodes, 1)]


def test_answers_of_strangers_and_those_that_are_too_large_are_none():
    nodes = Asking(2)
    me, other = (each._me for each in nodes.nodes)
    nodes.told = {other: b"x" * (LARGEST + 1)}
    found = nodes.ask(0)
    store = nodes.player(nodes.nodes[1]).store
    for name in ("stranger", me, "", "a/b", f"{other}/"):
        piece = pack_piece(Piece(number=0, data=b"hello", code=0))
        store.put(f"{records.answers_prefix(f'{me}.1')}{name}", piece)
    nodes.job.until(lambda: found)
    assert found == [{1: None}]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[]\n",
        pack_piece(Piece(number=0)),
        pack_piece(Piece(number=1, code=0)),
        pack_piece(Piece(number=0, code=1)),
    ],
)
def test_an_answer_that_no_node_gives_is_none(value):
    nodes = Asking(2)
    nodes.player(nodes.nodes[1]).membership.when_looked.clear()  # it does not answer
    found = nodes.ask(0)
    nodes.settle()
    key = f"{records.answers_prefix(f'{nodes.nodes[0]._me}.1')}{nodes.nodes[1]._me}"
    nodes.player(nodes.nodes[1]).store.put(key, value)
    nodes.job.until(lambda: found)
    assert found == [{1: None}]
    nodes.settle()
    assert nodes.left() == []


def test_those_of_another_generation_are_asked_too():
    nodes = Asking(3, budget=Budget(3))
    nodes.player(nodes.nodes[1]).fail(restart=True)
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
    askers = {nodes.nodes[asker]._me for asker in (0, count // 2)}
    for player, earlier in zip(nodes.job.players, before, strict=True):
        if player.node.id not in askers:
            more = player.store.asked - earlier
            assert (more["put"], more["told"], more.total()) == (2, 4, 6)
