"""Cards and links through JSON; what others write is checked."""

import json
from dataclasses import replace

import pytest

from fleetrun.decoding import BadRecordError
from fleetrun.doctor import node_records as cards
from fleetrun.doctor.facts import Link, failed, passed, warned
from fleetrun.doctor.node_records import NodeRecord

CARD = NodeRecord(
    id="a", name="h1", address="10.0.0.1", rank=0, port=5000, ticket="secret", kinds=("H100", "H100"),
    trainers=2, options={"--nnodes": "2"}, findings=(warned("load", "much", "top"), failed("x", "y")),
)  # fmt: skip


def test_there_and_back() -> None:
    assert cards.unpack(cards.pack(CARD)) == CARD
    links = {"b": Link(round_trip=0.1, there=1.0, back=2.0, ahead=-0.5), "c": Link(error="no")}
    assert cards.unpack_links(cards.pack_links(links)) == links
    assert cards.unpack_members(cards.pack_members(("a", "b"))) == ("a", "b")


def test_only_what_stands_in_the_way_is_told() -> None:
    told = cards.unpack(cards.pack(replace(CARD, findings=(passed("python", "3.11"), *CARD.findings))))
    assert told.findings == CARD.findings


def test_much_text_is_cut() -> None:
    many = tuple(warned("x", "y" * 10_000, f"{number}") for number in range(1000))
    data = cards.pack(replace(CARD, findings=many))
    assert len(data) < 100_000
    assert len(cards.unpack(data).findings) == 40


@pytest.mark.parametrize(
    "change",
    [
        {"rank": "0"}, {"port": 1.5}, {"port": 10**20}, {"port": -5}, {"port": 0}, {"port": 65536},
        {"address": "a b"}, {"address": "x" * 64}, {"address": ""}, {"id": None}, {"kinds": "H100"},
        {"options": []}, {"findings": None}, {"findings": [1]}, {"findings": [["a", "worse", "b", "c"]]},
        {"findings": [["a", "fail", "b"]]},
    ],
)  # fmt: skip
def test_a_card_with_a_wrong_field(change: dict[str, object]) -> None:
    row = json.loads(cards.pack(CARD)) | change
    with pytest.raises(BadRecordError):
        cards.unpack(json.dumps(row).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"1", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_no_card_at_all(data: bytes) -> None:
    for read in (cards.unpack, cards.unpack_links):
        with pytest.raises(BadRecordError):
            read(data)
    if data != b"[]":
        with pytest.raises(BadRecordError):
            cards.unpack_members(data)


@pytest.mark.parametrize("text", ['{"b": 1}', '{"b": {"error": 1}}', '["b"]'])
def test_links_that_are_none(text: str) -> None:
    with pytest.raises(BadRecordError):
        cards.unpack_links(text.encode())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_none(number: float) -> None:
    with pytest.raises(BadRecordError):
        cards.unpack_links(cards.pack_links({"b": Link(round_trip=number)}))
