"""What is not loaded, and what the error says; saves that fail or are given up."""

import json
import os
import random
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from tests.support.isolated import in_fork
from tests.support.waiting import eventually
from tests.trainers.ps.saved.tables import (
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
from trainers.errors import UsageError
from trainers.ps.saves.manifest import (
    MANIFEST,
    VERSION,
    SaveMode,
    check_target,
    commit_save,
    current_manifest,
)
from trainers.ps.saves.read import check_fit, check_small, read_values
from trainers.ps.saves.write import CancelledError, SaveSpec, SaveTask, TableCut
from trainers.ps.tables.rules import SGD, Adagrad, Adam
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.tables.storage import SparseRows
from trainers.storage.errors import LoadError, SaveError
from trainers.storage.folder import open_folder
from trainers.storage.safetensors import SafetensorsError, pack, unpack

ROOT = Path(__file__).resolve().parents[4]
KEYS = list(range(60))


@pytest.fixture
def saved(tmp_path):
    save(
        tmp_path,
        [[words, MemoryTable(dense_spec(0, 9)).put([None], 1)] for words in spread(WORDS, KEYS, 1, 5)],
    )
    return tmp_path


def specs(words=WORDS, dense=None):
    return [[words, dense or dense_spec(0, 9)]]


def test_the_fixture_loads(saved):
    ((words, _),) = load(saved, specs())
    assert same(words, spread(WORDS, KEYS, 1, 5)[0])


def test_a_folder_without_a_save(tmp_path):
    with pytest.raises(LoadError, match="nowhere"):
        load(tmp_path / "nowhere", specs())


def test_an_interrupted_save_is_named(tmp_path):
    id, _ = start(tmp_path, [[MemoryTable(WORDS)]])
    with pytest.raises(LoadError, match=rf"no manifest\.json.*The save {id} was interrupted.*{id}"):
        load(tmp_path, specs())


def test_a_missing_file_is_named(saved):
    file = sorted(saved.rglob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(LoadError, match=f"{file} is missing"):
        load(saved, specs())


def test_a_file_that_was_cut_off_is_named_even_without_checksums(saved):
    file = sorted(saved.rglob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(LoadError, match=rf"{file} has \d+ bytes"):
        read_values(saved, verify=False)


@pytest.mark.slow
def test_any_flipped_bit_is_noticed(saved):
    files = [file for file in saved.rglob("*") if file.is_file()]
    chance = random.Random(5)
    wanted = load(saved, specs())[0]
    for _ in range(300):
        file = chance.choice(files)
        content = file.read_bytes()
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            # A bit of a blank in JSON may mean nothing; then what is loaded is what was saved.
            found = load(saved, specs())[0]
            assert file.suffix == ".json"
            assert all(map(same, found, wanted))
        except LoadError as error:
            assert file.name in str(error)  # noqa: PT017  # some flips are harmless, so none is required here
        file.write_bytes(content)


def test_a_wrong_checksum_names_the_file_and_both_sums(saved):
    file = sorted(saved.rglob("*.safetensors"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    digest = xxhash.xxh3_64_hexdigest(content)
    with pytest.raises(LoadError, match=rf"{file} is damaged: its checksum \(xxh3-64\) is {digest}"):
        load(saved, specs())


def resealed(file: Path, change) -> None:
    """Edit a manifest and give it a right checksum, as another program would write it."""
    body = json.loads(file.read_text())
    change(body)
    inner = {key: value for key, value in body.items() if key not in ("format", "version", "checksum")}
    text = json.dumps(inner, sort_keys=True, separators=(",", ":"))
    file.write_text(json.dumps({**body, "checksum": xxhash.xxh3_64_hexdigest(text.encode())}))


@pytest.mark.parametrize(
    "name", ["../outside.json", "/etc/passwd", "a/b", ".hidden", "", "..", "a\0b", "x" * 300, 7, None]
)
def test_names_that_leave_the_folder_are_refused(saved, name):
    resealed(saved / MANIFEST, lambda body: body["saves"][0]["parts"][0].update(name=name))
    with pytest.raises(LoadError, match="valid file name"):
        load(saved, specs())
    resealed(saved / MANIFEST, lambda body: body["saves"][0].update(id=name))
    with pytest.raises(LoadError, match="valid file name"):
        load(saved, specs())


def test_a_link_in_place_of_a_file_is_not_followed(saved, tmp_path):
    file = sorted(saved.rglob("*.safetensors"))[0]
    moved = tmp_path / "moved"
    file.rename(moved)
    file.symlink_to(moved)
    with pytest.raises(LoadError, match=f"{file}"):
        load(saved, specs())


def test_a_newer_format_is_refused(saved):
    resealed(saved / MANIFEST, lambda body: body.update(version=VERSION + 1))
    with pytest.raises(LoadError, match=f"version is {VERSION + 1}"):
        load(saved, specs())
    with pytest.raises(SaveError, match=f"version is {VERSION + 1}"):
        check_target(saved, SaveMode.ALL)


def test_another_row_length_says_both(saved):
    with pytest.raises(
        LoadError, match=r"'words' .* rows of 4, but in this model it is sparse with rows of 5"
    ):
        load(saved, specs(replace(WORDS, size=5)))


def test_another_rule_says_both(saved):
    with pytest.raises(LoadError, match=r"'words'.*Adam\(.*Adagrad\("):
        load(saved, specs(replace(WORDS, rule=Adagrad())))
    assert load(saved, specs(replace(WORDS, rule=Adam(weight_decay=0.1))))


def test_momentum_that_was_not_saved_is_another_rule(tmp_path):
    save(tmp_path, [[MemoryTable(replace(USERS, rule=SGD())).put(KEYS, 1)]])
    with pytest.raises(LoadError, match=r"SGD\(momentum=0.0.*SGD\(momentum=0.9"):
        load(tmp_path, [[replace(USERS, rule=SGD(momentum=0.9))]])


def test_other_tables_say_both(saved):
    with pytest.raises(LoadError, match=r"saved tables: 'users'. .*model: 'words'"):
        load(saved, specs(USERS))


def test_a_dense_parameter_of_another_size(saved):
    with pytest.raises(LoadError, match=r"'fc.weight' .* dense with 9 elements, .* dense with 12"):
        load(saved, specs(dense=dense_spec(0, 12)))


def test_a_server_may_have_a_part_of_the_dense_parameters():
    mine, theirs = [dense_spec(0, 5, "a")], [dense_spec(0, 5, "a"), dense_spec(0, 5, "b")]
    check_fit(theirs, mine, "there", values_only=False)
    check_fit(mine, [dense_spec(0, 4, "a")], "there", values_only=False)
    with pytest.raises(LoadError, match="dense with 5 elements, but in this model it is dense with 6"):
        check_fit(mine, [dense_spec(0, 6, "a")], "there", values_only=False)


def test_statistics_come_and_go_with_the_model(saved):
    without = replace(WORDS, rows=replace(WORDS.rows, statistics=False))
    ((words, _),) = load(saved, specs(without))
    assert len(words.rows[0]) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x07",
        b"\xff" * 8,
        (1 << 20).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        *(
            len(header).to_bytes(8, "little") + header + bytes(64)
            for header in (
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99]}}',
                b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,15]}}',
                b'{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
                b'{"a":{"dtype":"F32","shape":[-2,-2],"data_offsets":[0,16]}}',
                b'{"a":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}',
                b'{"a":{"dtype":"F32","data_offsets":[0,16]}}',
                b'{"a":[1]}',
                b'{"a":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}}',
            )
        ),
    ],
)
def test_bytes_that_are_no_container_are_refused(content):
    with pytest.raises(SafetensorsError):
        unpack(torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0).byte())


