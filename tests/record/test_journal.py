"""The journal on good and bad disks: whole lines, or none."""

import fcntl
import json
import math
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetrun.pod.logs import remove_earlier
from fleetrun.record.history import read
from fleetrun.record.journal import Journal, journal_path


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process can become longer, as on a disk that is full: writes are cut off, then fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(journal_path(tmp_path, "job", "abcdef"), wall=lambda: 1000.0004)
    yield made
    made.close()


def test_an_event_is_a_line_that_its_owner_alone_can_read(journal: Journal):
    journal.write("started", container="trainer.0", pid=7)
    journal.write("over", code=0)
    assert journal.path.name == "job.abcdef.events.jsonl"
    assert [json.loads(line) for line in lines(journal.path)] == [
        {"time": 1000.0, "event": "started", "container": "trainer.0", "pid": 7},
        {"time": 1000.0, "event": "over", "code": 0},
    ]
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600


def test_a_listener_gets_what_is_written_from_then_on(journal: Journal):
    journal.write("launch")
    heard: list[dict[str, object]] = []
    journal.listen(heard.append)
    journal.write("over", code=3)
    assert heard == [{"time": 1000.0, "event": "over", "code": 3}]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        ({"loss": [-math.inf, 1.5]}, {"loss": ["-inf", 1.5]}),
        ("训练", "训练"),
        ("a\nb\u2028c", "a\nb\u2028c"),
        ("\udc80", "\udc80"),
        (Path("/log"), "/log"),
        (None, None),
    ],
)
def test_every_line_is_json(journal: Journal, value: object, written: object):
    journal.write("progress", value=value)
    (line,) = lines(journal.path)
    assert json.loads(line, parse_constant=pytest.fail)["value"] == written


def test_a_line_that_was_torn_off_spoils_no_other(journal: Journal):
    journal.write("launch", text="x" * 100)
    with room_for(journal.path.stat().st_size + 30):
        journal.write("started", text="lost")
        journal.write("exited", text="lost too")
    journal.write("over", code=1)
    history = read(journal.path)
    assert [event["event"] for event in history.events] == ["launch", "lost", "over"]
    assert history.events[1]["events"] == 2
    assert history.damaged == 1


def test_what_is_lost_is_heard_all_the_same(journal: Journal):
    heard: list[dict[str, object]] = []
    journal.listen(heard.append)
    with room_for(0):
        journal.write("started")
    assert [event["event"] for event in heard] == ["started"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "no folder", "device"])
def test_what_is_no_file_of_its_own_is_not_written(tmp_path: Path, kind: str):
    path = journal_path(tmp_path, "job", "abcdef")
    elsewhere = tmp_path / "elsewhere"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "device":
        path = Path("/dev/null")
    else:
        path = tmp_path / "none" / path.name
    journal = Journal(path)
    journal.write("launch")
    journal.close()
    assert not elsewhere.exists()


def test_overwriting_takes_the_records_of_launches_that_are_gone(tmp_path: Path):
    gone, runs, another = (
        Journal(journal_path(tmp_path, job, pod))
        for job, pod in (("job", "aaaaaa"), ("job", "bbbbbb"), ("other", "cccccc"))
    )
    gone.close()
    another.close()
    (tmp_path / "job.aaaaaa.marks").touch()
    remove_earlier(tmp_path, "job")
    assert sorted(tmp_path.iterdir()) == [runs.path, another.path]
    runs.close()


def test_a_closed_journal_writes_nothing(journal: Journal):
    journal.write("launch")
    journal.close()
    journal.close()
    journal.write("over")
    assert len(lines(journal.path)) == 1


def test_it_holds_the_lock_as_soon_as_a_reader_lets_go(tmp_path: Path):
    path = journal_path(tmp_path, "job", "abcdef")
    path.touch()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        journal = Journal(path)
        journal.write("launch")
    journal.write("ready")
    assert read(path).running is True
    journal.close()
    assert read(path).running is False
