"""How the machines of a job are shown."""

import pytest

from fleetrun.commands.views import node_lines, process_lines, processes_up, screen_lines
from tests.support.serving import status_of


def node(rank, **more):
    return {
        "rank": rank, "title": f"h{rank}", "this": False, "silent": None, "state": "running", "elapsed": 9.0,
        "up": 2, "states": {"running": 2}, **more,
    }  # fmt: skip


def job(*nodes, **more):
    return status_of("job", "abcdef", nodes=list(nodes), **more)


def shown(found):
    return [line.plain for line in found]


def test_a_job_on_one_machine_has_none():
    assert node_lines(job(), 80) == []
    assert node_lines(job(node(0, this=True)), 80) == []


def test_a_line_each():
    failed = node(1, up=1, states={"failed": 1, "running": 1}, state="ending", why="exit code 3")
    assert shown(
        node_lines(job(node(0, this=True), failed, node(2, silent="no answer", up=None, states=None)), 80)
    ) == [
        "NODE  HOST  STATE      PROCESSES  UP",
        "   0  h0    running    2 of 2 up  9s  here",
        "   1  h1    ending     1 of 2 up  9s  exit code 3",
        "   2  h2    no answer             9s",
    ]


def test_of_very_many_those_in_trouble_come_first():
    there = [node(rank) for rank in range(1000)]
    there[500] = node(500, silent="no answer", state="", states=None)
    there[700] = node(700, state="ending")
    there[800] = node(800, up=0, states={"failed": 8})
    found = shown(node_lines(job(*there), 80, most=8))
    assert [line.split()[0] for line in found] == ["NODE", "500", "700", "800", "0", "1", "2", "..."]
    assert found[-1] == "... and 994 more nodes; --node N shows one of them"
    assert len(node_lines(job(*there), 80)) == 1001


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_some_are_shown_however_small_the_window_is(most):
    assert len(node_lines(job(*map(node, range(9))), 20, most)) <= max(3, most)


def test_how_many_processes_run():
    assert processes_up(job(node(0), node(1, up=0, states={"failed": 3}))) == (2, 5)
    assert processes_up(job(node(0), node(1, up=0, states={"failed": 3}), only=1)) == (0, 3)
    assert processes_up(job(containers=[{"alive": True}, {"alive": False}])) == (1, 2)


def test_no_room_for_some_processes():
    there = node(1, containers=[{"name": "trainer.0", "rank": 2}], left_out=3)
    assert (
        shown(process_lines(job(node(0), there), 80))[-1]
        == "3 more processes of node 1 did not fit in its answer"
    )


NONSENSE = [
    {},
    {"up": "x", "states": {"running": -1, "x": True, "y": 1 << 60, "z": "9"}},
    {"states": 7, "silent": ["x"], "state": {}, "rank": {}, "title": None},
    {
        "states": {},
        "elapsed": "inf",
        "step": "nan",
        "rate": True,
        "left_out": "x",
        "containers": [7, {}, None],
    },
    {"states": {"running": 1}, "title": "\x1b[2J\n" * 99, "why": "\r\x07" * 999, "started": 1e308},
]


@pytest.mark.parametrize("one", NONSENSE)
@pytest.mark.parametrize("width", [20, 80, None])
def test_nonsense_does_no_harm(one, width):
    status = job(one, node(1), {**one, "rank": 2})
    found = shown([*node_lines(status, width, 9), *process_lines(status, width)])
    assert all(line.isprintable() for line in found)
    assert width is None or max(map(len, found)) <= width
    assert len(screen_lines(status, width or 80, 24, 1000.0)) == 24


def test_processes_in_trouble_come_first_where_there_is_no_room_for_all():
    there = [{"name": f"trainer.{n}", "state": "running", "alive": True, "pid": n} for n in range(40)]
    there[33] |= {"state": "failed", "alive": False, "pid": None}
    found = shown(screen_lines(job(node(0), node(1, containers=there)), 80, 24, 1000.0))
    assert next(line for line in found if "trainer." in line).split()[:2] == ["1", "trainer.33"]


def test_a_screen_has_room_for_processes_too():
    there = [
        node(rank, containers=[{"name": f"trainer.{n}", "rank": 8 * rank + n, "index": n} for n in range(8)])
        for rank in range(16)
    ]
    found = shown(screen_lines(job(*there), 80, 24, 1000.0))
    assert len(found) == 24
    assert any(line.startswith("... and 10 more nodes") for line in found)
    assert sum("trainer." in line for line in found) >= 8
    assert any("a taller window shows them" in line for line in found)
