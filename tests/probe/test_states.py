"""Where a rank stood, read from what its probe and its launcher said."""

import json
import time

import pytest

from fleetrun.decoding import WRONG
from fleetrun.probe.states import Frame, Group, Peer, RankState, nccl_timeouts, read_state

REDUCE = {
    "group": "0",
    "operation": "all_reduce",
    "number": 4,
    "sizes": [[4, 2]],
    "dtypes": ["Float"],
    "entered_ns": 100_500_000_000,
    "done": False,
    "point_to_point": False,
}
PROBE = {"time_ns": 112_000_000_000, "groups": {"0": {"ranks": [0, 1], "entered": 4}}, "calls": [REDUCE]}
SAID = {"rank": 1, "title": "trainer 1", "alive": True, "node": "node 0, a", "probe": PROBE}
LOAD = ["/job/data.py", 31, "load", "time.sleep(60)"]
JOIN = ["/env/site-packages/torch/distributed/c.py", 5, "init_process_group", ""]


def test_what_a_probe_says():
    state = read_state(json.loads(json.dumps(SAID)))
    assert (state.rank, state.node, state.now, state.answered) == (1, "node 0, a", 112.0, True)
    assert state.groups == {"0": Group((0, 1), 4)}
    assert (state.entered("0"), state.entered("other")) == (4, 0)
    call = state.waits_in
    assert call is not None
    assert call is state.call("0", 4)
    assert (call.title, call.entered, call.signature) == (
        "all_reduce #4",
        100.5,
        "all_reduce of Float [4, 2]",
    )


def test_without_a_probe():
    state = read_state({"rank": 0, "title": "trainer 0", "alive": True, "probe": None, "stack": [LOAD]})
    assert not state.answered
    assert state.waits_in is None
    assert state.place == "data.py:31 in load: time.sleep(60)"


@pytest.mark.parametrize(
    ("more", "waits"),
    [
        ({"alive": True}, 3),
        ({"alive": False}, None),
        ({"alive": False, "symptom": True}, 4),
    ],
    ids=["the oldest that is not done", "of an end of its own none", "of a victim the last"],
)
def test_the_collective_in_which_it_waits(more, waits):
    calls = [{**REDUCE, "number": 2, "done": True}, {**REDUCE, "number": 3}, REDUCE]
    waits_in = read_state({**SAID, **more, "probe": {**PROBE, "calls": calls}}).waits_in
    assert (waits_in.number if waits_in else None) == waits


def test_a_process_that_is_exiting_has_ended():
    said = {**SAID, "probe": {**PROBE, "error": "ValueError: no such file\nat line 3"}}
    state = read_state(said)
    assert not state.alive
    assert "ValueError: no such file" in state.how
    assert "line 3" not in state.how
    assert not state.symptom


def test_the_error_of_an_ended_process_does_not_replace_its_end():
    said = {**SAID, "alive": False, "how": "was killed by SIGKILL", "probe": {**PROBE, "error": "ValueError"}}
    assert read_state(said).how == "was killed by SIGKILL"


def test_send_and_recv_are_no_collectives():
    said = {**SAID, "probe": {**PROBE, "calls": [{**REDUCE, "point_to_point": True}], "peer": ["recv", 2, 7]}}
    state = read_state(said)
    assert state.calls == ()
    assert state.peer == Peer("recv", 2, 7)


@pytest.mark.parametrize(
    ("said", "peer"),
    [("recv 0<-1", Peer("recv", 7, 3)), ("send 1->0", Peer("send", 5, 3)), ("coalesced", Peer("coalesced"))],
)
def test_a_gpu_that_waits_in_send_or_recv(said, peer):
    """And not in what is queued behind it. Its program may be anywhere."""
    queued = {**REDUCE, "queued": True}
    call = {**queued, "operation": said, "number": 3, "point_to_point": True}
    groups = {"0": {"ranks": [5, 7], "entered": 4}}
    state = read_state(
        {**SAID, "probe": {**PROBE, "groups": groups, "calls": [call, queued]}, "stack": [LOAD]}
    )
    assert (state.peer, state.waits_in) == (peer, None)
    done = {**call, "done": True}
    state = read_state({**SAID, "probe": {**PROBE, "groups": groups, "calls": [done, queued]}})
    assert (state.peer, state.waits_in) == (None, state.calls[0])


