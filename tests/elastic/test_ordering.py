"""Who becomes a member, and with which rank."""

import pytest

from fleetrun.elastic.rendezvous.leader import choose
from fleetrun.elastic.rendezvous.records import Node
from fleetrun.elastic.rendezvous.view import Candidate
from fleetrun.plan.topology import Offer


def node(text):
    """`id`, `id=rank`, `id@host`."""
    name, _, host = text.partition("@")
    id, _, rank = name.partition("=")
    return Node(id=id, host=host or f"host-of-{id}", name="", offer=Offer(), rank=int(rank or -1))


def candidate(text):
    return [
        Candidate(node=node(each), created=number, revision=number, since=0.0, fits=0)
        for number, each in enumerate(text.split())
    ]


@pytest.mark.parametrize(
    ("there", "previous", "most", "order"),
    [
        # by arrival, by wish
        ("a b c", "", 3, "a b c"),
        ("a=2 b=0 c=1", "", 3, "b c a"),
        ("a b=0 c", "", 3, "b a c"),
        ("a=5 b", "", 2, "a b"),  # a rank past the end of a smaller generation
        # too many: members, then those that ask for a rank, then the first
        ("a b c d", "", 2, "a b"),
        ("a b c=0 d", "", 2, "c a"),
        ("a b c d", "d c", 2, "d c"),
        ("a=0 b c", "b c", 2, "b c"),
        # ranks are kept
        ("c b a", "a b c", 3, "a b c"),
        ("c b a", "a b c", 4, "a b c"),
        ("d c b a", "a b c", 4, "a b c d"),
        # the last ranks move into the holes
        ("b c d", "a b c d", 4, "d b c"),
        ("c d", "a b c d", 4, "c d"),
        ("a d", "a b c d", 4, "a d"),
        ("b", "a b", 2, "b"),
        # newcomers fill what is left
        ("a c x", "a b c", 3, "a x c"),
        ("b c x y", "a b c", 4, "x b c y"),
        ("d x y", "a b c d", 4, "d x y"),
        # a machine that comes back has its place
        ("a d y@host-of-c x@host-of-b", "a b c d", 4, "a x y d"),
        ("a d x y@host-of-b", "a b c d", 4, "a y x d"),
        ("a x@same y@same", "a b@same c@same", 3, "a x y"),
        # who asks for a rank has it, whatever was before
        ("a b x=0", "a b", 3, "x b a"),
        ("a=0 b=1 x=2", "a b c", 3, "a b x"),
    ],
)
def test_order(there, previous, most, order):
    members = choose(candidate(there), [node(each) for each in previous.split()], most)
    assert " ".join(member.id for member in members) == order


def test_addresses_are_sorted_as_numbers_and_names_follow():
    hosts = ["b.example", "10.0.0.10", "fe80::1", "10.0.0.9", "a.example", "::1"]
    there = candidate(" ".join(f"n{number}@{host}" for number, host in enumerate(hosts)))
    members = choose(there, [], 6, sort_ip=True)
    assert [member.host for member in members] == [
        "10.0.0.9", "10.0.0.10", "::1", "fe80::1", "a.example", "b.example"
    ]  # fmt: skip


def test_addresses_do_not_move_those_who_have_a_rank():
    members = choose(candidate("a@10.0.0.9 b@10.0.0.2 c@10.0.0.1"), [node("a"), node("b")], 3, sort_ip=True)
    assert [member.id for member in members] == ["a", "b", "c"]


def test_nodes_of_one_address_keep_their_order():
    members = choose(candidate("b@h a@h c@h"), [], 3, sort_ip=True)
    assert [member.id for member in members] == ["b", "a", "c"]
