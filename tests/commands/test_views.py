"""The status of a job and of its machines as tables."""

import pytest

from fleetrun.commands.views import (
    answer_time,
    heading_lines,
    last_lines,
    node_lines,
    process_lines,
    processes_up,
)
from tests.support.serving import status_of

# ---- How a job is shown.


def container(name="trainer.0", **more):
    role, _, index = name.partition(".")
    return {
        "name": name, "role": role, "rank": int(index), "index": int(index), "state": "running",
        "alive": True, "pid": 100,
        "attempt": 0, "started": 1000.0, "cpu": 99.7, "memory": 3 << 30, "gpu": None, "gpu_memory": None,
        "step": None, "loss": None, "rate": None, "activity": None, "exit": None, "last_line": "", **more,
    }  # fmt: skip


def shown(lines):
    return [line.plain for line in lines]


def rows(*containers, width=None):
    there = status_of("job", "abcdef", started=1000.0, elapsed=100.0, containers=list(containers))
    return shown(process_lines(there, width))


def test_the_job_as_a_whole():
    there = [container(), container("trainer.1", state="failed", alive=False, pid=None, exit=3)]
    first, second = shown(heading_lines(status_of("job", "abcdef", containers=there, restarts=2), None))
    assert first == "job (pod abcdef), collective, running, 1 of 2 processes up, 5s, restarts: 2 of 3"
    assert second == "logs in /logs, started in /here"
    first, *_ = shown(heading_lines(status_of("default", "abcdef", script="src/train.py"), None))
    assert first.startswith("default (train.py, pod abcdef), collective")


def test_a_process_that_is_asked_to_end_is_up_until_it_has_ended():
    there = [
        container(state="terminating"),
        container("trainer.1", state="completed", alive=False, pid=None, exit=0),
    ]
    assert "1 of 2 processes up" in heading_lines(status_of("job", "abcdef", containers=there), None)[0].plain
    unknown = {**there[0], "pid": None}  # it runs in a container of its own
    assert (
        "1 of 1 process up" in heading_lines(status_of("job", "abcdef", containers=[unknown]), None)[0].plain
    )


def test_no_process_is_older_than_its_job():
    status = status_of("job", "abcdef", started=900.0, elapsed=4.9)
    assert answer_time(status) == 904.9
    lines = shown(process_lines({**status, "containers": [container(started=900.1)]}, 80))
    assert next(line for line in lines if "trainer.0" in line).split()[3] == "4s"


def test_why_it_ends():
    lines = shown(heading_lines(status_of("job", "abcdef", state="ending", why="got SIGTERM"), None))
    assert "ending" in lines[0]
    assert lines[2] == "got SIGTERM"


def test_machines_that_meet_and_those_that_met():
    waiting = {"present": 3, "wanted": 4, "missing": ["10.0.0.7"]}
    lines = shown(heading_lines(status_of("job", "abcdef", state="meeting", waiting=waiting), None))
    assert lines[2] == "3 of 4 nodes, waiting for 10.0.0.7"
    waiting = {"present": 4, "wanted": 4, "missing": []}
    lines = shown(heading_lines(status_of("job", "abcdef", state="spare", waiting=waiting), None))
    assert lines[2] == "the job runs on 4 other nodes"
    nodes = [{"rank": 0, "title": "h1", "this": False}, {"rank": 1, "title": "h2", "this": True}]
    lines = shown(heading_lines(status_of("job", "abcdef", nodes=nodes), None))
    assert [line.split() for line in lines[2:]] == [
        ["NODE", "HOST", "STATE"],
        ["0", "h1"],
        ["1", "h2", "here"],
    ]


def test_a_process_and_what_it_uses():
    assert rows(container()) == [
        "NAME       PID  STATE       UP   CPU   MEM",
        "trainer.0  100  running  1m40s  100%  3.0G",
    ]


def test_what_it_reports():
    title, row = rows(container(step=12, loss=0.123456, rate=1024.44, gpu=50.0, gpu_memory=2 << 30))
    assert title.split()[-5:] == ["GPU", "GPUMEM", "STEP", "LOSS", "SAMPLES/S"]
    assert row.split()[-5:] == ["50%", "2.0G", "12", "0.1235", "1.02k"]


def test_how_late_its_rank_comes():
    there = [container(), container("trainer.1", rank=1), container("ps.0", role="ps")]
    status = status_of("job", "abcdef", containers=there, late=[{"rank": 0, "share": 0.338}])
    title, *told = shown(process_lines(status, None))
    assert title.split()[-1] == "LATE"
    assert [row.endswith("34%") for row in told] == [True, False, False]


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf", float("nan")])
def test_a_loss_that_is_no_number_is_told(loss):
    assert rows(container(loss=loss))[1].split()[-1] == str(loss)


