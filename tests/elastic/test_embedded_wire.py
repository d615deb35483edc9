"""Messages to frames and back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from fleetrun.elastic.embedded import wire
from fleetrun.elastic.store import Entry

EXAMPLES: list[tuple[Any, list[bytes]]] = [
    (wire.Hello(1, "0.1.0", "jöb", "n-1", "5" * 32), []),
    (wire.Put(1, "nodes/ä", None, True), [b"\0\xff"]),
    (wire.Put(2, "k", 0, False), [b""]),
    (wire.Delete(3, "k", 17), []),
    (wire.Clear(4, ""), []),
    (wire.Read(5, "k"), []),
    (wire.Watch(6, "a/"), []),
    (wire.Unwatch("a/"), []),
    (wire.Alive(1 << 40), []),
    (wire.Bye(), []),
    (wire.Welcome("0f", 2.5, True), []),
    (wire.Refused("no"), []),
    (wire.Done(1, False), []),
    (wire.Found(5, ["k", 1, 2, 3]), [b"abc"]),
    (wire.Found(5, ["k"]), [b""]),
    (wire.Listing(6, "a/", [["a/1", 1, 2, 0], ["a/2", 3, 3, 2]]), [b"xy"]),
    (wire.News([["a/1"], ["a/2", 3, 4, 1]]), [b"z"]),
    (wire.Living(True), []),
    (wire.Stranger(), []),
    (wire.Wrong("what?"), []),
]
ALL = {**wire.REQUESTS, **wire.ANSWERS}


def test_there_is_an_example_of_each() -> None:
    assert {type(message) for message, _ in EXAMPLES} == set(ALL.values())


@pytest.mark.parametrize(("message", "body"), EXAMPLES, ids=lambda each: type(each).__name__)
def test_there_and_back(message: Any, body: list[bytes]) -> None:
    decoded, came = wire.decode([wire.encode(message), *body], ALL)
    assert type(decoded) is type(message)
    assert decoded == message
    assert [came] == (body or [b""])


@pytest.mark.parametrize(("message", "body"), EXAMPLES, ids=lambda each: type(each).__name__)
def test_a_side_understands_what_the_other_says_and_nothing_else(message: Any, body: list[bytes]) -> None:
    asks = type(message) in wire.REQUESTS.values()
    frames = [wire.encode(message), *body]
    wire.decode(frames, wire.REQUESTS if asks else wire.ANSWERS)
    with pytest.raises(wire.WireError, match="unknown"):
        wire.decode(frames, wire.ANSWERS if asks else wire.REQUESTS)


@pytest.mark.parametrize(("message", "body"), EXAMPLES, ids=lambda each: type(each).__name__)
def test_every_field_is_needed_and_looked_at(message: Any, body: list[bytes]) -> None:
    whole = json.loads(wire.encode(message))
    wrongs: list[object] = [None, [], {}, -1, 1.5, "\n", [["k", 1]], [[1]], ["k", 1, 2, -3], float("nan")]
    fine = {"expect": (None,), "rows": ([], {}), "lease": (1.5,), "text": ("\n",)}
    for field in message._fields:
        without = {name: value for name, value in whole.items() if name != field}
        bad = [{**without, field: wrong} for wrong in wrongs if wrong not in fine.get(field, ())]
        for changed in (without, {**whole, "more": 1}, *bad):
            with pytest.raises(wire.WireError):
                wire.decode([json.dumps(changed).encode(), *body], ALL)
    for frames in (body, [wire.encode(message), *body, b"more"]):
        with pytest.raises(wire.WireError):
            wire.decode(frames, ALL)


def test_a_greeting_of_another_protocol_is_recognised_by_that_alone() -> None:
    with pytest.raises(wire.OtherProtocolError, match="protocol 2") as caught:
        wire.decode([b'{"is":"hello","protocol":2}'], wire.REQUESTS)
    assert caught.value.protocol == 2


def test_what_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(wire.WireError, match="large"):
        wire.decode([b" " * 100 + b"{}"], ALL, longest=100)


@pytest.mark.slow
def test_random_bytes() -> None:
    rng = random.Random(5)
    frame = wire.encode(wire.Put(1, "nodes/a", None, True))
    for _ in range(20_000):
        changed = bytearray(frame)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            message, _ = wire.decode([bytes(changed), b""], wire.REQUESTS)
        except wire.WireError:
            continue
        assert isinstance(message, wire.Put)
        assert message.key.isprintable()
        assert type(message.leased) is bool


def test_entries_there_and_back() -> None:
    entries = {"a": Entry(b"1", 1, 2), "b": None, "c": Entry(b"", 3, 3), "d": Entry(b"xyz", 4, 5)}
    rows, body = wire.pack(entries)
    assert wire.unpack(json.loads(json.dumps(rows)), body) == entries
    for wrong in (body + b"x", body[:-1]):
        with pytest.raises(wire.WireError, match="values of 4 bytes in"):
            wire.unpack(rows, wrong)


@pytest.mark.parametrize(
    ("key", "value"), [("a\n", b""), ("\ud800", b""), ("k" * 1025, b""), ("k", bytes(65 << 20))]
)
def test_what_cannot_be_sent(key: str, value: bytes) -> None:
    with pytest.raises(ValueError, match=r"cannot be a key|it may have"):
        wire.check_entry(key, value)
