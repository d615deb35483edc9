"""What machines say to each other of how a job stands."""

import json
import random
import zlib

import pytest

from fleetrun.commands.views import processes
from fleetrun.control.node_status import pack, summary, unfolded, unpack, with_answers
from tests.support.serving import status_of


def container(number, **more):
    return {
        "name": f"trainer.{number}", "role": "trainer", "rank": number, "index": number, "state": "running",
        "alive": True, "pid": 1000 + number, "attempt": 0, "started": 1000.5, "ended": None,
        "exit": None, "log": "/logs/0",
        "gpus": "", "step": None, "of": None, "left": None, "samples": None, "loss": None, "rate": None,
        "step_seconds": None, "activity": None, **more,
    }  # fmt: skip


def of(*containers, **more):
    return status_of("job", "abcdef", containers=list(containers), **more)


def test_in_a_few_words():
    there = [
        container(0, step=12, rate=5.0),
        container(1, step=7),
        container(2, state="failed", alive=False, pid=None, rate=1.5),
    ]
    said = summary(of(*there, why="x" * 9999))
    assert (said["up"], said["states"]) == (2, {"running": 2, "failed": 1})
    assert (said["step"], said["rate"]) == (7, 6.5)
    assert (said["pod"], said["state"], len(said["why"])) == ("abcdef", "running", 400)
    assert (summary(of())["step"], summary(of())["rate"]) == (None, None)


def test_what_was_said_is_understood():
    activity = {"what": "loading", "done": 1.0, "of": None}
    there = [container(0, loss=float("nan"), activity=activity), container(1, exit=-9, alive=False, pid=None)]
    said = unpack(pack(of(*there), False, 32 << 10))
    assert said is not None
    assert [each["pid"] for each in said["containers"]] == [1000, None]
    assert (said["containers"][0]["loss"], said["containers"][0]["activity"]) == ("nan", activity)
    assert "log" not in said["containers"][0], "its machine has it"
    assert (said["elapsed"], said["left_out"]) == (5.0, 0)


def test_how_late_ranks_are_goes_along_where_there_is_room():
    late = [
        {"rank": rank, "node": "h1", "share": 0.5, "seconds": 1.0, "behind": 9, "of": 9} for rank in range(64)
    ]
    said = unpack(pack(of(container(0), late=late), False, 32 << 10))
    assert said is not None
    assert said["late"] == [{"rank": rank, "share": 0.5} for rank in range(64)]
    said = unpack(pack(of(container(0), late=late), False, 400))
    assert said is not None
    assert (said["late"], len(said["containers"])) == ([], 1)
    said = unpack(pack(of(container(0), late=late), True, 512))
    assert said is not None
    assert "late" not in said


def test_one_node_knows_how_late_the_ranks_of_all_are():
    knows = {"rank": 0, "states": {}, "late": [{"rank": 1, "share": 0.5}]}
    other = {"rank": 1, "states": {}, "containers": [container(1), container(2)]}
    found = processes(of(nodes=[knows, other]))
    assert [said["late"] for _, _, said in found] == [0.5, None]


def test_tables_of_servers_are_the_first_to_be_left_out():
    numbers = {"rows": 3, "bytes": 4.5, "pulls_s": "many"}
    server = container(1, role="ps", server={"step": 7}, tables={"user": numbers, "odd": [1]})
    said = unpack(pack(of(container(0), server), False, 32 << 10))
    assert said is not None
    trainer, there = said["containers"]
    assert "tables" not in trainer
    assert (there["server"], there["tables"]) == ({"step": 7}, {"user": {"rows": 3, "bytes": 4.5}})
    dice = random.Random(7)
    hot = {f"t{number}": {str(dice.random()): dice.random()} for number in range(1000)}
    few = {"t": {"rows": 1}}
    said = unpack(pack(of(container(0), container(1, role="ps", tables=few, hot=hot)), False, 8 << 10))
    assert said is not None
    assert (said["containers"][1]["tables"], "hot" in said["containers"][1]) == (few, False)
    many = {f"t{number}": {"rows": dice.random()} for number in range(2000)}
    said = unpack(pack(of(container(0), container(1, role="ps", tables=many)), False, 8 << 10))
    assert said is not None
    assert (len(said["containers"]), said["left_out"]) == (2, 0)
    assert "tables" not in said["containers"][1]


