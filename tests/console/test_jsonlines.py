"""The display for programs: every line is a JSON object."""

import json
import os

import pytest

from fleetrun.console.console import Sink
from fleetrun.console.jsonlines import JsonConsole
from fleetrun.record.journal import encoded


class Told:
    def __init__(self, path, level):
        self._file = path.open("w+b", buffering=0)
        self.sink = Sink(self._file.fileno())
        self.console = JsonConsole(self.sink, self.sink, level)
        self._path = path

    @property
    def events(self):
        return [json.loads(line) for line in self._path.read_bytes().splitlines()]

    def close(self):
        self._file.close()


@pytest.fixture
def told(tmp_path):
    made = []

    def make(level="INFO"):
        made.append(Told(tmp_path / "out", level))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_what_fleetrun_says(told):
    made = told()
    made.console.debug("no")
    made.console.info("one\ntwo")
    made.console.warning("three")
    assert [(each["event"], each["level"], each["text"]) for each in made.events] == [
        ("message", "INFO", "one\ntwo"),
        ("message", "WARNING", "three"),
    ]
    assert all(isinstance(each["time"], float) for each in made.events)


def test_nothing_that_is_said_does_anything_to_a_terminal(told, tmp_path):
    made = told()
    made.console.listener(encoded({"time": 1.0, "event": "exited", "error": "\x9b31m"}))
    assert made.events[0]["error"] == "\x9b31m"
    assert "\x9b" not in (tmp_path / "out").read_text()


def test_a_report_is_one_message(told):
    made = told("ERROR")
    made.console.block(["no"])
    made.console.block(["=====", "First failure: x"], level="ERROR")
    (event,) = made.events
    assert (event["level"], event["text"]) == ("ERROR", "=====\nFirst failure: x")


def test_lines_of_containers(told):
    made = told()
    emit, states = made.console.follower("trainer.1", 9, 0, alone=True)
    assert not states, "whole lines only"
    emit(b"one\n\n\xe4\xb8\x80 \xff \x1b[31mred\n")
    assert [(each["event"], each["container"], each["line"]) for each in made.events] == [
        ("log", "trainer.1", "one"),
        ("log", "trainer.1", ""),
        ("log", "trainer.1", "一 \\xff \x1b[31mred"),
    ]


@pytest.mark.parametrize(
    ("line", "shown"), [(b"10%\r20%\n", "20%"), (b"10%\r20%\r\n", "20%"), (b"dos\r\n", "dos")]
)
def test_of_a_progress_bar_the_last_state(told, line, shown):
    made = told()
    made.console.follower("trainer.0", 9, 0, alone=True)[0](line)
    assert made.events[0]["line"] == shown


def test_events_of_the_record_as_they_are(told):
    made = told()
    made.console.listener(b'{"event": "progress"}')
    made.console.info("\udcff")
    assert [event["event"] for event in made.events] == ["progress", "message"]


def test_reports_do_not_pile_up_where_nobody_reads():
    """All else does, for it is little."""
    read, write = os.pipe()
    console = JsonConsole(sink := Sink(write), sink, "INFO")
    long = "x" * 8000
    for number in range(1000):
        console.listener(encoded({"time": 1.0, "event": "progress", "values": long}))
        console.listener(encoded({"time": 1.0, "event": "node", "text": str(number)}))
    assert not sink.room
    waiting = bytes(sink._waiting)
    assert len(waiting) < 1.2 * (1 << 20)
    assert b'"999"' in waiting
    os.close(write)
    os.close(read)


def test_other_displays_want_no_events(said):
    assert said().console.listener is None
