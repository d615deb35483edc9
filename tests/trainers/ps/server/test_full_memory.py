"""A server whose memory or disk is full, and what it recovers: real limits, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]

SERVER = """
import pathlib
import resource
import sys
import torch
from tests.trainers.ps.server.test_state_saver import Kept
from trainers.ps.durable.journal import DurabilityError
from trainers.ps.tables.rules import Adam
from trainers.ps.tables.spec import Entry, EntryKind, FullError, RowOptions, TableKind, TableSpec
from trainers.ps.wire import LOADED, Field, Kind, Part

folder, sync, counted = pathlib.Path(sys.argv[1]), "sync" in sys.argv, "counted" in sys.argv
SIZE = 64
PARTS = (Part(0, Field.VALUES, torch.zeros(2)), Part(2, Field.VALUES, torch.ones(1)))
rows = RowOptions(entry=Entry(EntryKind.COUNT, 2)) if counted else RowOptions()
spec = TableSpec(kind=TableKind.SPARSE, name="e", size=SIZE, rule=Adam(amsgrad=1.0), rows=rows)


class Logged(Kept):
    def __init__(self, folder: pathlib.Path = folder) -> None:
        super().__init__(folder, 2, sync=sync)
        self.service._record = self.saver.record
        self.specs = {**self.specs, 1: spec}


def keys_of(number: int) -> torch.Tensor:
    return torch.arange(2000 * number, 2000 * (number + 1))


def limit() -> None:
    warm = Logged(folder / "warm").opened(PARTS)  # kernels need memory too
    for step in range(3):
        pushed(warm, step, keys_of(step))
        pulled(warm, keys_of(step))
    warm.store.tables[1].pull(keys_of(9), insert=False)
    warm.kill()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, ((130 << 20) + 4096 * pages,) * 2)


def pushed(bench: Logged, step: int, keys: torch.Tensor) -> str:
    parts = (Part(1, Field.KEYS, keys), Part(1, Field.ROWS, torch.ones(len(keys), SIZE), lr=0.5))
    answers = [bench.ask(Kind.PUSH, rank, 0, step, parts) for rank in ((0, 1) if sync else (0,))]
    return " ".join(answer.kind.name + (f" {answer.code.name}" if answer.code else "") for answer in answers)


def pulled(bench: Logged, keys: torch.Tensor) -> str:
    number = bench.steps.step if sync else 0
    answer = bench.ask(Kind.PULL, 0, 0, number, (Part(1, Field.KEYS, keys),))
    return answer.kind.name + (f" {answer.code.name}" if answer.code else "")
"""

FILL = """
limit()
bench = Logged()
bench.opened(PARTS)
step = 0
while (answer := pushed(bench, step, keys_of(step))) in ("DONE", "DONE DONE"):
    step += 1
    assert step < 10_000
print(step, answer)
print(bench.ask(Kind.FINISH, 1).code.name if sync else pushed(bench, step, keys_of(0)))
bench.kill()
"""

ASSIGN = """
limit()
bench = Logged()
bench.opened(PARTS)
for step in range(10_000):
    keys = keys_of(step)
    parts = (Part(1, Field.KEYS, keys), Part(1, Field.ROWS, torch.ones(len(keys), SIZE)))
    answer = bench.ask(Kind.ASSIGN, number=LOADED, parts=parts)
    if answer.code:
        break
print(step, answer.code.name, bool(bench.store.tables[1].pull(keys, insert=False).any()))
bench.kill()
"""

COUNT = """
limit()
bench = Logged()
bench.opened(PARTS)
step = 0
try:
    while (answer := pulled(bench, keys_of(step)), pulled(bench, keys_of(step))) == ("DATA", "DATA"):
        step += 1
        assert step < 10_000
    print(step, answer)
except FullError:
    print(step, "FullError")
bench.saver._durable.close()
"""

FULL_DISK = """
bench = Logged()
bench.opened(PARTS)
print(pulled(bench, keys_of(0)))
(log,) = (folder / "server-0").glob("journal-*")
resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 100,) * 2)
try:
    print(pulled(bench, keys_of(0)))
except DurabilityError as error:
    print("DurabilityError", "Free some space" in str(error))
bench.saver._durable.close()
"""

COUNTED = """
limit()
bench = Logged()
table = bench.store.tables[1]
keys, counts, _ = table.candidates().columns
print(len(table) // 2000, len(keys) // 2000, counts.unique().tolist())
bench.kill()
"""

RECOVER = """
if "limited" in sys.argv:
    limit()
bench = Logged()
table = bench.store.tables[1]
moved = [bool((table.pull(keys_of(each), insert=False) != 0).any()) for each in range(200)]
print(table.step, moved.index(False), sum(moved))
bench.kill()
"""


def run(folder: Path, script: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SERVER + script, str(folder), *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # else a thread may take 64 MiB of addresses, or not
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("how", ["async", "sync"])
def test_a_push_without_room_for_its_rows_is_refused_and_never_applied(tmp_path: Path, how: str) -> None:
    filled, *more = run(tmp_path, FILL, how)
    steps, *answers = filled.split()
    assert answers[-2:] == ["REFUSED", "NO_MEMORY"]
    assert int(steps) > 10
    taken = int(steps)
    if how == "async":
        assert more == ["DONE"], "the server goes on with the rows that it has"
        taken += 1
    else:
        assert more == ["NO_MEMORY"], "without trainer 1, the push of trainer 0 would be a whole step"
    for limited in ("limited", "without"):
        assert run(tmp_path, RECOVER, how, limited) == [f"{taken} {steps} {steps}"]


def test_loaded_values_without_room_for_their_rows_are_refused_and_never_there(tmp_path: Path) -> None:
    ((steps, *refused),) = map(str.split, run(tmp_path, ASSIGN, "async"))
    assert refused == ["NO_MEMORY", "False"]
    for limited in ("limited", "without"):
        assert run(tmp_path, RECOVER, "async", limited) == [f"0 {steps} {steps}"]


def test_a_server_that_cannot_keep_what_it_counted_ends(tmp_path: Path) -> None:
    """The last keys were counted once by a pull that was answered, and then by one that was not."""
    ((steps, ended),) = map(str.split, run(tmp_path, COUNT, "async", "counted"))
    assert ended == "FullError"
    assert run(tmp_path, COUNTED, "async", "counted") == [f"{steps} 1 [1.0]"]


def test_a_server_that_cannot_record_what_it_counted_ends(tmp_path: Path) -> None:
    """Else it would admit keys, and acknowledge pushes for them, that a recovery would not admit."""
    assert run(tmp_path, FULL_DISK, "async", "counted") == ["DATA", "DurabilityError True"]
    assert run(tmp_path, COUNTED, "async", "counted") == ["0 1 [1.0]"]
