"""The process that takes the stacks for a launcher, from the launcher's loop."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from fleetrun.pod import companion
from fleetrun.pod.loop import Loop
from fleetrun.probe.states import read_state
from fleetrun.stacks.helper import WITHIN, State, Taker, pack_states, unpack_states
from tests.support.pods import Clock
from tests.support.stacks import program


class Place:
    """A loop, and what was heard in it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.companions: set[int] = set()
        self.heard: list[tuple[str, ...]] = []

    def take(self, script: str) -> Callable[[], None]:
        """By a process that does this; what it reads is in the file `asked`."""
        argv = [program(self.folder, f'read -r line; printf "%s" "$line" >"{self.folder}/asked"; {script}')]
        return self.taker(argv).take([], self._then)

    def taker(self, argv: Sequence[str]) -> Taker:
        self.monkeypatch.setattr("fleetrun.stacks.helper.helper_command", lambda module: argv)
        return Taker(self.loop, self.companions, "it hangs")

    def _then(self, lines: tuple[str, ...], states: list[State]) -> None:
        self.heard.append(lines)
        self.loop.stop()

    def run(self) -> tuple[str, ...]:
        bound = self.loop.after(60.0, self.loop.stop)
        self.loop.run()
        bound.cancel()
        (lines,) = self.heard
        return lines


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(companion, "_DEAF", 60.0)  # a busy machine lets one wait that was killed
    made = Place(tmp_path, monkeypatch)
    yield made
    made.loop.close()


def test_it_is_asked_and_what_it_says_is_heard(place: Place):
    place.take("""echo '{"stacks": ["trainer 0: wait (t.py:3)", "others"], "written": 1}'""")
    assert len(place.companions) == 1
    assert place.run() == ("trainer 0: wait (t.py:3)", "others")
    assert place.companions == set()
    said = json.loads((place.folder / "asked").read_text())
    assert said == {"targets": [], "ranks": [], "why": "it hangs", "facts": None, "within": WITHIN}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'Traceback'; echo 'ImportError: no'; exit 1",
            "cannot take the stacks: ImportError: no",
        ),
        ("exit 3", "cannot take the stacks: exited with code 3"),
        ("kill -9 $$", "cannot take the stacks: was killed by SIGKILL"),
        ("echo '{}'", "cannot take the stacks: {}"),
        ("echo '[1]'", "cannot take the stacks: [1]"),
        ("echo '{\"stacks\": 3}'", 'cannot take the stacks: {"stacks": 3}'),
    ],
)
def test_what_goes_wrong_is_said_in_their_place(place: Place, script: str, words: str):
    place.take(script)
    assert place.run() == (words,)


def test_it_does_not_take_for_ever(place: Place):
    os.mkfifo(place.folder / "never")
    place.take(f'read line <"{place.folder}/never"')
    place.loop.after(0.0, lambda: place.clock.advance(50.0))
    (said,) = place.run()
    assert said.startswith("cannot take the stacks within")
    assert place.companions == set()


def test_one_that_cannot_be_started_is_said_so_and_not_at_once(place: Place):
    place.taker([str(place.folder / "nothing")]).take([], place._then)
    assert place.heard == []
    (said,) = place.run()
    assert "the program does not exist" in said


def test_called_off_nothing_is_heard_and_nothing_left(place: Place):
    os.mkfifo(place.folder / "never")
    call_off = place.take(f'read line <"{place.folder}/never"')
    (pid,) = place.companions
    call_off()
    place.loop.after(0.0, place.loop.stop)
    place.loop.run()
    assert (place.heard, place.companions) == ([], set())
    assert not Path(f"/proc/{pid}").exists()


def test_so_many_lines_of_such_a_length(place: Place):
    (place.folder / "answer").write_text(json.dumps({"stacks": ["x" * 2000] * 25}) + "\n")
    place.take(f'cat "{place.folder}/answer"')
    assert place.run() == ("x" * 500,) * 20


# ---- Where the ranks of a node stand, for another node


def a_state(rank: int) -> State:
    frames = [
        [f"/home/u/train{rank}.py", line, "step", f"loss{line * rank} = model(x)"] for line in range(20)
    ]
    call = {"group": "0", "operation": "all_reduce", "point_to_point": False, "sizes": [[7]],
            "dtypes": ["Float"], "entered_ns": 10**18, "done": True}  # fmt: skip
    calls = [{**call, "number": number} for number in range(1, 21)]
    arrivals = {"0": [[number, 10**15 + 1000 * number + rank] for number in range(1, 201)]}
    probe = {
        "time_ns": 10**18, "groups": {"0": {"ranks": [0, 1], "entered": 20}}, "calls": calls,
        "arrivals": arrivals,
    }  # fmt: skip
    return {"rank": rank, "title": f"trainer {rank}", "alive": True, "stack": frames, "probe": probe}


@pytest.mark.parametrize("most", [1 << 20, 4000, 2048, 1000])
def test_what_another_node_is_told_fits(most: int):
    """The less room there is, the fewer frames, calls and arrivals; the last call is always there."""
    states = [a_state(rank) for rank in range(8)]
    asked = time.time()
    data = pack_states(states, most, asked)
    assert len(data) <= most
    told = [read_state(each) for each in unpack_states(data, asked, time.time(), "node 1, h2")]
    assert [each.rank for each in told] == [*range(8)]
    for each in told:
        assert each.node == "node 1, h2"
        assert each.calls[-1].number == 20
        assert each.entered("0") == 20
    if most == 1 << 20:
        assert len(told[3].stack) == 20
        assert told[3].arrivals["0"][200] == 1e9 + 0.200003


def test_the_ends_of_logs_are_cut_before_all_else():
    states = [
        {**a_state(rank), "log": {"name": f"{rank}.log", "end": "step\n" * 50_000}} for rank in range(40)
    ]
    for most, lines in ((1 << 20, (1 << 16) // 5), (2048, 0)):
        told = unpack_states(pack_states(states, most, 1.0), 1.0, 2.0, "node 1")
        assert {each["log"]["end"] for each in told} == {"step\n" * lines}, "whole lines"
        assert all(each["probe"]["calls"] for each in told)


def test_the_clock_of_another_node_is_compared_as_in_ntp():
    """It is 100 s ahead; its answer took 0.3 s on the way back, and 0.1 s the question."""
    with patch("time.time", return_value=1002.1):  # 902.1 of the asking one's
        data = pack_states([a_state(0)], 1 << 20, asked=1000.1)
    (state,) = map(read_state, unpack_states(data, 900.0, 902.4, "node 1"))
    assert (state.ahead, state.unsure) == (pytest.approx(99.9), pytest.approx(0.2))


@pytest.mark.parametrize("data", [
    b"", b"{}", b"x" * 100, zlib.compress(b"{"), zlib.compress(b"[3]"),
    zlib.compress(b'{"asked": 1, "answered": 2, "states": [3]}'),
    zlib.compress(b'{"asked": "", "answered": 2, "states": []}'),
])  # fmt: skip
def test_a_malformed_answer_of_another_node_tells_nothing(data: bytes):
    assert unpack_states(data, 1.0, 2.0, "node 1") == []
