"""What a server answers its publisher, message by message; the files are real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.stores import LOST, LossError, register
from tests.support.waiting import eventually
from tests.trainers.ps.server.test_service import Bench
from trainers.ps.configs import PsConfigs
from trainers.ps.saves import publication, write
from trainers.ps.saves.manifest import Save, SaveMode, new_id
from trainers.ps.saves.publication import OthersError
from trainers.ps.server.publisher import Publisher
from trainers.ps.server.saving import SaveRequest
from trainers.ps.wire import NO_TRAINER, Code, Field, Kind, Message, Part, bytes_part
from trainers.storage.manifest import FileRecord


class Published(Bench):
    """A server that publishes to `folder`. `life`: the publisher's."""

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        self.folder, self.life = folder, 1
        self.publisher = Publisher([], str(folder), PsConfigs(), sync=sync, keys=None, wake=lambda: None)
        super().__init__(sync=sync, published=str(folder), publisher=self.publisher)
        self.opened()

    def order(self, kind: Kind, text: str, number: int = 0) -> Message:
        return self.ask(kind, NO_TRAINER, self.life, number, (bytes_part(Field.TEXT, text.encode()),))

    def cut(
        self, id: str, step: int, *after: str, mode: SaveMode = SaveMode.INCREMENT, row_type: str = ""
    ) -> Message:
        request = SaveRequest(str(self.folder), id, int(mode), after, len(after) + 1, row_type)
        return self.order(Kind.PUBLISH, request.encode().decode(), step)

    def written(self, id: str) -> str:
        while (reply := self.order(Kind.WRITTEN, id)).kind is Kind.WAIT:
            assert self.service._saving._task is not None
            self.service._saving._task.wait()
        return reply.text

    def step(self) -> None:
        for rank in (0, 1):
            self.push(rank, self.steps.step)

    def publish(self, id: str, *after: str, mode: SaveMode = SaveMode.INCREMENT) -> None:
        assert self.cut(id, self.steps.step, *after, mode=mode).code is Code.NONE
        assert self.written(id)
        self.order(Kind.PUBLISHED, id, 1)


def test_a_step_that_has_passed_is_not_cut_and_one_to_come_is_cut_when_it_is_there(tmp_path: Path) -> None:
    bench = Published(tmp_path)
    bench.step()
    assert bench.cut("save-0", 0, mode=SaveMode.VALUES).number == 1
    waiting = bench.cut("save-2", 2, mode=SaveMode.VALUES)
    assert waiting.kind is Kind.WAIT
    bench.step()
    answer = bench.late[waiting.sequence]
    assert (answer.kind, answer.number) == (Kind.DONE, 2)
    bench.step()
    assert "server-0.json" in bench.written("save-2")


def test_what_a_publisher_that_was_killed_has_asked_for_is_dropped(tmp_path: Path) -> None:
    bench = Published(tmp_path)
    assert bench.cut("save-old", 1, mode=SaveMode.VALUES).kind is Kind.WAIT
    bench.life = 2
    bench.publish("save-new", mode=SaveMode.VALUES)
    assert bench.cut("save-next", 0, "save-new").kind is Kind.DONE
    bench.step()
    bench.pass_time(1)
    assert "server-0.json" in bench.written("save-next"), "it is not ended by the old one"


def test_a_cut_that_was_left_behind_is_ended_by_the_next_as_the_folder_says(tmp_path: Path) -> None:
    bench = Published(tmp_path)
    bench.publish("save-1", mode=SaveMode.VALUES)
    for committed in (True, False):
        bench.cut("save-2", 0, "save-1")
        assert bench.written("save-2")
        bench.life += 1
        after = ("save-1", "save-2") if committed else ("save-1",)
        assert bench.cut("save-3", 0, *after).code is Code.NONE
        bench.order(Kind.PUBLISHED, "save-3", 0)
        assert bench.written("save-3") == ""
        bench = Published(tmp_path)
        bench.publish("save-1", mode=SaveMode.VALUES)


@pytest.mark.parametrize("committed", [0, 1])
def test_a_version_that_failed_on_another_server_does_not_keep_trainers_from_saving(
    tmp_path: Path, committed: int
) -> None:
    """A trainer's save on the other server lets no further version begin there."""
    bench = Published(tmp_path)
    bench.cut("save-1", 0, mode=SaveMode.VALUES)
    assert bench.written("save-1")
    bench.life += 1
    state = bench.ask(Kind.PUBLISH, NO_TRAINER, bench.life, committed)
    assert state.code is Code.NONE
    assert not bench.service._saving.tables_in_use
    follows = bench.cut("save-2", 0, "save-1")
    assert follows.code is (Code.NONE if committed else Code.MISMATCH)


def test_a_version_that_is_not_in_the_log_of_this_server_is_not_followed(tmp_path: Path) -> None:
    """A power failure has taken the end of the log: the folder has rows of pushes that did not happen."""
    bench = Published(tmp_path)
    bench.publish("save-1", mode=SaveMode.VALUES)
    bench.publish("save-2", "save-1")
    assert bench.cut("save-4", 0, "save-1", "save-2", "save-3").code is Code.MISMATCH
    assert bench.cut("save-4", 0, "save-1", "save-2").code is Code.NONE
    recorded = [each for each in bench.recorded if each.kind is Kind.PUBLISH]
    assert [each.text for each in recorded] == ["save-1", "save-2", "save-4"]
    again = Published(tmp_path)
    for each in recorded[1:]:
        again.service.replay(each)
    assert again.cut("save-5", 0, "save-1").code is Code.MISMATCH, "the log begins later"
    assert again.cut("save-5", 0, "save-1", "save-2", "save-4").code is Code.NONE


