"""The processes of a job as the live view lists them: what it remembers, their order, filters, cells."""

from typing import ClassVar

import pytest

from fleetrun.commands.live_job import RemoteWatch, end_of
from fleetrun.commands.live_rows import (
    COLUMNS,
    ORDERS,
    Processes,
    Series,
    cells,
    format_seconds,
    progress_text,
    slowest_step,
    wanted,
)
from tests.support.serving import status_of


def container(rank, role="trainer", **more):
    return {
        "name": f"{role}.{rank}", "role": role, "rank": rank, "index": rank, "state": "running",
        "alive": True, "pid": 100 + rank, "started": 1000.0, "step": None, "loss": None, "rate": None,
        "step_seconds": None, "last_line": "", **more,
    }  # fmt: skip


def listed(*containers, now=0.0, **more):
    found = Processes()
    found.take(status_of("job", "abcdef", containers=list(containers), **more), now)
    return found


def node(rank, *containers, **more):
    return {
        "rank": rank, "title": f"h{rank}", "this": rank == 0, "silent": None, "started": 1000.0,
        "elapsed": 9.0, "states": {"running": 1}, "containers": list(containers), **more,
    }  # fmt: skip


# ---- sparklines


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([(0, 8.0)], "█"),
        ([(0, 1.0), (10, 8.0)], "▁█"),
        ([(0, 2.0), (5, 6.0)], "▄"),  # the mean of a span
        ([(0, 8.0), (30, 8.0)], "█  █"),  # a gap stays one
        ([(0, 8.0), (10, 8.0), (20, 8.0), (30, 8.0), (40, 1.0)], "███▁"),  # the last four
        ([(0, 8.0), (1000, 8.0)], "   █"),
        ([(0, None), (10, 0.0)], "▁"),
    ],
)
def test_a_bar_for_each_span(values, bars):
    series = Series(4, 10.0)
    for now, value in values:
        series.add(value, now)
    assert series.bars(8.0) == bars


def test_all_lines_have_one_scale():
    found = listed(container(0, step_seconds=0.1), container(1, step_seconds=0.8))
    slowest = slowest_step(found.all)
    spark = [cells(each, slowest)[6][0] for each in found.all]
    assert spark == ["▁", "█"]


def test_a_node_that_does_not_answer_keeps_its_processes_and_one_that_left_does_not():
    found = Processes()
    found.take(status_of("job", "abcdef", nodes=[node(0, container(0)), node(1, container(1))]), 0.0)
    silent = {"rank": 1, "title": "h1", "silent": "no answer within 2 s"}
    found.take(status_of("job", "abcdef", nodes=[node(0, container(0, step=7)), silent]), 1.0)
    assert [(each.node, each.host, each.rank) for each in found.all] == [("0", "h0", 0), ("1", "h1", 1)]
    assert found.all[0].fields["step"] == 7
    found.take(status_of("job", "abcdef", nodes=[node(0, container(0)), node(1)]), 2.0)
    assert [each.rank for each in found.all] == [0]


# ---- order and filter

SOME = (
    container(0, "ps", memory=5),
    container(0, step=9, step_seconds=0.1, late=0.0, cpu=50.0),
    container(1, step=7, step_seconds=0.3, late=0.5, cpu=99.0, state="failed", alive=False, exit=3),
    container(2, step=8, step_seconds=0.2, late=None, cpu=1.0, last_line="Epoch 3 of 9"),
)


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("rank", ["trainer 0", "trainer 1", "trainer 2", "server 0"]),
        ("node", ["trainer 0", "trainer 1", "trainer 2", "server 0"]),
        ("state", ["trainer 1", "trainer 0", "trainer 2", "server 0"]),
        ("step", ["trainer 1", "trainer 2", "trainer 0", "server 0"]),
        ("step time", ["trainer 1", "trainer 2", "trainer 0", "server 0"]),
        ("lateness", ["trainer 1", "trainer 0", "trainer 2", "server 0"]),
        ("cpu", ["trainer 1", "trainer 0", "trainer 2", "server 0"]),
        ("memory", ["server 0", "trainer 0", "trainer 1", "trainer 2"]),
    ],
)
def test_what_matters_comes_first(order, names):
    found = Processes()
    found.take(status_of("job", "abcdef", containers=list(SOME)), 0.0)
    there = [each for each in found.all if each.title in names]
    for each in there:  # the lateness comes from the status of the job
        each.fields["late"] = next(one.get("late") for one in SOME if one["name"] == each.fields["name"])
    assert [each.title for each in sorted(there, key=ORDERS[order])] == names


