"""Which save is under way on a server, message by message; the files are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainers.ps.server.test_service import JOB, SPECS
from trainers.ps.server.members import Members
from trainers.ps.server.saving import SaveRequest, SaveRunner
from trainers.ps.server.service import Service
from trainers.ps.server.steps import AsyncSteps
from trainers.ps.server.store import Store
from trainers.ps.wire import Code, Field, Kind, Message, Part, bytes_part


class Saver:
    """A server with two trainers that have joined. While `read` the tables are being read for a snapshot."""

    def __init__(self) -> None:
        self.read = False
        self.wakes = 0
        self.gone: set[bytes] = set()
        self.saving = SaveRunner(0, 1, wake=self.wake, reading=lambda: self.read)
        store = Store()
        self.service = Service(
            Members(2, 5.0, 60.0, 0.0),
            store,
            AsyncSteps(store),
            job=JOB,
            sync=False,
            may_return=True,
            saving=self.saving,
        )
        self.sequence = self.life = 0
        specs = tuple(bytes_part(Field.SPEC, spec.encode(), number) for number, spec in SPECS.items())
        self.hello = (bytes_part(Field.TEXT, JOB.encode()), *specs)
        for rank in (0, 1):
            self.ask(Kind.HELLO, *self.hello, rank=rank)
        self.ask(Kind.READY)

    def reachable(self, route: bytes) -> bool:
        return route.endswith(str(self.life).encode()) and route not in self.gone

    def wake(self) -> None:
        self.wakes += 1

    def ask(self, kind: Kind, *parts: Part, rank: int = 0, number: int = 0) -> Message:
        return self.all_after(kind, *parts, rank=rank, number=number)[0]

    def all_after(self, kind: Kind, *parts: Part, rank: int = 0, number: int = 0) -> list[Message]:
        """The answer to this request, and those to requests that it has made possible."""
        self.sequence += 1
        life = self.life
        message = Message(
            kind=kind, rank=rank, incarnation=life, sequence=self.sequence, number=number, parts=parts
        )
        replies = self.service.handle(f"{rank}-{life}".encode(), message, self.reachable)
        return [reply for _, reply in replies]

    def save(self, folder: Path, id: str, rank: int = 0) -> Message:
        order = SaveRequest(str(folder), id, 0)
        return self.ask(Kind.SAVE, bytes_part(Field.TEXT, order.encode()), rank=rank)

    def written(self, folder: Path, id: str, rank: int = 0) -> Message:
        """Ask until the part is there, as a client does. The answer may follow a WAIT immediately."""
        order = bytes_part(Field.TEXT, SaveRequest(str(folder), id, 0).encode())
        while True:
            for reply in self.all_after(Kind.SAVE, order, rank=rank):
                if reply.kind is not Kind.WAIT:
                    return reply
            if self.saving._task is not None:
                self.saving._task.wait()

    def turn(self, folder: Path, id: str, rank: int = 0, mode: int = 0, kind: str = "tables") -> Message:
        """Ask for the turn to save."""
        order = SaveRequest(str(folder), id, mode, turn=kind)
        return self.ask(Kind.SAVE, bytes_part(Field.TEXT, order.encode()), rank=rank)

    def over(self, id: str, *, saved: bool, rank: int = 0) -> Message:
        return self.ask(Kind.SAVED, bytes_part(Field.TEXT, id.encode()), rank=rank, number=int(saved))

    def later(self) -> list[Message]:
        return [reply for _, reply in self.service.retry_pending(self.reachable)]


def test_a_save_that_was_given_up_while_it_waited_does_not_begin_afterwards(tmp_path: Path) -> None:
    """Another server had no room, and this one was still busy with a snapshot."""
    saver = Saver()
    saver.read = True
    assert saver.save(tmp_path, "save-1").kind is Kind.WAIT
    saver.over("save-1", saved=False)
    saver.read = False
    saver.later()
    assert not saver.saving.busy
    assert saver.save(tmp_path, "save-1").text == "", "and a late copy of the order does not either"
    assert list(tmp_path.iterdir()) == []
    assert json.loads(saver.written(tmp_path, "save-2").text)["name"] == "server-0.json"


def test_a_save_given_up_half_way_does_not_begin_again(tmp_path: Path) -> None:
    saver = Saver()
    saver.save(tmp_path, "save-1")
    saver.over("save-1", saved=False)
    saver.later()
    assert not saver.saving.busy
    assert saver.save(tmp_path, "save-1").text == ""
    assert not saver.saving.busy


def test_nothing_is_removed_by_shrink_while_a_save_is_open(tmp_path: Path) -> None:
    saver = Saver()
    assert saver.written(tmp_path, "save-1").kind is Kind.DONE
    waiting = saver.ask(Kind.SHRINK)
    assert waiting.kind is Kind.WAIT
    assert "tables" in waiting.text
    saver.over("save-1", saved=True)
    assert not saver.saving.busy
    assert saver.later() == [], "it was answered with the SAVED"


def test_a_folder_that_cannot_be_written_is_named_and_the_next_save_works(tmp_path: Path) -> None:
    saver = Saver()
    (tmp_path / "file").write_text("here already")
    refused = saver.written(tmp_path / "file", "save-1")
    assert refused.code is Code.FAILED
    assert str(tmp_path / "file") in refused.text
    saver.over("save-1", saved=False)
    assert saver.written(tmp_path, "save-2").kind is Kind.DONE


def test_text_that_is_no_order_is_refused() -> None:
    saver = Saver()
    for text in (b"", b"{}", b'{"where": "x", "id": "y", "mode": 9}', b"[1]"):
        refused = saver.ask(Kind.SAVE, bytes_part(Field.TEXT, text))
        assert refused.code is Code.BAD_MESSAGE
    assert not saver.saving.busy


# ---- several trainers save


def granted(reply: Message) -> bool:
    return reply.kind is Kind.DONE and not reply.text


def test_trainers_that_save_the_same_get_one_save(tmp_path: Path) -> None:
    saver = Saver()
    assert granted(saver.turn(tmp_path, "turn-1"))
    assert saver.written(tmp_path, "save-1").kind is Kind.DONE
    waiting = saver.turn(tmp_path, "turn-2", rank=1)
    assert waiting.kind is Kind.WAIT
    saver.over("save-1", saved=True)
    assert saver.later() == [], "it is not committed for the trainer yet"
    replies = saver.all_after(Kind.SAVED, bytes_part(Field.TEXT, b"turn-1"), number=1)
    assert [(reply.sequence, reply.text) for reply in replies[1:]] == [(waiting.sequence, "turn-1")]
    again = saver.turn(tmp_path, "turn-2", rank=1)
    assert again.text == "turn-1", "the answer was lost, and the request comes again"


def test_each_call_of_one_trainer_is_a_save_of_its_own(tmp_path: Path) -> None:
    saver = Saver()
    for turn in ("turn-1", "turn-2"):
        assert granted(saver.turn(tmp_path, turn))
        assert granted(saver.turn(tmp_path, turn)), "it comes again"
        saver.over(turn, saved=True)
    assert saver.turn(tmp_path, "turn-3", rank=1).text == "turn-2"
    assert granted(saver.turn(tmp_path, "turn-4", rank=1)), "its second call"


def test_another_folder_mode_or_kind_waits_for_its_turn(tmp_path: Path) -> None:
    saver = Saver()
    assert granted(saver.turn(tmp_path, "turn-1"))
    others = [
        saver.turn(tmp_path / "other", "turn-2", rank=1),
        saver.turn(tmp_path, "turn-3", rank=1, mode=1),
        saver.turn(tmp_path, "turn-4", rank=1, kind="program"),
    ]
    assert all(reply.kind is Kind.WAIT for reply in others)
    for number, turn in enumerate(("turn-1", "turn-2", "turn-3"), 2):
        replies = saver.all_after(Kind.SAVED, bytes_part(Field.TEXT, turn.encode()), number=1)
        assert [reply.sequence for reply in replies[1:]] == [others[number - 2].sequence]
        assert all(map(granted, replies))
    saver.over("turn-4", saved=True)
    assert saver.turn(tmp_path, "turn-5", rank=1).text == "turn-1", "nothing has changed since"


@pytest.mark.parametrize("saved", [True, False])
def test_a_late_copy_of_a_request_does_not_take_the_turn_again(tmp_path: Path, saved: bool) -> None:
    saver = Saver()
    saver.turn(tmp_path, "turn-1")
    saver.ask(Kind.PUSH, rank=1)
    saver.over("turn-1", saved=saved)
    saver.turn(tmp_path, "turn-1")
    assert granted(saver.turn(tmp_path, "turn-2", rank=1))


def test_a_late_copy_of_a_request_that_another_save_has_answered_takes_no_turn(tmp_path: Path) -> None:
    saver = Saver()
    saver.turn(tmp_path, "turn-1")
    saver.written(tmp_path, "save-1")
    saver.over("save-1", saved=True)
    saver.over("turn-1", saved=True)
    for _ in range(2):
        assert saver.turn(tmp_path, "turn-2", rank=1).text == "turn-1"
    saver.ask(Kind.PUSH, rank=1)
    assert saver.turn(tmp_path, "turn-2", rank=1).text == "turn-1", "the late copy"
    assert granted(saver.turn(tmp_path, "turn-3"))


def test_what_has_changed_since_is_saved_too(tmp_path: Path) -> None:
    """As of the moment when the tables were cut, not when the save was complete."""
    saver = Saver()
    assert granted(saver.turn(tmp_path, "turn-1"))
    saver.written(tmp_path, "save-1")
    saver.ask(Kind.PUSH, rank=1)
    saver.over("save-1", saved=True)
    saver.over("turn-1", saved=True)
    assert granted(saver.turn(tmp_path, "turn-2", rank=1))
    saver.ask(Kind.PUSH, rank=1)
    saver.written(tmp_path, "save-2", rank=1)
    saver.over("save-2", saved=True, rank=1)
    saver.over("turn-2", saved=True, rank=1)
    assert saver.turn(tmp_path, "turn-3").text == "turn-2"


def test_a_save_that_failed_is_not_the_save_of_another_trainer(tmp_path: Path) -> None:
    saver = Saver()
    assert granted(saver.turn(tmp_path, "turn-1"))
    waiting = saver.turn(tmp_path, "turn-2", rank=1)
    replies = saver.all_after(Kind.SAVED, bytes_part(Field.TEXT, b"turn-1"))
    assert [reply.sequence for reply in replies[1:]] == [waiting.sequence]
    assert all(map(granted, replies))


def test_the_turn_of_a_trainer_that_is_gone_is_given_to_the_next(tmp_path: Path) -> None:
    saver = Saver()
    assert granted(saver.turn(tmp_path, "turn-1"))
    saver.save(tmp_path, "save-1")
    waiting = saver.turn(tmp_path, "turn-2", rank=1)
    assert waiting.kind is Kind.WAIT
    saver.gone.add(b"0-0")
    for now in (0.5, 100.0):
        replies = [reply for _, reply in saver.service.tick(saver.reachable, now)]
    assert replies[-1].sequence == waiting.sequence
    assert granted(replies[-1])
    assert not saver.saving.busy, "and what it was writing is given up"
