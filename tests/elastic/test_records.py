"""Records and their JSON: both directions, and values that are not such records."""

import json
import random
import zlib
from dataclasses import replace

import pytest

from fleetrun.decoding import BadRecordError
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import (
    Cause,
    CauseKind,
    Census,
    MemberStatus,
    Node,
    Report,
    Round,
    State,
    Verdict,
)
from fleetrun.plan.topology import Offer

OFFER = Offer(
    servers=("10.0.0.1:1",),
    trainers=("10.0.0.1:2", "[::1]:3"),
    heter=(("10.0.0.1:4",), ()),
    service="10.0.0.1:5",
)
NODE = Node(
    id="h1-17",
    host="10.0.0.1",
    name="h1",
    offer=OFFER,
    rank=3,
    version="0.1.0",
    options={"--max_restart": "3", "script": "träin.py"},
    has_store=True,
)
CAUSE = Cause(
    why=CauseKind.FAILED,
    node="h1 (10.0.0.1)",
    rank=3,
    headline="exit 7",
    code=7,
    lines=("a", "\x1b[0m"),
    age=0.25,
    requested=True,
)
ROUND = Round(
    generation=4,
    state=State.STOPPING,
    size=2,
    restarts=1,
    cause=CAUSE,
    restart=True,
    after=0.5,
    topology="4/h1-17",
)
READERS = {
    records.read_node: [NODE, Node(id="a", host="b", name="", offer=Offer())],
    records.read_round: [ROUND, Round(generation=1, state=State.OPEN), ROUND.stopping(CAUSE, restart=False)],
    records.read_report: [
        Report(done=MemberStatus.READY),
        Report(done=MemberStatus.STOPPED, causes=(CAUSE, CAUSE)),
    ],
    records.read_verdict: [Verdict(code=125, message="full", hint="x"), Verdict(code=2, message="")],
    records.read_census: [Census(present=2, missing=("rank 1", "h3")), Census(present=0)],
}


@pytest.mark.parametrize(
    ("read", "record"), [(read, record) for read, written in READERS.items() for record in written]
)
def test_a_record_is_read_as_it_was_written(read, record):
    assert read(records.pack(record)) == record


def test_a_topology_is_read_as_it_was_written_but_for_what_all_have_in_common():
    other = Node(id="h2-5", host="10.0.0.2", name="h2", offer=Offer())
    read = records.read_topology(records.pack_topology([NODE, other]))
    assert [(node.id, node.host, node.name, node.rank, node.offer) for node in read] == [
        ("h1-17", "10.0.0.1", "h1", 3, OFFER),
        ("h2-5", "10.0.0.2", "h2", -1, Offer()),
    ]


def test_what_nodes_have_installed_is_in_a_topology_once_for_each_kind():
    nodes = [replace(NODE, id=str(number), software=f"s{number % 20}" * 100) for number in range(100)]
    data = records.pack_topology(nodes)
    assert zlib.decompress(data).count(b"s3" * 100) == 1
    read = records.read_topology(data)
    assert [node.software for node in read[:3]] == [node.software for node in nodes[:3]]
    assert {node.software for node in read} == {f"s{kind}" * 100 for kind in range(16)} | {""}


def test_fields_of_a_later_version_are_left_out():
    fields = json.loads(records.pack(ROUND)) | {"colour": "red"}
    assert records.read_round(json.dumps(fields).encode()) == ROUND


@pytest.mark.parametrize(
    ("name", "title"), [("h1", "h1 (10.0.0.1)"), ("", "10.0.0.1"), ("10.0.0.1", "10.0.0.1")]
)
def test_the_title_of_a_node(name, title):
    assert Node(id="a", host="10.0.0.1", name=name, offer=Offer()).title == title


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "7", '"text"', "{}", '{"generation": 1}', '{"generation": 1, "state": "?"}',
        '{"generation": Infinity, "state": "open"}', '{"generation": 1, "state": "open", "after": NaN}',
        '{"generation": 1, "state": "open", "after": 1e999}',
        '{"generation": 1, "state": "open", "cause": 3}',
        '{"generation": 1, "state": "open", "cause": {"why": "failed"}}', "[" * 100_000,
        '{"generation": ' + "9" * 5000 + ', "state": "open"}', "\x00",
    ],
)  # fmt: skip
def test_what_is_no_round_is_said_to_be_none(text):
    with pytest.raises(BadRecordError):
        records.read_round(text.encode())


