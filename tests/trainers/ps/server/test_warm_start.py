"""A server that begins with a part of a save: what it loads, what it takes from trainer 0, and what it does
after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ports import free_port
from trainers.ps.configs import PsConfigs
from trainers.ps.durable.journal import FolderError
from trainers.ps.saves.manifest import SaveMode
from trainers.ps.saves.read import read_values
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.tables.rules import Adagrad, Adam
from trainers.ps.tables.spec import Bound, RowOptions, TableKind, TableSpec, describe_job
from trainers.ps.trainer.saving import SaveCoordinator
from trainers.ps.wire import Code, Field, Kind, Message, Part, bytes_part

pytestmark = pytest.mark.slow


def dense(name: str, size: int) -> TableSpec:
    return TableSpec(kind=TableKind.DENSE, name=f"{name}[0:{size}]", size=size, rule=Adam())


def sparse(name: str, dim: int) -> TableSpec:
    return TableSpec(kind=TableKind.SPARSE, name=name, size=dim, rule=Adagrad())


OLD = {
    0: sparse("user.weight", 2),
    1: sparse("item.weight", 2),
    2: dense("out.weight", 4),
    3: dense("bias", 1),
}
NEW = {0: sparse("user.weight", 2), 1: sparse("item.weight", 3), 2: sparse("city.weight", 2),
       3: dense("out.weight", 7), 4: dense("bias", 1)}  # fmt: skip
KEEP = ["user.weight", "bias"]


class Alone:
    """A server without a loop, and its only trainer."""

    def __init__(
        self,
        specs: Mapping[int, TableSpec],
        folder: Path,
        load_from: Path | None = None,
        only: Sequence[str] | None = None,
    ) -> None:
        self.server = Server(
            ServerPlan(
                endpoints=[f"127.0.0.1:{free_port()}"],
                index=0,
                trainers=1,
                sync=False,
                configs=PsConfigs(durability="log", log_fsync="no"),
                load_from=None if load_from is None else str(load_from),
                load_only=only,
                durable_dir=folder,
            )
        )
        self.specs, self.sequence = specs, 0

    def hello(self, life: int) -> Message:
        words = bytes_part(Field.TEXT, describe_job(False, 1, 1, 0).encode())
        specs = [bytes_part(Field.SPEC, spec.encode(), number) for number, spec in self.specs.items()]
        self.life = life
        return self.ask(Kind.HELLO, words, *specs, number=life)

    def ask(self, kind: Kind, *parts: Part, number: int = 0) -> Message:
        self.sequence += 1
        message = Message(kind, 0, self.life, self.sequence, number, Code.NONE, parts)
        service = self.server._service
        while True:
            for _, reply in service.handle(b"x", message, lambda route: False):
                if reply.sequence == self.sequence and reply.kind is not Kind.WAIT:
                    return reply
            self.server._saving._task.wait()  # type: ignore[union-attr]  # it waits for that

    def values(self) -> dict[str, list[float]]:
        """Of all tables; of sparse ones the rows 0 to 2."""
        found = {}
        for number, spec in self.specs.items():
            if spec.kind is TableKind.SPARSE:
                wanted = Part(number, Field.PEEK, torch.arange(3))
            else:
                wanted = Part(number, Field.WANT, torch.tensor([1]))
            found[spec.name.partition("[")[0]] = (
                self.ask(Kind.PULL, wanted).parts[0].data.reshape(-1).tolist()
            )
        return found

    def fill(self, value: float, rows: int) -> None:
        """The initial values of trainer 0."""
        for number, spec in self.specs.items():
            if spec.kind is TableKind.SPARSE:
                keys = Part(number, Field.KEYS, torch.arange(rows))
                self.ask(Kind.ASSIGN, keys, Part(number, Field.ROWS, torch.full((rows, spec.size), value)))
            else:
                self.ask(Kind.ASSIGN, Part(number, Field.VALUES, torch.full((spec.size,), value)))
        assert self.ask(Kind.READY).kind is Kind.DONE

    def push(self) -> None:
        number = [each.name for each in self.specs.values()].index("bias[0:1]")
        self.ask(Kind.PUSH, Part(number, Field.VALUES, torch.ones(1), lr=0.5))

    def save(self, where: Path) -> None:
        class Direct:
            def ask(_, requests: Sequence[object]) -> list[Message]:
                return [self.ask(each.kind, *each.parts, number=each.number) for each in requests]  # type: ignore[attr-defined]

            def forget(_, kind: Kind) -> None:
                pass

        SaveCoordinator(Direct(), 1).save(str(where), SaveMode.ALL, 0)  # type: ignore[arg-type]

    def kill(self) -> None:
        """What is on disk stays."""
        assert self.server._state_saver is not None
        self.server._state_saver.close(over=False)
        self.server._close()


def test_rows_that_a_bound_has_no_room_for_are_counted_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A save loads into another bound, or onto a server that gets more than its share of rows."""
    bounded = replace(sparse("user.weight", 2), rows=RowOptions(bound=Bound(rows=50)))
    first = Alone({0: sparse("user.weight", 2)}, tmp_path / "first")
    first.hello(0)
    first.fill(5.0, rows=70)
    first.save(tmp_path / "saved")
    first.kill()
    for spec in (bounded, replace(bounded, rows=RowOptions(bound=Bound(rows=100)))):
        second = Alone({0: spec}, tmp_path / "second", tmp_path / "saved")
        second.hello(0)
        (table,) = second.server._store.tables.values()
        lost = 70 - len(table)
        said = f"WARNING: removed {lost} rows of 'user.weight' in {tmp_path / 'saved'}"
        assert (lost > 0) == (said in capfd.readouterr().err) == (spec is bounded)
        second.server._state_saver.close(over=True)
        second.server._close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A save of OLD: all values 5, after a push."""
    first = Alone(OLD, tmp_path / "first")
    first.hello(0)
    first.fill(5.0, rows=2)
    first.push()
    first.save(tmp_path / "saved")
    first.kill()
    assert read_values(tmp_path / "saved").dense["bias"].tolist() == [4.5]
    return tmp_path / "saved"


WANTED = {
    "user.weight": [5.0] * 4 + [1.0] * 2,  # the third row is new
    "item.weight": [1.0] * 9,
    "city.weight": [1.0] * 6,
    "out.weight": [1.0] * 7,
    "bias": [4.5],
}


def test_named_tables_are_loaded_and_the_others_begin_anew(saved: Path, tmp_path: Path) -> None:
    warm = Alone(NEW, tmp_path / "kept", saved, KEEP)
    hello = warm.hello(0)
    assert hello.code is Code.NOT_READY
    about = json.loads(hello.text)
    assert about["rows"] == {"user.weight": 2, "bias": 0}
    assert about["others"] == ["item.weight", "out.weight"]
    assert about["named"]
    warm.fill(1.0, rows=3)
    assert warm.values() == WANTED
    steps = {table.spec.name: table.step for table in warm.server._store.tables.values()}
    assert (steps["bias[0:1]"], steps["out.weight[0:7]"]) == (1, 0), "with its optimizer state"
    warm.kill()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_restart_does_not_load_the_save_over_newer_values(
    saved: Path, tmp_path: Path, snapshot: bool
) -> None:
    warm = Alone(NEW, tmp_path / "kept", saved, KEEP)
    warm.hello(0)
    warm.fill(1.0, rows=3)
    if snapshot:
        warm.server._save_state()
        warm.server._state_saver._durable._task.wait()  # type: ignore[union-attr]
        warm.server._save_state()
    warm.push()
    newer = warm.values()
    assert newer["bias"] != WANTED["bias"]
    warm.kill()
    again = Alone(NEW, tmp_path / "kept", saved, KEEP)
    assert again.hello(1).code is Code.NONE
    assert again.values() == newer
    again.kill()


@pytest.mark.parametrize(("another", "only"), [(True, KEEP), (False, ["bias"])])
def test_a_restart_before_the_first_snapshot_does_not_follow_something_else(
    saved: Path, tmp_path: Path, another: bool, only: list[str]
) -> None:
    """What was pushed belongs to what was loaded."""
    warm = Alone(NEW, tmp_path / "kept", saved, KEEP)
    warm.hello(0)
    warm.fill(1.0, rows=3)
    warm.push()
    warm.kill()
    if another:
        other = Alone(OLD, tmp_path / "other", saved)
        other.hello(0)
        assert other.ask(Kind.READY).kind is Kind.DONE
        other.save(saved)
        other.kill()
    words = r"started with save-\S+ of \S+/saved, bias user.weight, but would now start with save-"
    with pytest.raises(FolderError, match=words):
        Alone(NEW, tmp_path / "kept", saved, only)


def test_a_whole_save_is_loaded_without_values_of_the_trainer(saved: Path, tmp_path: Path) -> None:
    """Trainer 0 only says that it is ready. More rows than the save has are its own."""
    whole = Alone(OLD, tmp_path / "kept", saved)
    hello = whole.hello(0)
    assert (hello.code, json.loads(hello.text)["others"]) == (Code.NOT_READY, [])
    assert whole.ask(Kind.PULL, Part(0, Field.PEEK, torch.arange(3))).code is Code.NOT_READY
    assert whole.ask(Kind.READY).kind is Kind.DONE
    assert whole.values()["item.weight"] == [5.0] * 4 + [0.0] * 2
    whole.kill()


@pytest.mark.parametrize(
    ("specs", "only", "words"),
    [
        ({**OLD, 4: NEW[2]}, None, ["Missing in the saved tables: 'city.weight'", "var_names=[...]"]),
        (NEW, ["item.weight"], ["'item.weight'", "rows of 2,", "rows of 3", "var_names=[...]"]),
        (
            NEW,
            ["out.weight"],
            ["'out.weight'", "4 elements, but in this model it is dense with 7", "var_names=[...]"],
        ),
        (NEW, ["bias", "users"], ["do not include 'users'. They include 'bias', 'item.weight'"]),
        ({0: OLD[0]}, ["item.weight"], ["Missing in this model: 'item.weight'"]),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(
    saved: Path, tmp_path: Path, specs: Mapping[int, TableSpec], only: list[str] | None, words: list[str]
) -> None:
    refused = Alone(specs, tmp_path / "kept", saved, only)
    said = refused.hello(0)
    assert said.code is Code.FAILED
    assert all(word in said.text for word in words), said.text
    refused.kill()