def test_briefly_it_is_a_few_bytes_whatever_runs_there():
    data = pack(of(*map(container, range(5000))), True, 512)
    said = unpack(data)
    assert said is not None
    assert (said["states"], "containers" in said) == ({"running": 5000}, False)


@pytest.mark.parametrize("most", [700, 2048, 32 << 10])
def test_there_is_never_more_than_fits(most):
    dice = random.Random(7)
    there = [container(number, loss=dice.random(), rate=dice.random()) for number in range(3000)]
    data = pack(of(*there), False, most)
    said = unpack(data)
    assert len(data) <= most
    assert said is not None
    assert said["states"] == {"running": 3000}
    assert len(said["containers"]) + said["left_out"] == 3000
    assert said["containers"] == [each for each in said["containers"] if each["pid"] < 1000 + 3000]
    assert said["left_out"] > 0
    assert most < 1000 or said["containers"]


def test_without_room_nothing_is_said():
    assert pack(of(container(0)), False, 10) == b""
    assert unpack(b"") is None


DEEP = zlib.compress(b"[" * 100_000)
BOMB = zlib.compress(b'{"states": {}, "state": "' + b"x" * (64 << 20) + b'"}')


@pytest.mark.parametrize("said", [b"", b"{}", b"\xff" * 99, DEEP, BOMB, BOMB[:100], zlib.compress(b"[1, 2]"),
                                  zlib.compress(b"{}"), zlib.compress(b'{"states": 3}')])  # fmt: skip
def test_what_no_machine_says(said):
    assert unpack(said) is None


def test_of_what_has_another_form_nothing_is_kept():
    deep = {"a": [{}] * 3}
    said = {
        "states": {"running": deep, "failed": 1}, "pod": deep, "state": [1], "rank": 7, "this": True, "x": 1,
        "containers": [7, None, {"pid": deep, "rank": 3, "activity": [1]}, {"activity": {"what": deep}}],
        "left_out": deep,
    }  # fmt: skip
    assert unpack(zlib.compress(json.dumps(said).encode())) == {
        "states": {"failed": 1},
        "containers": [{"rank": 3, "activity": None}, {"activity": {}}],
    }


def nodes(count, here):
    return [{"rank": rank, "title": f"h{rank}", "this": rank == here} for rank in range(count)]


def test_who_asks_sees_each_machine():
    status = of(container(0), nodes=nodes(4, 1))
    other = pack({**of(container(4)), "pod": "ghijkl"}, False, 9999)
    answer = json.loads(json.dumps(with_answers(status, {0: other, 2: None, 3: b"garbage"}, 2.0)))
    first, here, silent, strange = unfolded(answer)["nodes"]
    assert (first["title"], first["pod"], first["silent"]) == ("h0", "ghijkl", None)
    assert [each["pid"] for each in first["containers"]] == [1004]
    assert (here["pod"], here["states"], here["containers"]) == (
        "abcdef",
        {"running": 1},
        status["containers"],
    )
    assert silent == {"rank": 2, "title": "h2", "this": False, "silent": "no answer within 2 s"}
    assert strange["silent"] == "this fleetrun does not understand its answer"


def test_who_was_not_asked_says_nothing():
    assert unfolded(with_answers(of(nodes=nodes(2, 0)), {}, 2.0))["nodes"][1]["silent"] is None
    assert unfolded(of())["nodes"] == []


@pytest.mark.parametrize("packed", [7, "", "%%%", "x", "AAAA", "é"])
def test_a_launcher_that_speaks_nonsense(packed):
    (node,) = unfolded({"nodes": [{"rank": 0, "packed": packed}, 7, None]})["nodes"]
    assert "packed" not in node
    assert unfolded({"nodes": 7})["nodes"] == []
    (here,) = unfolded({"nodes": [{"rank": 0, "this": True}]})["nodes"]
    assert here["silent"] is None
