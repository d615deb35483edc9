"""What is said of a save without loading it: two servers, a whole save and two deltas, compared with the
tables that wrote them.
"""

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.support.owners import owners
from tests.trainers.ps.saved.tables import LEAN, USERS, MemoryTable, dense_spec, save
from tests.trainers.ps.saved.test_tables import RARE, SEEN
from trainers.errors import FleetError
from trainers.ps.saves import inspection
from trainers.ps.saves.inspection import checked, compared, exported, listed, main, shown
from trainers.ps.saves.manifest import SaveMode, commit_save, new_id
from trainers.ps.saves.read import open_saves
from trainers.ps.saves.write import SaveSpec, SaveTask, cut_tables
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import RowType

pytestmark = pytest.mark.slow

SERVERS = 2
PACKED = replace(SEEN, size=3, rows=replace(SEEN.rows, dtype=RowType.BFLOAT16))


class Job:
    """The tables of the servers, and a folder of saves of them."""

    def __init__(self, where: Path) -> None:
        self.where = str(where)
        self.tables = [(SparseTable(PACKED), SparseTable(RARE)) for _ in range(SERVERS)]
        self._last: str | None = None
        self.step = 0

    def train(self, keys: torch.Tensor) -> None:
        """The rows of these keys of `seen`."""
        self.step += 1
        homes = owners(keys, SERVERS)
        for server, (seen, _) in enumerate(self.tables):
            mine = keys[homes == server]
            seen.apply(mine, torch.randn(len(mine), 3), 0.1, torch.ones(len(mine), 2))

    def remove(self, keys: torch.Tensor) -> None:
        homes = owners(keys, SERVERS)
        for server, (seen, _) in enumerate(self.tables):
            seen.remove(keys[homes == server])

    def pull_rare(self, key: int) -> None:
        self.tables[int(owners(torch.tensor([key]), SERVERS))][1].pull(torch.tensor([key]))

    def save(self, mode: SaveMode = SaveMode.DELTA) -> None:
        id, records = new_id(self.step), []
        for server, tables in enumerate(self.tables):
            spec = SaveSpec(id=id, mode=mode, server=server, servers=SERVERS, shard_bytes=5000)
            task = SaveTask(self.where, spec, cut_tables(tables, mode))
            records.append(task.result())
            task.close(saved=True)
        commit_save(self.where, id, mode, self.step, records, after=self._last if mode else None)
        self._last = id

    def rows(self) -> dict[int, list[float]]:
        """Of `seen`."""
        found: dict[int, list[float]] = {}
        for seen, _ in self.tables:
            with seen.cut() as cut:
                rows = cut.read(0, cut.rows)
                found |= zip(rows.keys.tolist(), rows.values.float().tolist(), strict=True)
        return found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Keys 0 to 999; then 0 to 99 change, 100 to 199 go, 1000 to 1049 come; then 150 comes back, 0 goes."""
    torch.manual_seed(0)
    made = Job(tmp_path / "saved")
    made.train(torch.arange(1000))
    made.pull_rare(7)
    made.save(SaveMode.ALL)
    made.train(torch.cat([torch.arange(100), torch.arange(1000, 1050)]))
    made.remove(torch.arange(100, 200))
    for _ in range(3):
        made.pull_rare(7)
    made.pull_rare(-8)
    made.save()
    made.train(torch.tensor([150, 5]))
    made.remove(torch.tensor([0]))
    made.save()
    return made


def test_a_list_has_every_table_and_what_its_deltas_have(job: Job) -> None:
    found = listed(job.where)
    assert (found["step"], found["deltas"], found["servers"], found["mode"]) == (3, 2, 2, "all")
    (seen,) = (each for each in found["tables"] if each["table"] == "seen")
    assert (seen["rows"], seen["changed"]) == (1000, [150, 2])
    assert (seen["values"], seen["type"], seen["rule"], seen["servers"]) == (3, "bfloat16", "Adagrad", 2)
    (rare,) = (each for each in found["tables"] if each["table"] == "rare")
    assert (rare["rows"], rare["changed"]) == (0, [1, 0])


def test_a_row_is_that_of_the_last_save_that_has_it(job: Job) -> None:
    rows, keys = job.rows(), [5, 42, 150, 500, 1049, 100, 0, 77_777]
    found = {row.pop("key"): row for row in shown(job.where, "seen", *map(str, keys))["rows"]}
    assert list(found) == keys
    for key in keys[:5]:
        assert found[key]["values"] == rows[key]
        assert len(found[key]["optimizer"]) == 1
        assert found[key]["shows"] == {5: 3, 42: 2}.get(key, 1)
    assert [found[key]["state"] for key in keys[5:]] == ["removed", "removed", "no row"]
    others = {row["key"]: row for row in shown(job.where, "rare", "7", "-8", "9")["rows"]}
    assert others[7]["state"] == "row", "it was a candidate in the first save"
    assert others[-8] == {"key": -8, "state": "candidate", "pulls": 1.0}
    assert others[9]["state"] == "no row"


def test_an_export_has_every_row_once(job: Job, tmp_path: Path) -> None:
    rows = job.rows()
    done = exported(job.where, "seen", str(tmp_path / "seen.parquet"))
    table = pq.read_table(tmp_path / "seen.parquet")
    assert done["rows"] == table.num_rows == len(rows) == 950
    assert dict(zip(table["key"].to_pylist(), table["values"].to_pylist(), strict=True)) == rows
    exported(job.where, "seen", str(tmp_path / "seen.csv"))
    head, *lines = csv.reader((tmp_path / "seen.csv").read_text().splitlines())
    assert head == ["key", "v0", "v1", "v2"]
    assert {int(key): pytest.approx(list(map(float, row))) for key, *row in lines} == rows
    assert len(lines) == len(rows)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["saved", "seen.csv", "seen.parquet"]


@pytest.mark.parametrize("at_once", [1 << 28, 10_000])
def test_a_comparison_counts_what_differs(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(inspection, "AT_ONCE", at_once)  # the small one: in several passes
    (same,) = compared(job.where, job.where, "seen")["tables"]
    assert (same["rows"], same["only"], same["only_other"], same["changed"]) == (950, 0, 0, 0)
    assert same["largest"] == 0
    before = job.rows()
    job.where, job._last = str(tmp_path / "later"), None
    job.train(torch.cat([torch.arange(1, 11), torch.arange(5000, 5003)]))
    job.remove(torch.tensor([600, 601]))
    job.save(SaveMode.ALL)
    after = job.rows()
    (found,) = compared(str(tmp_path / "saved"), job.where, "seen")["tables"]
    assert (found["rows"], found["other"], found["only"], found["only_other"]) == (950, 951, 2, 3)
    apart = {
        key: [abs(a - b) for a, b in zip(before[key], after[key], strict=True)]
        for key in before.keys() & after
    }
    assert found["changed"] == sum(any(each) for each in apart.values()) == 10
    assert found["largest"] == pytest.approx(max(max(each) for each in apart.values()))
    assert found["mean"] == pytest.approx(sum(map(sum, apart.values())) / (3 * len(apart)))


def test_tables_of_other_servers_other_models_and_values_that_are_not_finite(tmp_path: Path) -> None:
    """Of one server and of two, one of which has no rows of `users` and has counted no update of it."""
    keys, one, two = list(range(40)), tmp_path / "one", tmp_path / "two"
    save(one, [[MemoryTable(USERS).put(keys, 1), MemoryTable(dense_spec(0, 60)).put([None], 3)]])
    homes = owners(torch.tensor(keys), 2).tolist()
    spread = [MemoryTable(USERS), MemoryTable(USERS)]
    for number, row in MemoryTable(USERS).put(keys, 1).rows.items():
        spread[homes[keys.index(number)]].rows[number] = row
    values, *state = spread[1].rows[keys[homes.index(1)]]
    spread[1].rows[keys[homes.index(1)]] = (torch.tensor([torch.nan, torch.inf, values[2]]), *state)
    spread[1].step = 7
    save(two, [[spread[0], MemoryTable(dense_spec(0, 30)).put([None], 3)], [spread[1], MemoryTable(LEAN)]])
    (users,) = (each for each in listed(str(two))["tables"] if each["table"] == "users")
    assert users["updates"] == 7
    lean, found = compared(str(one), str(two))["tables"]
    assert lean == {"table": "lean", "difference": f"not in {one}"}
    assert (found["rows"], found["other"], found["only"]) == (40, 40, 0)
    assert (found["changed"], found["not_finite"], found["largest"], found["mean"]) == (1, 1, 0, 0)
    assert len(inspection._rows(open_saves(two), USERS, 1, (0, 2))[0]) not in (0, homes.count(1)), (
        "parts are parts"
    )
    (_, same) = compared(str(two), str(two))["tables"]
    assert (same["changed"], same["not_finite"]) == (0, 1)


def test_a_check_finds_a_flipped_bit_a_cut_file_and_values_that_are_not_finite(job: Job) -> None:
    sound = checked(job.where)
    assert sound["problems"] == []
    assert sound["rows"] == 1000 + 152 + 1
    job.tables[0][0].apply(torch.tensor([4]), torch.full((1, 3), torch.nan), 1.0)
    job.save()
    (problem,) = checked(job.where)["problems"]
    wanted = "table 'seen' has 3 values that are not finite in the part of server 0 of save-"
    assert problem.startswith(wanted)
    files = sorted(Path(job.where).rglob("*.safetensors"))
    chosen = random.Random(0).choice(files)
    content = bytearray(chosen.read_bytes())
    content[len(content) // 2] ^= 1
    chosen.write_bytes(content)
    with pytest.raises(FleetError, match="is damaged"):
        checked(job.where)
    chosen.write_bytes(content[:-1])
    with pytest.raises(FleetError, match="was cut short"):
        checked(job.where)


@pytest.mark.parametrize(
    ("words", "usage", "said"),
    [
        (["show", "SAVED", "sean", "1"], True, "Table 'sean' does not exist in .*; did you mean 'seen'"),
        (["show", "SAVED", "seen", "x"], True, "Key 'x' is not a whole number"),
        (["show", "SAVED", "seen", str(2**63)], True, "does not fit into 64 bits"),
        (
            ["export", "SAVED", "seen", "a.txt"],
            True,
            r"a\.txt has no known format; its name .* \.csv, \.parquet",
        ),
        (
            ["export", "SAVED", "seen", "/nowhere/a.csv"],
            True,
            r"/nowhere/a\.csv cannot be written: No such file",
        ),
        (["list", "/nowhere"], False, "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_said(
    job: Job, capsys: pytest.CaptureFixture[str], words: list[str], usage: bool, said: str
) -> None:
    assert main([job.where if word == "SAVED" else word for word in words]) == 1
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["usage"] is usage
    with pytest.raises(FleetError, match=said):
        raise FleetError(document["error"])