@pytest.mark.parametrize(("function", "waits"), [("_tensor_to_object", False), ("barrier", True)])
def test_in_torchs_own_code_for_groups(function, waits):
    frame = ["/env/site-packages/torch/distributed/distributed_c10d.py", 9, function, "x"]
    assert read_state({**SAID, "probe": {}, "stack": [frame]}).waits_unknown is waits


def test_a_group_without_ranks_or_name_is_left_out():
    groups = {"": {"ranks": [0]}, "1": {"entered": 3}, "2": {"ranks": [0, 1]}}
    assert read_state({**SAID, "probe": {**PROBE, "groups": groups}}).groups == {"2": Group((0, 1), 0)}


@pytest.mark.parametrize(
    ("probe", "stack", "joining"),
    [
        ({"groups": {}}, [JOIN, LOAD], True),
        ({"groups": {}}, [LOAD], False),
        (PROBE, [JOIN, LOAD], False),
        ({}, [JOIN, LOAD], False),
    ],
    ids=["in it", "elsewhere", "a further group", "no answer"],
)
def test_in_init_process_group(probe, stack, joining):
    said = {**SAID, "probe": {"time_ns": 1, **probe} if probe else {}, "stack": stack}
    assert read_state(said).joining is joining


@pytest.mark.parametrize(
    ("operation", "size_matters"), [("broadcast", True), ("all_to_all", False), ("barrier", False)]
)
def test_sizes_belong_to_a_call_where_all_must_agree(operation, size_matters):
    (call,) = read_state({**SAID, "probe": {**PROBE, "calls": [{**REDUCE, "operation": operation}]}}).calls
    assert ("[4, 2]" in call.signature) is size_matters


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        ("/env/lib/python3.11/threading.py", True),
        ("/env/site-packages/torch/x.py", True),
        ("/usr/lib/python3/dist-packages/x.py", True),
        ("<frozen runpy>", True),
        ("/job/train.py", False),
        ("", False),
    ],
)
def test_a_frame_of_a_library(file, installed):
    assert Frame(file, 1, "f").installed is installed


def test_the_place_is_of_the_users_own_code():
    library, own = Frame("/env/site-packages/x.py", 3, "wait"), Frame("/job/train.py", 9, "main")
    state = RankState(rank=0, title="trainer 0", stack=(library, own))
    assert state.place == "train.py:9 in main"
    assert RankState(rank=0, title="trainer 0", stack=(library,)).place == "x.py:3 in wait"
    assert RankState(rank=0, title="trainer 0").place == ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "one"},
        {"alive": True, "probe": {"calls": [{}]}},
        {"probe": {"groups": [1]}},
        {"probe": {"time_ns": "now"}},
        {"stack": [["a.py", 1]]},
        {"probe": {"calls": [{**REDUCE, "entered_ns": None}]}},
    ],
    ids=str,
)
def test_what_is_malformed(wrong):
    with pytest.raises(WRONG):
        read_state({**SAID, **wrong})


@pytest.mark.parametrize(
    ("said", "symptom"),
    [("", False), ("free(): invalid pointer", False), ("[PG ID 0 Rank 1] Watchdog caught a timeout", True)],
)
def test_an_abort_is_a_symptom_if_torch_says_why(said, symptom):
    killed = {
        "rank": 1,
        "title": "trainer 1",
        "alive": False,
        "symptom": True,
        "how": "was killed by SIGABRT",
    }
    assert read_state({**killed, "said": said}).symptom is symptom