def test_a_container_comes_back():
    tensors = {
        "a": torch.arange(5, dtype=torch.float32),
        "b": torch.arange(3),
        "c": torch.empty(0, 7),
        "d": torch.ones(2, 3),
    }
    content = bytearray().join(pack(tensors, {"save": "x"}))
    found = unpack(torch.frombuffer(content, dtype=torch.uint8))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


class Endless:
    """A cut that does not end within the life of a test."""

    def __init__(self) -> None:
        self.rows, self.step = 1 << 30, 1
        self.saved: bool | None = None

    def read(self, start: int, stop: int) -> SparseRows:
        return SparseRows(
            torch.arange(start, stop), torch.zeros(stop - start, 3), (torch.zeros(stop - start, 3),)
        )

    def close(self, *, saved: bool = True) -> None:
        self.saved = saved


def test_a_save_can_be_given_up(saved):
    cut = Endless()
    woken = threading.Event()
    order = SaveSpec(id="save-9", mode=SaveMode.ALL, server=0, servers=1, shard_bytes=4000)
    task = SaveTask(saved, order, [TableCut(USERS, cut)], done=lambda _: woken.set())
    eventually(lambda: task.packed > 0)
    assert not task.ended
    task.cancel()
    assert woken.wait(60)
    with pytest.raises(CancelledError, match="abandoned"):
        task.result()
    task.close(saved=False)
    assert cut.saved is False
    assert not list((saved / "save-9").iterdir())
    assert load(saved, specs())


