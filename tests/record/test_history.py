"""Records as they are found: whole, torn, foreign, hostile."""

import json
import os
from pathlib import Path

import pytest

from fleetrun.record.history import (
    LONGEST_LINE,
    Known,
    UnreadableError,
    events_of,
    has_end,
    is_running,
    names,
    number,
    parsed,
    read,
)
from fleetrun.record.history import records as found_in
from fleetrun.record.journal import Journal, journal_path

CONTAINER = {
    "name": "trainer.0",
    "role": "trainer",
    "rank": 4,
    "index": 0,
    "log": "/far/away/j.p.trainer.0.log",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return journal_path(tmp_path, "night.run", "abcdef")


def line(event: str, time: object = 1.0, **fields: object) -> bytes:
    return json.dumps({"time": time, "event": event, **fields}).encode() + b"\n"


def test_what_a_journal_wrote_comes_back(path: Path):
    journal = Journal(path, wall=iter([10.0, 11.0, 20.0]).__next__)
    journal.write("launch", job="night.run", containers=[CONTAINER])
    journal.write("started", container="trainer.0", pid=7)
    running = read(path)
    assert (running.running, running.over, running.ended) == (True, None, None)
    journal.write("over", code=3, reason="why")
    journal.close()
    history = read(path)
    assert (history.job, history.pod, history.owner) == ("night.run", "abcdef", os.getuid())
    assert (history.began, history.ended, history.running, history.damaged) == (10.0, 20.0, False, 0)
    assert history.launch["job"] == "night.run"
    assert history.over is not None
    assert history.over["code"] == 3
    assert [event["event"] for event in history.all("over", "started")] == ["started", "over"]
    assert history.last("started") == history.events[1]
    assert history.last("hung") is None


def test_logs_are_beside_the_record_wherever_it_was_moved_to(path: Path):
    path.write_bytes(line("launch", containers=[CONTAINER]))
    assert read(path).containers == (
        Known(name="trainer.0", role="trainer", rank=4, index=0, log=path.parent / "j.p.trainer.0.log"),
    )


def test_the_newest_pod_counts(path: Path):
    newer = {**CONTAINER, "rank": 1}
    path.write_bytes(line("launch", containers=[CONTAINER]) + line("ready", containers=[newer]))
    assert [each.rank for each in read(path).containers] == [1]


@pytest.mark.parametrize(
    "containers",
    [
        None,
        7,
        {},
        [None],
        [7],
        [{}],
        [{**CONTAINER, "name": 7}],
        [{**CONTAINER, "log": ""}],
        [{**CONTAINER, "log": "/"}],
    ],
)
def test_containers_that_are_none_are_left_out(path: Path, containers: object):
    path.write_bytes(line("launch", containers=containers))
    assert read(path).containers == ()


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe garbage\n",
        b'{"time": 1.0, "event": "half',
        b"[]\n",
        b"null\n",
        b'{"event": "no time"}\n',
        b'{"time": "early", "event": "x"}\n',
        b'{"time": 1e400, "event": "x"}\n',
        b'{"time": 1, "event": 7}\n',
        b'{"time": true, "event": "x"}\n',
        b"\0\0\0\0\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_line_is_counted_and_passed_over(path: Path, damage: bytes):
    end = b"" if damage.endswith(b"\n") else b"\n"
    path.write_bytes(line("launch") + damage + end + line("over", code=0))
    history = read(path)
    assert [event["event"] for event in history.events] == ["launch", "over"]
    assert history.damaged == 1


def test_a_line_on_its_way_is_not_there_yet(path: Path):
    path.write_bytes(line("launch") + line("over", code=0)[:-5])
    assert [event["event"] for event in read(path).events] == ["launch"]


def test_a_line_without_end_costs_no_more_than_its_length(path: Path):
    path.write_bytes(line("launch") + b"x" * (LONGEST_LINE + 10) + b"\n" + line("over"))
    history = read(path)
    assert [event["event"] for event in history.events] == ["launch", "over"]
    assert history.damaged == 2


def test_an_empty_record_says_nothing(path: Path):
    path.touch()
    history = read(path)
    assert (history.launch, history.over, history.began, history.ended, history.containers) == (
        {},
        None,
        None,
        None,
        (),
    )


def test_some_events_can_be_left_out(path: Path):
    path.write_bytes(line("launch") + line("progress") * 3)
    assert [event["event"] for event in read(path).events] == ["launch"]


@pytest.mark.parametrize("kind", ["missing", "fifo", "folder"])
def test_what_is_no_record_is_refused_at_once(path: Path, kind: str):
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(UnreadableError, match="abcdef"):
        read(path)
    assert not is_running(path)


def test_where_no_lock_tells_the_end_of_the_record_does(path: Path):
    path.write_bytes(line("launch"))
    with path.open("r+b") as file:
        assert not has_end(file)
        file.truncate(1 << 40)  # nobody could read all of this
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line("exited", how='"event": "over"'))
        assert not has_end(file)
        file.write(line("over", code=1, report=["x" * 100_000]))
        assert has_end(file)
        file.write(line("lost", events=3))
        assert has_end(file)


def test_all_events_one_after_the_other(path: Path):
    path.write_bytes(line("launch") + b"torn\n" + line("progress", time=2.0) * 2)
    assert [event["event"] for event in events_of(path)] == ["launch", "progress", "progress"]


def test_two_readers_do_not_take_each_other_for_the_launcher(path: Path):
    path.write_bytes(line("launch"))
    import fcntl

    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert read(path).running is False


def test_records_are_found_the_newest_first(tmp_path: Path):
    for age, pod in enumerate(("aaaaaa", "bbbbbb", "cccccc")):
        path = journal_path(tmp_path, "job", pod)
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    os.mkfifo(journal_path(tmp_path, "job", "dddddd"))
    (tmp_path / "job.abcdef.trainer.0.log").touch()
    assert [names(path) for path in found_in(tmp_path)] == [
        ("job", each) for each in ("aaaaaa", "bbbbbb", "cccccc")
    ]
    assert found_in(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("job.abcdef.events.jsonl", ("job", "abcdef")),
        ("a.b.c.abcdef.events.jsonl", ("a.b.c", "abcdef")),
        ("job.ABCDEF.events.jsonl", None),
        ("abcdef.events.jsonl", None),
        ("job.abcdef.events.jsonl.gz", None),
        ("job.abcdef.trainer.0.log", None),
    ],
)
def test_a_name_says_job_and_pod(name: str, known: object):
    assert names(Path("/log") / name) == known


@pytest.mark.parametrize(
    ("value", "read_as"),
    [(1, 1.0), (2.5, 2.5), ("inf", float("inf")), ("7", None), (True, None), (None, None), (10**400, None)],
)
def test_numbers(value: object, read_as: object):
    assert number(value) == read_as


def test_nan_is_a_number_here():
    assert number("nan") != number("nan")


def test_a_line_may_say_more_than_is_known():
    assert parsed(b'{"time": 1, "event": "from the future", "x": [{}]}') == {
        "time": 1, "event": "from the future", "x": [{}],
    }  # fmt: skip