def test_bytes_that_are_no_text_are_no_record():
    for read in READERS:
        with pytest.raises(BadRecordError):
            read(b"\xff\xfe{")


@pytest.mark.parametrize(
    "data",
    [b"", b"x", zlib.compress(b"{"), zlib.compress(b"[1]"), zlib.compress(b"[[1,2,3,4,5]]"),
     zlib.compress(b"7"), zlib.compress(b'[["a","b","c",Infinity,[[],[],[],[],"",""]]]'),
     zlib.compress(b"[[]]")[:-6]],
)  # fmt: skip
def test_what_is_no_topology_is_said_to_be_none(data):
    with pytest.raises(BadRecordError):
        records.read_topology(data)


@pytest.mark.slow
def test_a_topology_that_unpacks_without_end_is_refused():
    with pytest.raises(BadRecordError, match="more than"):
        records.read_topology(zlib.compress(b" " * (records.MOST_BYTES + 1)))


JUNK = (
    None,
    True,
    -1,
    2**70,
    1e999,
    float("nan"),
    "",
    "failed",
    "open",
    [],
    [[]],
    {},
    {"why": "lost"},
    [1, 2],
)


def spoilt(value, dice):
    """A copy in which a few places hold something else."""
    if dice.random() < 0.1:
        return dice.choice(JUNK)
    if isinstance(value, dict):
        return {name: spoilt(each, dice) for name, each in value.items() if dice.random() > 0.05}
    if isinstance(value, list):
        return [spoilt(each, dice) for each in value if dice.random() > 0.05]
    return value


@pytest.mark.slow
@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_any_json_is_a_record_or_said_to_be_none(read):
    dice = random.Random(4)
    good = bad = 0
    for _ in range(2000):
        fields = spoilt(json.loads(records.pack(dice.choice(READERS[read]))), dice)
        try:
            record = read(json.dumps(fields).encode())
        except BadRecordError:
            bad += 1
        else:
            assert read(records.pack(record)) == record
            good += 1
    assert good > 50
    assert bad > 50


def test_any_rows_are_a_topology_or_said_to_be_none():
    dice = random.Random(5)
    rows = json.loads(zlib.decompress(records.pack_topology([NODE, NODE])))
    good = 0
    for _ in range(2000):
        data = zlib.compress(json.dumps(spoilt(rows, dice)).encode())
        try:
            members = records.read_topology(data)
        except BadRecordError:
            continue
        assert all(isinstance(node.id, str) and isinstance(node.offer, Offer) for node in members)
        records.pack_topology(members)
        good += 1
    assert good > 50


@pytest.mark.parametrize("code", [256, -1, 1 << 70])
def test_no_exit_code_can_be_taken_for_another(code):
    for read, record in (
        (records.read_round, replace(ROUND, code=code)),
        (records.read_round, replace(ROUND, cause=replace(CAUSE, code=code))),
        (records.read_verdict, Verdict(code=code, message="full")),
    ):
        with pytest.raises(BadRecordError, match="exit code"):
            read(records.pack(record))


@pytest.mark.parametrize("state", [State.STOPPING, State.ENDED])
def test_a_round_that_went_wrong_has_a_cause(state):
    with pytest.raises(BadRecordError, match="cause"):
        records.read_round(records.pack(replace(ROUND, state=state, code=7, cause=None)))


@pytest.mark.parametrize("text", ["10.0.0.1:1\0", "10.0.0.1:1\nLD_PRELOAD=x"])
def test_no_endpoint_spoils_an_environment(text):
    for offer in (Offer(trainers=(text,)), Offer(service=text), Offer(gloo=text), Offer(heter=((text,),))):
        made = replace(NODE, offer=offer)
        with pytest.raises(BadRecordError, match="endpoint"):
            records.read_node(records.pack(made))
        with pytest.raises(BadRecordError, match="endpoint"):
            records.read_topology(records.pack_topology([made]))
