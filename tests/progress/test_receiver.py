"""The launcher's socket for reports: who may speak, what becomes of it, and what stands in its way."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.progress_report import Report
from fleetrun.pod.events import Hang
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import GiveUp
from fleetrun.pod.spec import PodSpec
from fleetrun.progress.receiver import ProgressReceiver
from tests.support.pods import spec_of


def pod_of(folder: Path, *ranks: int, name: str = "p") -> PodSpec:
    """Trainers of these ranks, as the containers trainer.0, trainer.1, ..."""
    containers = [spec_of(folder, "true", Role.SERVER, 0)]
    for index, rank in enumerate(ranks):
        made = spec_of(folder, "true", rank=rank)
        containers.append(type(made)(role=made.role, rank=rank, index=index, argv=(), env={}, log=made.log))
    return PodSpec(name=name, job_id="job", mode=Mode.PS, containers=tuple(containers), log_dir=folder)


class Clock:
    """Stands still, unless it is put forward."""

    def __init__(self) -> None:
        self._now = 1000.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class Room:
    """A receiver with its loop, its record, and somebody who speaks to it."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.path = path
        self.record: list[dict[str, Any]] = []
        self.heard: list[tuple[str, Report]] = []
        self.receiver = ProgressReceiver(self.loop, path, self._write)
        self.receiver.subscribe(lambda name, report: self.heard.append((name, report)))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def _write(self, event: str, **fields: Any) -> None:
        self.record.append({"event": event, **fields})

    def say(self, mark: str = "p.trainer.4", **fields: Any) -> None:
        self.send(json.dumps({"mark": mark, **fields}).encode())

    def send(self, datagram: bytes) -> None:
        self.socket.sendto(datagram, str(self.path))

    def flood(self) -> int:
        """As many reports as can wait; how many those are."""
        self.socket.setblocking(False)
        said = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.say(step=said)
                said += 1
        return said

    def turn(self) -> None:
        """One turn of the loop."""
        self.loop.after(0.0, self.loop.stop)
        self.loop.run()

    def close(self) -> None:
        self.receiver.close()
        self.socket.close()
        self.loop.close()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path / "run" / "p.progress")
    assert made.receiver.open() is None
    made.receiver.pod(pod_of(tmp_path, 4, 5))
    yield made
    made.close()


def test_reports_arrive_under_the_names_of_this_machine(room):
    room.say(step=3, loss=0.5)
    room.say("p.trainer.5", step=4)
    room.say("p.ps.0", activity={"what": "loading tables"})
    room.turn()
    assert [(name, report.step) for name, report in room.heard] == [
        ("trainer.0", 3), ("trainer.1", 4), ("ps.0", None)
    ]  # fmt: skip
    latest = room.receiver.latest("trainer.0")
    assert latest is not None
    assert (latest.rank, latest.loss) == (4, 0.5)
    assert room.receiver.latest("trainer.7") is None


def test_a_checkpoint_is_remembered_until_the_process_is_another(room):
    room.say(step=3, saved=True)
    room.say(step=4)
    room.turn()
    assert [room.receiver.has_saved(name) for name in ("trainer.0", "trainer.1")] == [True, False]
    room.receiver.started("trainer.0")
    assert not room.receiver.has_saved("trainer.0")


@pytest.mark.parametrize("mark", ["p.trainer.0", "q.trainer.4", "p.heter.4", "p.trainer.99"])
def test_who_is_not_of_this_pod_is_not_heard(room, mark):
    room.say(mark, step=3)
    room.turn()
    assert room.heard == room.record == []


def test_garbage_does_not_stop_what_comes_after_it(room):
    for datagram in (b"", b"\xff" * 100, b"[" * 8000, b"x" * 60_000):
        room.send(datagram)
    room.say(step=1)
    room.turn()
    assert len(room.heard) == 1


def test_a_flood_lets_others_have_their_turn(room, tmp_path):
    said = room.flood()
    room.turn()
    assert len(room.heard) == min(said, 64)
    room.receiver.ended("trainer.0")
    assert len(room.heard) == said, "at the end of a process all of its words are read"


def test_the_pace_comes_from_samples(room):
    room.say(samples=100)
    room.turn()
    assert room.receiver.speeds("trainer.0")[0] is None
    room.clock.advance(5.0)
    room.say(samples=200)
    room.turn()
    assert room.receiver.speeds("trainer.0")[0] == pytest.approx(20)
    room.clock.advance(60.0)
    assert room.receiver.speeds("trainer.0")[0] is None
    assert room.receiver.speeds("trainer.1")[0] is None


def test_the_record_has_the_first_and_the_last(room):
    for step in range(1, 6):
        room.say(step=step, loss=float("nan"), values={"lr": 0.1})
        room.turn()
    assert [event["step"] for event in room.record] == [1]
    room.receiver.ended("trainer.0")
    assert room.record[-1] == {
        "event": "progress", "container": "trainer.0", "rank": 4, "step": 5, "samples": None,
        "loss": "nan", "values": {"lr": 0.1}, "rate": None, "age": 0.0,
    }  # fmt: skip
    room.receiver.ended("trainer.0")
    room.receiver.close()
    assert len(room.record) == 2