def test_zero_is_known():
    found = Processes()
    idle = [{**one, "cpu": 0 if one["role"] == "ps" else None} for one in SOME]
    found.take(status_of("job", "abcdef", containers=idle), 0.0)
    first, *_ = sorted(found.all, key=ORDERS["cpu"])
    assert first.fields["cpu"] == 0


@pytest.mark.parametrize(
    ("text", "titles"),
    [
        ("", ["trainer 0", "trainer 1", "trainer 2", "server 0"]),
        ("2", ["trainer 2"]),
        ("1-2", ["trainer 1", "trainer 2"]),
        ("1-", ["trainer 1", "trainer 2"]),
        ("rank=0", ["trainer 0", "server 0"]),
        ("role=ps", ["server 0"]),
        ("server", ["server 0"]),
        ("state=fail", ["trainer 1"]),
        ("epoch 2", ["trainer 2"]),
        ("EPOCH", ["trainer 2"]),
        ("epoch 0", []),
        ("node=", ["trainer 0", "trainer 1", "trainer 2", "server 0"]),
        ("node=0", []),
        ("rank=x [(", []),
    ],
)
def test_words_that_must_all_fit(text, titles):
    assert [each.title for each in filter(wanted(text), listed(*SOME).all)] == titles


def test_nodes_are_chosen_by_number():
    found = Processes()
    found.take(status_of("job", "abcdef", nodes=[node(n, container(n)) for n in range(12)]), 0.0)
    for text, ranks in (("node=1", [1]), ("node=9-11", [9, 10, 11]), ("h11", [11])):
        assert [each.rank for each in filter(wanted(text), found.all)] == ranks


# ---- what is shown


def test_the_progress_of_the_job_is_that_of_the_first_trainer():
    found = listed(
        container(0, step=1234, of=5000, left=192.0, loss=0.0231, rate=100.0), container(1, step=9, rate=20.0)
    )
    text = "step 1,234 of 5,000 (25 %), 3m12s left, loss 0.0231, 120 samples/s"
    assert progress_text(found.all) == text
    assert progress_text(listed(container(0, step=9, step_seconds=0.1)).all) == "step 9, 10 steps/s"
    assert progress_text(listed(container(0), container(0, "ps", step=3)).all) == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.34, "12.3 s"), (0.0312, "31.2 ms"), (0.00021, "210 us"), (0.9999, "1 s"), (0.0, "0 us")],
)
def test_the_time_of_a_step(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("garbage", [None, 7, "x", [1, "a", None], {"a": 1}, -1e308, float("nan"), True])
def test_an_answer_of_another_form_is_shown_as_far_as_it_goes(garbage):
    one = dict.fromkeys(container(0), garbage)
    found = listed(one, {**container(1), "rank": garbage, "name": garbage})
    for each in found.all:
        assert len(cells(each, 1.0)) == len(COLUMNS)
        wanted("7 x node=3")(each)
    for order in ORDERS.values():
        sorted(found.all, key=order)
    progress_text(found.all)


class Refusing:
    """Nodes of a job that answer too many requests already."""

    ranks = (0,)
    trouble: ClassVar = {0: "it answers 8 other requests"}
    open = False

    def ask(self, *_: object) -> None:
        pass

    def arrived(self, within: float) -> list[tuple[int, bytes]]:
        return []


def test_a_job_that_does_not_answer_has_not_ended():
    watch = RemoteWatch(Refusing(), "resnet", 1.0)
    assert watch.look() is None
    sentence, _ = end_of(watch.job, {"state": "running"})
    assert sentence == "lost the connection to resnet, which may still run: it answers 8 other requests"