FAILED = {**SAID, "alive": False, "symptom": True}
REQUEST = ["/env/site-packages/urllib3/response.py", 9, "_error_catcher", "raise ReadTimeoutError()"]
GLOO = ["/env/site-packages/torch/distributed/distributed_c10d.py", 9, "all_reduce", "work.wait()"]
LOADER = ["/env/site-packages/torch/utils/data/dataloader.py", 9, "_try_get_data", ""]


@pytest.mark.parametrize(
    ("error", "frame", "symptom"),
    [
        ("ReadTimeoutError: read timed out", REQUEST, False),
        ("RuntimeError: DataLoader timed out after 5 seconds", LOADER, False),
        ("RuntimeError: Timed out waiting 8000ms", GLOO, True),
        ("RuntimeError: Connection closed by peer", ["/job/train.py", 9, "step", "work.wait()"], True),
        ("DistStoreError: wait timeout", LOAD, True),
    ],
)
def test_what_reads_like_a_symptom_is_one_if_it_came_from_a_call_to_others(error, frame, symptom):
    state = read_state({**FAILED, "probe": {**PROBE, "error": error}, "stack": [frame]})
    assert state.symptom is symptom
    assert state.waits_unknown is False
    assert (state.waits_in is not None) is symptom


WATCHDOGS = """\
[rank0]:[E1126 18:26:55.257028174 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=6, OpType=_ALLGATHER_BASE, NumelIn=10, NumelOut=20, Timeout(ms)=4000) ran for 4050 \
milliseconds before timing out.
[rank0]:[E1126 18:26:55.257218873 ProcessGroupNCCL.cpp:2303] [PG ID 1 PG GUID 1 Rank 0]  failure detected by \
watchdog at work sequence id: 6 PG status: last enqueued work: 6, last completed work: 5
#0 all_reduce from /site-packages/torch/distributed/distributed_c10d.py:3068
[rank0]:[E1126 18:26:55.293540168 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=27, OpType=ALLREDUCE, NumelIn=1000, NumelOut=1000, Timeout(ms)=4000) ran for 4087 \
milliseconds before timing out.
[rank0]:[E1126 18:26:55.293614747 ProcessGroupNCCL.cpp:2303] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure \
detected by watchdog at work sequence id: 27 PG status: last enqueued work: 6, last completed work: 5
"""


def test_what_nccls_watchdogs_have_written_before_they_ended_the_process():
    """As torch 2.11 does; its `what()` names only one of the groups."""
    noon = time.mktime((2026, 11, 26, 18, 26, 55, 0, 0, -1))
    works = nccl_timeouts(WATCHDOGS, noon + 60)
    assert [each[:4] for each in works] == [["0", "all_reduce", 27, 1000], ["1", "_all_gather_base", 6, 10]]
    assert works[0][4:] == pytest.approx([noon + 0.294 - 4.087, noon + 0.294], abs=0.001)
    killed = {
        "rank": 0,
        "title": "trainer 0",
        "alive": False,
        "symptom": True,
        "how": "was killed by SIGABRT",
    }
    state = read_state({**killed, "timeouts": works})
    assert state.symptom
    assert state.waits_in is state.calls[0]
    assert state.entered("1") == 6


@pytest.mark.parametrize("hours", [0, 5.75, -11, 24 * 365], ids=lambda hours: f"{hours} h")
def test_a_job_with_a_time_zone_of_its_own_or_at_the_turn_of_the_year(hours):
    noon = time.mktime((2026, 11, 26, 18, 26, 55, 0, 0, -1)) + hours * 3600
    works = nccl_timeouts(WATCHDOGS, noon + 60)
    assert [each[5] for each in works] == pytest.approx([noon + 0.294, noon + 0.257], abs=0.001)


def test_a_log_of_one_line_takes_no_time():
    """As progress bars write it. One with nested repetitions ran for minutes."""
    line = (
        "[E1126 19:00:00.1 x] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1, OpType=A, NumelIn=4, ran for 3 "
    )
    assert nccl_timeouts(line * 2000, time.time()) == []
