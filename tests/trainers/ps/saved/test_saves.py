"""Saves of N servers loaded onto M, chains of deltas, values, and what is left in the folder."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.owners import owners
from tests.support.stores import LOST, LossError, register
from tests.trainers.ps.saved.tables import (
    LEAN,
    USERS,
    WORDS,
    MemoryTable,
    dense_spec,
    load,
    same,
    save,
    spread,
    start,
)
from trainers.ps.saves.manifest import (
    MANIFEST,
    SaveMode,
    abandon_save,
    check_target,
    commit_save,
    current_manifest,
)
from trainers.ps.saves.read import RowOwner, load_tables, read_values
from trainers.ps.tables.spec import TableSpec, holders
from trainers.storage.errors import LoadError, SaveError
from trainers.storage.folder import open_folder

KEYS = [0, -1, 1, 2**63 - 1, -(2**63), *range(100, 260), *range(-(10**15), -(10**15) + 7)]


def model(servers: int, seed: int = 5) -> list[list[MemoryTable]]:
    """Two sparse tables everywhere, and a dense parameter of 60 elements in `servers` slices."""
    words, users = spread(WORDS, KEYS, servers, seed), spread(USERS, KEYS[:40], servers, seed + 1)
    whole = MemoryTable(dense_spec(0, 60)).put([None], seed).rows[None]
    tables = []
    for server in range(servers):
        spec = slice_of(server, servers)
        table = MemoryTable(spec)
        begin = 60 * server // servers
        table.rows[None] = tuple(column[begin : begin + spec.size] for column in whole)
        table.step = 17
        tables.append([table, words[server], users[server]])
    return tables


def slice_of(server: int, servers: int) -> TableSpec:
    return dense_spec(60 * server // servers, 60 * (server + 1) // servers)


def specs(servers: int) -> list[list[TableSpec]]:
    return [[slice_of(server, servers), WORDS, USERS] for server in range(servers)]


def test_rows_in_16_bits_are_saved_so_and_load_into_any_type(tmp_path):
    tables = spread(LEAN, KEYS, 2, 5)
    save(tmp_path, [[table] for table in tables])
    (first, *_) = tmp_path.glob("save-*/server-0-*.safetensors")
    assert {each.dtype for name, each in load_file(first).items() if name.endswith("values")} == {
        torch.bfloat16
    }
    assert '"dtype": "bfloat16"' in first.with_name("server-0.json").read_text()
    rows = {key: row for table in tables for key, row in table.rows.items()}
    ((again,),) = load(tmp_path, [[LEAN]])
    assert again.rows.keys() == rows.keys()
    for key, row in again.rows.items():
        assert all(torch.equal(one, other) for one, other in zip(row, rows[key], strict=True))
    values = read_values(tmp_path).sparse["lean"]
    assert values.values.dtype is torch.float32
    assert torch.equal(values.values[5], rows[int(values.keys[5])][0].float())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["folder", "memory"])
@pytest.mark.parametrize(
    ("before", "after"), [(1, 1), (1, 3), (3, 1), (2, 3), (3, 2), (2, 4), (6, 4), (3, 3)]
)
def test_a_save_of_n_servers_loads_onto_m(tmp_path, where, before, after):
    place = tmp_path / "save" if where == "folder" else f"memory://{tmp_path.name}/save"
    save(place, model(before))
    wanted = model(after)
    found = load(place, specs(after))
    assert all(
        same(a, b)
        for ours, theirs in zip(found, wanted, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    assert {table.step for tables in found for table in tables} == {17}
    for table in (table for tables in found for table in tables[1:]):
        off = abs(table.expected - len(table))
        assert off <= (0 if before % after == 0 else 8 + len(table) / 4), "rows to get memory for"


@pytest.mark.parametrize(
    ("before", "after"), [((1, 4), (1, 2)), ((1, 4), (0, 3)), ((2, 4), (3, 5)), ((0, 3), (1, 2))]
)
def test_rows_go_to_the_servers_that_share_their_table(tmp_path, before, after):
    """(how many share it, of how many); 0: all, as in saves of earlier versions."""

    def specs(count):
        tables = (WORDS, replace(WORDS, name="others"))
        return [replace(each, rows=replace(each.rows, servers=count)) for each in tables]

    def homes(spec, servers):
        place = holders(spec, servers)
        return {
            key: place[at]
            for key, at in zip(KEYS, owners(torch.tensor(KEYS), len(place)).tolist(), strict=True)
        }

    saved = [[MemoryTable(spec) for spec in specs(before[0])] for _ in range(before[1])]
    for number, spec in enumerate(specs(before[0])):
        for key, home in homes(spec, before[1]).items():
            saved[home][number].put([key], key % 999_983)
    save(tmp_path, saved)
    found = load(tmp_path, [specs(after[0])] * after[1])
    for number, spec in enumerate(specs(after[0])):
        assert {key: server for server, tables in enumerate(found) for key in tables[number].rows} == homes(
            spec, after[1]
        )


def test_keys_that_wait_for_a_row_are_saved_once_for_each_owner(tmp_path):
    tables = spread(WORDS, KEYS[:9], 2, 5)
    for key, count in ((1000, 2.0), (1001, 1.0), (1002, 3.0)):
        home = int(owners(torch.tensor([key]), 2))
        tables[home].waiting[key] = count, key - 999.0
    first = save(tmp_path, [[table] for table in tables])
    for table in tables:  # 1001 comes to have a row
        if table.waiting.pop(1001, None):
            table.put([1001], 3)
    save(tmp_path, [[table] for table in tables], SaveMode.DELTA, after=first.saves[-1].id)
    found = load(tmp_path, [[WORDS]] * 3)
    waiting = [table.waiting for (table,) in found]
    assert {key: each for part in waiting for key, each in part.items()} == {
        1000: (2.0, 1.0),
        1002: (3.0, 3.0),
    }
    homes = owners(torch.tensor([1000, 1002]), 3).tolist()
    assert [home for home, part in enumerate(waiting) for _ in part] == sorted(homes)


def test_a_save_without_rows_loads(tmp_path):
    save(tmp_path, [[MemoryTable(WORDS)], [MemoryTable(WORDS)]])
    assert [len(table) for (table,) in load(tmp_path, [[WORDS]])] == [0]


def test_the_files_are_safetensors(tmp_path):
    save(tmp_path, model(1))
    tensors = [load_file(file) for file in sorted(tmp_path.rglob("*.safetensors"))]
    names = [name for found in tensors for name in found]
    assert all(re.fullmatch(r"\S+/(rows|dense)/\d+/\S+", name) for name in names)
    keys = [found[name] for found in tensors for name in found if name.endswith("/keys") and "words" in name]
    assert sorted(torch.cat(keys).tolist()) == sorted(KEYS)
    assert len(tensors) > 5, "a large table is in several files"
    assert max(file.stat().st_size for file in tmp_path.rglob("*.safetensors")) < 5000


def test_small_tables_share_a_file(tmp_path):
    blocks = [MemoryTable(dense_spec(0, 8, f"layer{n}")).put([None], n) for n in range(50)]
    save(tmp_path, [blocks], shard_bytes=1 << 20)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    (found,) = load(tmp_path, [[block.spec for block in blocks]])
    assert all(map(same, found, blocks))


@pytest.mark.slow
def test_a_new_save_replaces_the_former(tmp_path):
    save(tmp_path, model(2, seed=1))
    save(tmp_path, model(3, seed=2), step=18)
    assert current_manifest(tmp_path).saves[0].step == 18
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        MANIFEST,
        current_manifest(tmp_path).saves[0].id,
    ]
    assert all(map(same, load(tmp_path, specs(1))[0], model(1, seed=2)[0]))


@pytest.mark.slow
def test_a_save_that_is_not_committed_changes_nothing(tmp_path):
    save(tmp_path, model(2, seed=1))
    id, _ = start(tmp_path, model(2, seed=2))
    assert all(map(same, load(tmp_path, specs(1))[0], model(1, seed=1)[0]))
    abandon_save(tmp_path, id)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        MANIFEST,
        current_manifest(tmp_path).saves[0].id,
    ]


def test_a_save_whose_manifest_was_written_in_spite_of_an_error_counts():
    """The former one stays too: after an error the new manifest may not outlive a power failure."""
    register()
    where = "lossy://saves"
    LOST[:] = [""]
    save(where, model(1, seed=1))
    former = current_manifest(where).saves[0].id
    for lost, error in (("request", LossError), ("reply", None)):
        id, parts = start(where, model(1, seed=2))
        LOST[:] = [lost]
        with pytest.raises(error) if error else nullcontext():
            assert commit_save(where, id, SaveMode.ALL, 17, parts) is False
        LOST[:] = [""]
        assert current_manifest(where).saves[0].id == (former if error else id)
        assert {former, id} <= set(open_folder(where).names())
    assert all(map(same, load(where, specs(1))[0], model(1, seed=2)[0]))
    id, parts = start(where, model(1, seed=3))
    assert commit_save(where, id, SaveMode.ALL, 17, parts) is True
    assert open_folder(where).names() == [MANIFEST, id]


def test_the_current_save_is_not_abandoned(tmp_path):
    manifest = save(tmp_path, model(1))
    abandon_save(tmp_path, manifest.saves[0].id)
    assert all(map(same, load(tmp_path, specs(1))[0], model(1)[0]))


@pytest.mark.slow
def test_a_save_with_a_part_missing_is_not_committed(tmp_path):
    save(tmp_path, model(2, seed=1))
    id, parts = start(tmp_path, model(2, seed=2))
    (tmp_path / id / "server-1.json").unlink()
    with pytest.raises(SaveError, match=r"server-1\.json"):
        commit_save(tmp_path, id, SaveMode.ALL, 17, parts)
    assert all(map(same, load(tmp_path, specs(1))[0], model(1, seed=1)[0]))


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_save_and_its_deltas_load_as_one(tmp_path, after):
    tables = model(2)
    manifest = save(tmp_path, tables)
    for step in (18, 19):
        for server in tables:
            server[0].put([None], step)
            server[1].put(list(server[1].rows)[:5], step)
            server[2].step = step
        last = manifest.saves[-1].id
        manifest = save(tmp_path, tables, SaveMode.DELTA, after=last, step=step)
    assert [save.mode for save in manifest.saves] == [0, 1, 1]
    sizes = [sum(f.stat().st_size for f in (tmp_path / save.id).iterdir()) for save in manifest.saves]
    assert sizes[1] < sizes[0] / 3, "a delta has the changed rows only"
    found = load(tmp_path, specs(after))
    merged = {key: row for server in tables for key, row in server[1].rows.items()}
    ours = {key: row for server in found for key, row in server[1].rows.items()}
    assert merged.keys() == ours.keys()
    assert all(torch.equal(a, b) for key in merged for a, b in zip(merged[key], ours[key], strict=True))
    dense = torch.cat([server[0].rows[None][0] for server in found])
    assert torch.equal(dense, torch.cat([server[0].rows[None][0] for server in tables]))
    assert found[0][2].step == 19


@pytest.mark.slow
def test_a_delta_follows_the_last_save_only(tmp_path):
    with pytest.raises(SaveError, match=r"has no save.*mode 0"):
        check_target(tmp_path, SaveMode.DELTA)
    first = save(tmp_path, model(1)).saves[-1].id
    second = save(tmp_path, model(1)).saves[-1].id
    assert check_target(tmp_path, SaveMode.DELTA) == [second]
    with pytest.raises(SaveError, match=rf"since {first}.*last save in .* is now {second}"):
        save(tmp_path, model(1), SaveMode.DELTA, after=first)
    save(tmp_path, model(1), SaveMode.DELTA, after=second)


def test_a_chain_with_a_link_missing_is_an_error(tmp_path):
    tables = model(1)
    first = save(tmp_path, tables)
    second = save(tmp_path, tables, SaveMode.DELTA, after=first.saves[-1].id)
    for file in (tmp_path / first.saves[0].id).iterdir():
        file.unlink()
    assert second.saves[0].id == first.saves[0].id
    with pytest.raises(LoadError, match=rf"{first.saves[0].id}.*missing"):
        load(tmp_path, specs(1))


def test_values_only(tmp_path):
    tables = model(2)
    save(tmp_path, tables, SaveMode.VALUES)
    values = read_values(tmp_path)
    merged = {key: row[0] for server in tables for key, row in server[1].rows.items()}
    assert values.sparse["words"].keys.tolist() == sorted(merged)
    assert torch.equal(values.sparse["words"].values, torch.stack([merged[key] for key in sorted(merged)]))
    assert torch.equal(values.dense["fc.weight"], torch.cat([server[0].rows[None][0] for server in tables]))
    tensors = [name for file in tmp_path.rglob("*.safetensors") for name in load_file(file)]
    assert {name.rpartition("/")[2] for name in tensors} == {"keys", "values"}


def test_training_goes_on_from_values_with_fresh_state(tmp_path):
    save(tmp_path, model(2), SaveMode.VALUES)
    ((dense, words, users),) = load(tmp_path, specs(1))
    assert (dense.step, len(words), len(users)) == (0, len(KEYS), 40)
    wanted = model(1)[0][1].rows
    for key, (values, mean, square, statistics) in words.rows.items():
        assert torch.equal(values, wanted[key][0])
        assert not mean.any()
        assert not square.any()
        assert not statistics.any()


def test_values_do_not_replace_a_save_to_train_from(tmp_path):
    save(tmp_path, model(1))
    with pytest.raises(SaveError, match="another directory"):
        check_target(tmp_path, SaveMode.VALUES)


def test_read_values_applies_deltas(tmp_path):
    tables = model(2)
    first = save(tmp_path, tables)
    for server in tables:
        server[1].put(list(server[1].rows)[:5], 99)
    save(tmp_path, tables, SaveMode.DELTA, after=first.saves[-1].id)
    merged = {key: row[0] for server in tables for key, row in server[1].rows.items()}
    found = read_values(tmp_path).sparse["words"]
    assert found.keys.tolist() == sorted(merged)
    assert torch.equal(found.values, torch.stack([merged[key] for key in sorted(merged)]))


def test_a_server_reads_only_files_with_rows_that_may_be_its_own(tmp_path):
    manifest = save(tmp_path, [[table] for table in spread(WORDS, KEYS, 2, 5)])
    for file in (Path(tmp_path) / manifest.saves[0].id).glob("server-1-*.safetensors"):
        file.write_bytes(b"not a shard")
    table = MemoryTable(WORDS)
    load_tables(tmp_path, [table], RowOwner(2, 4))
    assert len(table)
    with pytest.raises(LoadError, match="server-1-00000"):
        load_tables(tmp_path, [MemoryTable(WORDS)], RowOwner(1, 4))


LIMITED = """
import pathlib
import resource
import sys
import torch
from trainers.ps.saves.manifest import SaveMode
from trainers.ps.saves.write import SaveSpec, SaveTask, cut_tables
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import make_table
from trainers.ps.tables.spec import TableKind, TableSpec

torch.set_num_threads(1)
table = make_table(TableSpec(kind=TableKind.SPARSE, name="t", size=64, rule=SGD()))
table.pull(torch.arange(50_000))
cuts = cut_tables([table], SaveMode.ALL)
cuts[0].cut.expect(0)
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, ((int(sys.argv[2]) << 20) + 4096 * pages,) * 2)
try:
    spec = SaveSpec(id="1", mode=SaveMode.ALL, server=0, servers=1)
    SaveTask(sys.argv[1], spec, cuts).result()
    print("saved")
except Exception as error:
    print(repr(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", [150, 100])
def test_a_save_takes_smaller_blocks_where_memory_is_short(tmp_path: Path, room: int) -> None:
    """By default three blocks of 64 MiB, and some for its threads."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(room)],
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "saved\n", done.stderr