@pytest.mark.parametrize(("exit", "said"), [(3, "exit 3"), (-9, "SIGKILL"), (-99, "signal 99")])
def test_one_that_failed_says_how(exit, said):
    row = rows(container(state="failed", alive=False, pid=None, exit=exit, cpu=None, memory=None))[1]
    assert row == f"trainer.0  {said}"


def test_a_rank_shows_where_the_name_does_not_say_it():
    assert "RANK" not in rows(container())[0]
    title, row = rows(container(rank=8))
    assert title.split()[:2] == ["NAME", "RANK"]
    assert row.split()[:2] == ["trainer.0", "8"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"last_line": "step 3"}, "step 3"),
        ({"last_line": "\x1b[31mred\x1b[0m\x1b[2J"}, "red"),
        (
            {"last_line": "x", "activity": {"what": "loading tables", "done": 3.0, "of": 10}},
            "loading tables: 3 of 10",
        ),
        ({"activity": {"what": "loading", "done": 3, "of": None}}, "loading: 3"),
        ({"activity": {"what": "waiting", "done": None, "of": None}}, "waiting"),
        ({"last_line": "x", "activity": {"what": None}}, "x"),
    ],
)
def test_its_last_words_or_what_it_does_beside_steps(more, said):
    there = status_of("job", "abcdef", containers=[container(**more)])
    assert shown(last_lines(there, None)) == [f"trainer.0  {said}"]
    assert rows(container(**more))[1].endswith(said)


def test_last_words_stand_below_where_the_table_has_no_room():
    said = "epoch 3 of 9, all is well so far"
    one = container(last_line=said, step=3, loss=0.5, rate=1.0)
    status = status_of("job", "abcdef", containers=[one])
    narrow, wide = (shown(process_lines(status, columns)) for columns in (80, 200))
    assert "LAST LINE" not in narrow[0]
    assert "LAST LINE" in wide[0]
    assert shown(last_lines(status, 80)) == [f"trainer.0  {said}"]


@pytest.mark.parametrize("garbage", [None, 7, "x", [1, "a", None], {"a": 1}, -1e308, float("nan"), True])
def test_an_answer_of_another_form_is_shown_as_far_as_it_goes(garbage):
    one = dict.fromkeys(container(), garbage)
    for containers in (garbage, [one], [garbage]):
        status = {**dict.fromkeys(status_of("job", "abcdef"), garbage), "containers": containers}
        assert heading_lines(status, 80)
        process_lines(status, 80)


@pytest.mark.parametrize("step", [10**400, -(10**400), float("nan"), float("inf"), True, "5", [5]])
def test_a_step_that_is_no_number_that_counts_is_not_shown(step):
    assert rows(container(step=step)) == rows(container())


# ---- How the machines of a job are shown.


def node(rank, **more):
    return {
        "rank": rank, "title": f"h{rank}", "this": False, "silent": None, "state": "running", "elapsed": 9.0,
        "up": 2, "states": {"running": 2}, **more,
    }  # fmt: skip


def job(*nodes, **more):
    return status_of("job", "abcdef", nodes=list(nodes), **more)


def shown_nodes(found):
    return [line.plain for line in found]


def test_a_job_on_one_machine_has_none():
    assert node_lines(job(), 80) == []
    assert node_lines(job(node(0, this=True)), 80) == []


def test_a_line_each():
    failed = node(1, up=1, states={"failed": 1, "running": 1}, state="ending", why="exit code 3")
    assert shown_nodes(
        node_lines(job(node(0, this=True), failed, node(2, silent="no answer", up=None, states=None)), 80)
    ) == [
        "NODE  HOST  STATE      PROCESSES  UP",
        "   0  h0    running    2 of 2 up  9s  here",
        "   1  h1    ending     1 of 2 up  9s  exit code 3",
        "   2  h2    no answer             9s",
    ]


def test_how_many_processes_run():
    assert processes_up(job(node(0), node(1, up=0, states={"failed": 3}))) == (2, 5)
    assert processes_up(job(node(0), node(1, up=0, states={"failed": 3}), only=1)) == (0, 3)
    assert processes_up(job(containers=[{"alive": True}, {"alive": False}])) == (1, 2)


def test_no_room_for_some_processes():
    there = node(1, containers=[{"name": "trainer.0", "rank": 2}], left_out=3)
    assert (
        shown_nodes(process_lines(job(node(0), there), 80))[-1]
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
    found = shown_nodes([*heading_lines(status, width), *process_lines(status, width)])
    assert all(line.isprintable() for line in found)
    assert width is None or max(map(len, found)) <= width