def test_before_a_hang_comes_what_was_said_before_it_and_how_old_that_is(room):
    for step in (1, 2):
        room.say(step=step)
        room.turn()
    room.clock.advance(600)
    room.receiver.handle(Hang(silent_for=600.0, containers=(), decision=GiveUp("")))
    assert [(event["step"], event["age"]) for event in room.record] == [(1, 0.0), (2, 600.0)]


def test_last_words_that_nobody_has_read_yet_are_read_at_the_end(room):
    room.say(step=8)
    room.receiver.ended("trainer.0")
    assert [event["step"] for event in room.record] == [8]


def test_a_new_process_begins_with_nothing(room):
    room.say(step=900, loss=0.1, samples=9000)
    room.turn()
    room.receiver.started("trainer.0")
    assert room.receiver.latest("trainer.0") is None
    room.say(step=1)
    room.turn()
    latest = room.receiver.latest("trainer.0")
    assert latest is not None
    assert (latest.step, latest.loss) == (1, None)
    assert [event["step"] for event in room.record] == [900, 1]


def test_a_socket_that_a_cleaner_of_old_files_took_is_there_at_the_next_start(room):
    room.path.unlink()
    room.receiver.started("trainer.0")
    room.say(step=1)
    room.turn()
    latest = room.receiver.latest("trainer.0")
    assert latest is not None
    assert latest.step == 1


SPEAKS = """
import json, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for report in sys.argv[2:]:
    sock.sendto(json.dumps({"mark": "p.trainer.4", **json.loads(report)}).encode(), sys.argv[1])
"""


def another_speaks(room: Room, *reports: dict[str, Any]) -> None:
    """Another process, which ends then."""
    said = [json.dumps(report) for report in reports]
    subprocess.run([sys.executable, "-c", SPEAKS, str(room.path), *said], check=True)


def test_of_a_program_that_a_trainer_starts_only_its_life_is_seen(room):
    room.say(step=900, samples=9000, activity={"what": "evaluating"})
    another_speaks(room, {"step": 1, "samples": 8, "loss": 7.0, "values": {"x": 1.0}}, {})
    room.say(step=901, samples=9010)
    room.turn()
    assert [(report.step, report.samples) for _, report in room.heard] == [
        (900, 9000), (None, None), (None, None), (901, 9010)
    ]  # fmt: skip
    assert [each.activity and each.activity.what for _, each in room.heard[:3]] == ["evaluating"] * 3
    latest = room.receiver.latest("trainer.0")
    assert latest is not None
    assert (latest.step, latest.loss, latest.values) == (901, None, {})


def test_who_makes_no_steps_leaves_them_to_the_program_that_it_runs(room):
    room.say(activity={"what": "preparing"})
    another_speaks(room, {"step": 1})
    room.turn()
    assert [report.step for _, report in room.heard] == [None, 1]
    room.say(step=7)
    room.turn()
    assert room.heard[-1][1].step == 7, "the one before it has ended"


def test_the_next_pod_may_have_other_ranks(room, tmp_path):
    room.say(step=1)
    room.turn()
    room.say(step=2)
    room.receiver.pod(pod_of(tmp_path, 0, 4))
    assert [(event["container"], event["step"]) for event in room.record] == [
        ("trainer.0", 1),
        ("trainer.0", 2),
    ]
    room.say(step=3)
    room.turn()
    assert room.receiver.latest("trainer.0") is None
    assert room.heard[-1][0] == "trainer.1"


def test_the_folder_is_its_owners_and_the_socket_goes(room):
    assert stat.S_IMODE(room.path.parent.stat().st_mode) == 0o700
    assert room.path.is_socket()
    room.receiver.close()
    assert list(room.path.parent.iterdir()) == []
    room.receiver.close()


def test_a_path_may_be_longer_than_an_address_of_a_socket(tmp_path):
    folder = tmp_path / ("long-" * 30)
    room = Room(folder / "p.progress")
    assert room.receiver.open() is None
    room.receiver.pod(pod_of(tmp_path, 4))
    fd = os.open(folder, os.O_PATH)
    room.socket.sendto(json.dumps({"mark": "p.trainer.4"}).encode(), f"/proc/self/fd/{fd}/p.progress")
    os.close(fd)
    room.turn()
    assert len(room.heard) == 1
    room.close()


def _file(path: Path) -> None:
    path.parent.write_text("in the way")


def _link(path: Path) -> None:
    elsewhere = path.parent.with_name("elsewhere")
    elsewhere.mkdir()
    path.parent.symlink_to(elsewhere)


def _open_to_others(path: Path) -> None:
    path.parent.mkdir()
    path.parent.chmod(0o777)


def _taken(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("in the way")


@pytest.mark.parametrize("obstacle", [_file, _link, _open_to_others, _taken])
def test_what_stands_in_the_way_ends_nothing(tmp_path, obstacle):
    path = tmp_path / "run" / "p.progress"
    obstacle(path)
    room = Room(path)
    assert isinstance(room.receiver.open(), OSError)
    room.receiver.pod(pod_of(tmp_path, 4))
    room.receiver.started("trainer.0")
    room.receiver.ended("trainer.0")
    room.receiver.settle()
    assert room.receiver.latest("trainer.0") is None
    room.close()
    assert path.parent.exists()