def test_a_write_that_is_slow_to_end_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    real = write.write_part

    def slow(*words: Any) -> Any:
        go_on.wait(60)
        return real(*words)

    monkeypatch.setattr(write, "write_part", slow)
    bench = Published(tmp_path)
    bench.cut("save-1", 0, mode=SaveMode.VALUES)
    bench.order(Kind.PUBLISHED, "save-1", 0)
    bench.step()
    assert bench.cut("save-2", 1, mode=SaveMode.VALUES).kind is Kind.WAIT, "the tables are still being read"
    go_on.set()
    eventually(lambda: not bench.service._saving.busy)
    bench.pass_time(1)
    assert "server-0.json" in bench.written("save-2")


def test_a_late_copy_of_a_request_brings_no_former_buffers_back(tmp_path: Path) -> None:
    bench = Published(tmp_path)

    def refresh(sequence: int, value: float) -> None:
        parts = (bytes_part(Field.TEXT, b"mean"), Part(0, Field.VALUES, torch.full((2,), value)))
        bench.send(Message(kind=Kind.REFRESH, sequence=sequence, parts=parts))

    refresh(500, 1.0)
    refresh(501, 2.0)
    refresh(500, 1.0)
    assert bench.publisher.buffers["mean"].tolist() == [2.0, 2.0]


class Alone:
    """A publisher without servers, to a store that may lose messages."""

    def __init__(self, name: str) -> None:
        register()
        LOST[:] = [""]
        self.publisher = Publisher(
            [], f"lossy://{name}", PsConfigs(), sync=True, keys=None, wake=lambda: None
        )

    def commit(self, lost: str = "") -> int:
        """The number of the version; as the publisher does it, also when it fails."""
        LOST[:] = [lost]
        try:
            return self.publisher._commit(
                self.publisher._open(), Save(new_id(0), SaveMode.VALUES, 0, ())
            ).number
        except Exception as error:
            self.publisher._failed(error)
            raise
        finally:
            LOST[:] = [""]
            if self.publisher._client is not None:
                self.publisher._client.close()
                self.publisher._client = None


def test_a_version_whose_write_was_not_confirmed_counts() -> None:
    alone = Alone("confirmed")
    assert [alone.commit(), alone.commit("reply"), alone.commit(), alone.commit("reply")] == [1, 2, 3, 4]


@pytest.mark.parametrize("first", [False, True])
def test_publishing_goes_on_after_a_write_of_which_nobody_knows_whether_it_counts(first: bool) -> None:
    """Neither that version nor one that was there before is another job's."""
    alone = Alone(f"unknown-{first}")
    if first:
        assert alone.commit() == 1
        alone = Alone(f"unknown-{first}")
    for lost in ("request", "reply and more", "reads", "request", "reply and more"):
        with pytest.raises(LossError):
            alone.commit(lost)
        assert not alone.publisher._others
    assert alone.commit() == first + 3


def test_a_folder_that_cannot_be_read_is_not_taken_for_anothers() -> None:
    mine, theirs = Alone("twice"), Alone("twice")
    assert mine.commit() == 1
    assert theirs.commit() == 2
    LOST[:] = ["reads"]
    mine.publisher._failed(OthersError("this job stopped publishing"))
    LOST[:] = [""]
    assert not mine.publisher._others
    with pytest.raises(OthersError):
        mine.commit()
    assert "Another job" in mine.publisher._others


class Meddling(str):
    """A name at whose comparison something else happens, once."""

    def __new__(cls, name: str, act: Callable[[], None]) -> Meddling:
        made = super().__new__(cls, name)
        made.act = act  # type: ignore[attr-defined]
        return made

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        act, self.act = self.act, lambda: None  # type: ignore[attr-defined]
        act()
        return str.__eq__(self, other)


def test_buffers_that_a_trainer_sends_while_those_of_the_folder_are_taken_are_kept(tmp_path: Path) -> None:
    bench = Published(tmp_path)
    bench.publisher.keep({"mean": torch.zeros(1), "of the folder": torch.zeros(1)})
    bench.publish("save-1", mode=SaveMode.VALUES)
    part = FileRecord.of("server-0.json", [(tmp_path / "save-1" / "server-0.json").read_bytes()])
    publication.Published.open(str(tmp_path)).follow(Save("save-1", SaveMode.VALUES, 0, ()), [part])

    publisher = Published(tmp_path).publisher
    publisher.continues()
    publisher.keep({Meddling("mean", lambda: publisher.keep({"late": torch.ones(1)})): torch.ones(1)})
    publisher._open()
    assert publisher.buffers["mean"].tolist() == [1.0]
    assert publisher.buffers.keys() == {"mean", "of the folder", "late"}


def test_servers_with_another_folder_write_nothing(tmp_path: Path) -> None:
    bench = Published(tmp_path / "mine")
    request = SaveRequest(str(tmp_path / "theirs"), "save-1", int(SaveMode.VALUES), (), 1)
    refused = bench.order(Kind.PUBLISH, request.encode().decode())
    assert refused.code is Code.MISMATCH
    assert "Set the same ps_configs publish on all servers" in refused.text
    assert not list(tmp_path.iterdir())
