"""What `--role`, `--rank` and `--since` mean."""

import time
from pathlib import Path

import pytest

from fleetrun.commands.find import RemoteProcess, choose_processes, list_ranks, parse_since, remote_processes
from fleetrun.errors import UsageError
from fleetrun.record.history import History, Known

JOB = [
    Known(name=f"{role}.{index}", role=role, rank=rank, index=index, log=Path("x.log"))
    for role, index, rank in [
        ("pre_hook", 0, None),
        ("ps", 0, 0), ("ps", 1, 1),
        ("trainer", 0, 4), ("trainer", 1, 5), ("trainer", 2, 6), ("trainer", 3, 8),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("role", "rank", "names"),
    [
        (None, None, "pre_hook.0 ps.0 ps.1 trainer.0 trainer.1 trainer.2 trainer.3"),
        ("ps", None, "ps.0 ps.1"),
        ("server", None, "ps.0 ps.1"),
        ("Servers", None, "ps.0 ps.1"),
        ("worker", "4", "trainer.0"),
        (None, "4,6", "trainer.0 trainer.2"),
        (None, "5-8", "trainer.1 trainer.2 trainer.3"),
        ("ps,trainer", "0-4", "ps.0 ps.1 trainer.0"),
        ("pre_hook", None, "pre_hook.0"),
        (None, " 4 , 4", "trainer.0"),
    ],
)
def test_whom_they_choose(role, rank, names):
    assert [each.name for each in choose_processes(JOB, role, rank)] == names.split()


@pytest.mark.parametrize(
    ("role", "rank", "message"),
    [
        ("heter", None, "--role heter: this node has no such process"),
        (None, "9", "--rank 9: this node has no such process"),
        (None, "0", "--rank 0: this node has no such process"),
        ("boss", None, "--role boss: there is no such role"),
        (None, "x", "--rank x: not a list of ranks"),
        (None, "", "--rank : not a list of ranks"),
        (None, "3-1", "--rank 3-1: not a list of ranks"),
        (None, "-1", "--rank -1: not a list of ranks"),
        (None, "0-99999999999", "--rank"),
        (None, "٣", "--rank"),
    ],
)
def test_whom_there_is_not(role, rank, message):
    with pytest.raises(UsageError, match=message):
        choose_processes(JOB, role, rank)


def test_the_hint_names_whom_there_is():
    assert list_ranks(JOB) == "pre_hook, ps 0-1, trainer 4-6,8"
    with pytest.raises(UsageError, match="no processes"):
        choose_processes([], None, None)


AWAY = [
    RemoteProcess("node 0, h1 (10.0.0.1)", "ps", 2),
    *(RemoteProcess("node 0, h1 (10.0.0.1)", "trainer", rank) for rank in range(4)),
    RemoteProcess("node 2, h3 (10.0.0.3)", "trainer", 9),
]


@pytest.mark.parametrize(
    ("role", "rank", "hint"),
    [
        (
            None,
            "3",
            "On node 0, h1 (10.0.0.1): trainer 3\nRun there: fleetrun logs night --rank 3\nThis node has ",
        ),
        (None, "0-3", "On node 0, h1 (10.0.0.1): trainer 0-3\nRun there: fleetrun logs night --rank 0-3\n"),
        (
            "server",
            "2",
            "On node 0, h1 (10.0.0.1): ps 2\nRun there: fleetrun logs night --role server --rank 2",
        ),
        (
            None,
            "3,9",
            "On node 0, h1 (10.0.0.1): trainer 3\nOn node 2, h3 (10.0.0.3): trainer 9\nRun there: ",
        ),
        (None, "99", "This node has pre_hook, ps 0-1, trainer 4-6,8."),
    ],
)
def test_who_is_on_another_machine(role, rank, hint):
    with pytest.raises(UsageError, match="no such process") as error:
        choose_processes(JOB, role, rank, lambda: AWAY, "fleetrun logs night")
    assert error.value.hint.startswith(hint)


def test_of_many_machines_a_few_are_named():
    many = [RemoteProcess(f"node {number}, h{number}", "trainer", number) for number in range(100, 120)]
    with pytest.raises(UsageError) as error:
        choose_processes(JOB, None, "100-200", lambda: many, "fleetrun logs")
    lines = error.value.hint.splitlines()
    assert (len(lines), lines[8]) == (11, "and on 12 more")


def history(*events):
    return History(path=Path("x"), job="night", pod="abcdef", events=events, damaged=0, owner=0, running=None)


def met(rank, processes, nodes=("h1", "h2")):
    return {"time": 1.0, "event": "node", "rank": rank, "nodes": list(nodes), "processes": processes}


def test_the_record_knows_where_others_are():
    first = met(0, [{"trainer": "0-1"}, {"trainer": "2-3"}])
    again = met(1, [{"trainer": "0", "ps": "0"}, {"trainer": "1"}])
    gone = {"time": 3.0, "event": "node", "text": "h1 is gone"}
    assert remote_processes(history(first, again, gone)) == [
        RemoteProcess("node 0, h1", "trainer", 0),
        RemoteProcess("node 0, h1", "ps", 0),
    ]
    assert remote_processes(history(first)) == [
        RemoteProcess("node 1, h2", "trainer", 2),
        RemoteProcess("node 1, h2", "trainer", 3),
    ]
    assert remote_processes(history()) == []


@pytest.mark.parametrize(
    "event",
    [
        met(0, None), met(0, 7), met(0, [1, 2]), met(0, [{}, {"trainer": None}]), met(0, [{}, {"x": "9-1"}]),
        met(0, [{}]), {"time": 1.0, "event": "node"},
    ],
)  # fmt: skip
def test_a_record_that_says_nonsense_of_it(event):
    assert remote_processes(history(event)) == []


NOW = time.mktime((2026, 11, 22, 7, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("30s", 30),
        ("90", 90),
        ("10m", 600),
        ("1.5h", 5400),
        ("2d", 172800),
        ("10m ago", 600),
        ("07:15", 900),
        ("07:29:30", 30),
        ("08:00", 86400 - 1800),
        ("2026-11-22 07:00", 1800),
        ("2026-11-22T07:29:59", 1),
        ("2026-11-22", 27000),
    ],
)
def test_since_when(text, ago):
    assert parse_since(text, NOW) == pytest.approx(NOW - ago)


@pytest.mark.parametrize("text", ["", "x", "-5m", "10 parsecs", "25:00", "2026-13-01", "nan", "1e9", "٣m"])
def test_what_is_no_moment(text):
    with pytest.raises(UsageError, match="--since"):
        parse_since(text, NOW)