def test_an_order_that_makes_no_sense():
    with pytest.raises(SaveError):
        SaveSpec(id="../x", mode=SaveMode.ALL, server=0, servers=1)
    with pytest.raises(SaveError):
        SaveSpec(id="x", mode=SaveMode.ALL, server=2, servers=2)


def test_a_place_that_nobody_can_open():
    with pytest.raises(UsageError, match="nonsense"):
        open_folder("nonsense://x")
    with pytest.raises(UsageError, match="empty"):
        open_folder("")


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="failed and was removed"):
        start(tmp_path / "file", [[MemoryTable(WORDS)]])


def unprivileged(forbidden: Path, closed: Path) -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    os.nice(19)  # whose saves may not ask for a better place
    with pytest.raises(SaveError, match="No permission to save"):
        start(forbidden, [[MemoryTable(WORDS)]])
    with pytest.raises(LoadError, match="No permission to read"):
        current_manifest(closed)


@pytest.mark.slow
def test_permissions():
    """Root may write everywhere, so it becomes somebody else first."""
    with tempfile.TemporaryDirectory() as name:
        closed, forbidden = Path(name) / "closed", Path(name) / "forbidden"
        save(closed, [[MemoryTable(WORDS)]])
        (closed / MANIFEST).chmod(0)
        forbidden.mkdir(mode=0o555)
        Path(name).chmod(0o755)
        in_fork(unprivileged, forbidden, closed)


def full(where: Path) -> None:
    import resource

    tables = [[table] for table in spread(WORDS, list(range(500)), 1, 1)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(SaveError, match=rf"{where}.*[\d.]+ MB are free"):
        start(where, tables, shard_bytes=1 << 20)


@pytest.mark.slow
def test_a_full_disk_leaves_the_former_save(saved):
    before = sorted(path for path in saved.rglob("*") if path.is_file())
    in_fork(full, saved)
    assert sorted(path for path in saved.rglob("*") if path.is_file()) == before
    assert load(saved, specs())


def test_read_values_of_a_damaged_save(saved):
    file = sorted(saved.rglob("*.safetensors"))[1]
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(LoadError, match=file.name):
        read_values(saved)
    with pytest.raises(LoadError, match="not a safetensors file"):
        read_values(saved, verify=False)


def test_commit_needs_every_server(tmp_path):
    id, parts = start(tmp_path, [[table] for table in spread(WORDS, KEYS, 2, 5)])
    with pytest.raises(SaveError, match="server 0 of 2, but server 0 of 1"):
        commit_save(tmp_path, id, SaveMode.ALL, 17, parts[:1])
    with pytest.raises(SaveError, match=r"server-1\.json differs from the file that server 0 wrote"):
        commit_save(tmp_path, id, SaveMode.ALL, 17, parts[::-1])
    commit_save(tmp_path, id, SaveMode.ALL, 17, parts)


def test_a_smaller_model_is_not_filled_with_a_part_of_a_larger_one() -> None:
    def dense(name: str, size: int) -> TableSpec:
        return TableSpec(kind=TableKind.DENSE, name=name, size=size, rule=SGD())

    saved = [dense("w[0:16800]", 16800), dense("b[0:2100]", 2100)]
    with pytest.raises(LoadError, match=r"'b' of here is dense with 2100 elements, but in this model .* 7 "):
        check_small(saved, [dense("b[0:7]", 7)], "here")
    check_small(saved, [dense("b[0:2100]", 2100), dense("w[0:8400]", 8400)], "here")
