"""The durable folder: crashes between any two steps of a snapshot, whose folder it is, full disks."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from tests.support.isolated import in_fork
from tests.trainers.ps.durable.frames import SPECS, State, recovered, request
from trainers.errors import UsageError
from trainers.ps.durable.durable import OWNER_VERSION, DurableFolder
from trainers.ps.durable.journal import DamagedError, DurabilityError
from trainers.ps.kernels.rows import NOT_IN_SNAPSHOT
from trainers.ps.tables.sparse import make_table
from trainers.storage.errors import SaveError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]


def opened(where: Path, fsync="no", job: str = "one", server: int = 0) -> DurableFolder:
    return DurableFolder(where, job=job, server=server, fsync=fsync)


def push(durable: DurableFolder, state: State, count: int) -> None:
    for _ in range(count):
        frames = request(state.count)
        durable.append(frames)
        state.apply(frames)


def snapshot(durable: DurableFolder, state: State) -> None:
    durable.begin_snapshot(state.count, state.tables, state.blob, shard_bytes=6000).wait()
    ended = durable.end_snapshot()
    assert ended is not None
    ended.result()


def digest_in(where: Path) -> str:
    durable = opened(where)
    try:
        return recovered(durable).digest()
    finally:
        durable.close()


def names(where: Path) -> list[str]:
    found = [path.name for path in (where / "server-0").iterdir()]
    return sorted(name for name in found if name.startswith(("journal", "snapshot")))


@pytest.fixture(params=["whole", "changes"])
def steps(tmp_path, request):
    """Folders as of before, and after, a second snapshot: (before, after, the state's digest)."""
    live = tmp_path / "live"
    durable = opened(live)
    state = recovered(durable)
    push(durable, state, 20)
    snapshot(durable, state)
    push(durable, state, 10)
    if request.param == "whole":  # the first of a process
        durable.close()
        durable = opened(live)
        state = recovered(durable)
    shutil.copytree(live, tmp_path / "before")
    snapshot(durable, state)
    shutil.copytree(live, tmp_path / "after")
    durable.close()
    return tmp_path / "before", tmp_path / "after", State().up_to(30).digest()


def saves_in(where: Path) -> list[str]:
    """The names of saves, in the folders of snapshots."""
    return sorted(path.name for path in where.glob("server-0/snapshot-*/save-*"))


def test_state_comes_back_from_snapshot_and_journal(steps):
    before, after, digest = steps
    assert names(before) == [f"journal-{20:020d}.log", f"snapshot-{20:020d}"]
    assert names(after) in (
        [f"journal-{30:020d}.log", f"snapshot-{30:020d}"],
        [f"journal-{30:020d}.log", f"snapshot-{20:020d}"],  # of which the last has the changes
    )
    assert digest_in(before) == digest_in(after) == digest


def test_a_crash_after_the_rotation(steps):
    before, after, digest = steps
    shutil.copy(after / "server-0" / f"journal-{30:020d}.log", before / "server-0")
    assert digest_in(before) == digest


def test_a_crash_before_any_file_or_the_manifest_of_the_snapshot(steps):
    before, after, digest = steps
    shutil.copy(after / "server-0" / f"journal-{30:020d}.log", before / "server-0")
    (last,) = set(saves_in(after)) - set(saves_in(before))
    (complete,) = after.glob(f"server-0/snapshot-*/{last}")
    files = sorted(complete.iterdir())
    for count in range(len(files)):
        partial = before / complete.relative_to(after)
        partial.mkdir(parents=True, exist_ok=True)
        for file in files[:count]:
            shutil.copy(file, partial)
        assert digest_in(before) == digest
    durable = opened(before)
    snapshot(durable, recovered(durable))
    durable.close()
    assert len(saves_in(before)) == 1
    assert last not in saves_in(before)
    assert digest_in(before) == digest


def test_a_crash_before_anything_was_removed(steps):
    before, after, digest = steps
    for path in (before / "server-0").glob("journal-*"):
        shutil.copy(path, after / "server-0")
    for path in (before / "server-0").glob("snapshot-*"):
        if not (after / "server-0" / path.name).exists():
            shutil.copytree(path, after / "server-0" / path.name)
    assert digest_in(after) == digest
    durable = opened(after)
    state = recovered(durable)
    snapshot(durable, state)
    push(durable, state, 1)
    snapshot(durable, state)
    durable.close()
    assert names(after) == [f"journal-{31:020d}.log", f"snapshot-{30:020d}"], "the next snapshot cleans up"


def test_pushes_while_a_snapshot_is_written_are_in_the_journal(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 50)
    task = durable.begin_snapshot(state.count, state.tables, state.blob, shard_bytes=100)
    push(durable, state, 25)
    task.wait()
    durable.end_snapshot()
    durable.close()
    assert digest_in(tmp_path) == State().up_to(75).digest()


def test_two_snapshots_of_the_same_moment(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 5)
    snapshot(durable, state)
    snapshot(durable, state)
    durable.close()
    assert digest_in(tmp_path) == State().up_to(5).digest()


def test_one_snapshot_at_a_time(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    durable.begin_snapshot(0, state.tables, b"").wait()
    assert durable.snapshotting
    with pytest.raises(UsageError, match="end_snapshot"):
        durable.begin_snapshot(0, state.tables, b"")
    assert durable.end_snapshot() is not None
    assert durable.end_snapshot() is None
    durable.close()


def test_the_tables_of_a_snapshot_are_described(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 5)
    snapshot(durable, state)
    durable.close()
    durable = opened(tmp_path)
    assert durable.snapshot is not None
    assert durable.snapshot.number == 5
    tables = [make_table(spec) for spec in durable.snapshot.specs.values()]
    assert {table.spec for table in tables} == set(SPECS)
    durable.snapshot.load(tables)
    durable.close()


def test_snapshots_without_a_journal(tmp_path):
    durable = opened(tmp_path, fsync=None)
    state = recovered(durable)
    for _ in range(3):
        push(durable, state, 5)
        snapshot(durable, state)
    push(durable, state, 4)
    durable.close()
    durable = opened(tmp_path, fsync=None)
    assert recovered(durable).digest() == State().up_to(15).digest()
    durable.close()
    assert len(names(tmp_path)) == 1


def test_snapshots_have_what_has_changed_until_that_is_as_much_as_a_whole_one(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    state.sparse.assign(torch.arange(8_000), torch.ones(8_000, 4))
    bases, sizes = [], []
    for _ in range(60):
        push(durable, state, 1)
        task = durable.begin_snapshot(state.count, state.tables, state.blob)
        push(durable, state, 1)
        task.wait()
        durable.end_snapshot()
        bases.append(names(tmp_path)[-1])
        sizes.append(task.packed)
        if state.count % 14 == 0:  # from another process, as after a kill
            copy = tmp_path / "copy" / str(state.count)
            shutil.copytree(tmp_path / "server-0", copy / "server-0")
            twin = State()
            twin.sparse.assign(torch.arange(8_000), torch.ones(8_000, 4))
            assert digest_in(copy) == twin.up_to(state.count).digest()
    durable.close()
    whole = [size for number, size in enumerate(sizes) if bases[number] not in bases[:number]]
    changes = [size for number, size in enumerate(sizes) if bases[number] in bases[:number]]
    assert max(changes) < min(whole) / 10
    assert len(whole) > 2
    assert sum(changes) < len(whole) * (max(whole) + max(changes))


def test_after_a_snapshot_that_failed_the_next_is_whole(tmp_path, monkeypatch):
    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 20)
    snapshot(durable, state)
    push(durable, state, 1)
    with monkeypatch.context() as patch:
        patch.setattr("trainers.ps.durable.durable.sync_folder", lambda _: os.fsync(1 << 20))
        with pytest.raises(SaveError):
            snapshot(durable, state)
    push(durable, state, 1)
    snapshot(durable, state)
    push(durable, state, 1)
    durable.close()
    assert len(saves_in(tmp_path)) == 1
    assert digest_in(tmp_path) == State().up_to(23).digest()


def test_where_too_many_rows_were_removed_a_snapshot_is_whole(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 20)
    snapshot(durable, state)
    while state.count < 2000 and state.bounded.reports_removed(NOT_IN_SNAPSHOT):
        push(durable, state, 10)
    assert state.count < 2000
    snapshot(durable, state)
    assert len(saves_in(tmp_path)) == 1
    push(durable, state, 1)
    snapshot(durable, state)
    durable.close()
    assert len(saves_in(tmp_path)) == 2
    assert digest_in(tmp_path) == State().up_to(state.count).digest()


def test_a_damaged_snapshot_is_refused(steps):
    _, after, _ = steps
    for file in (after / "server-0").rglob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(DamagedError, match=r"safetensors is damaged"):
        digest_in(after)


def test_closing_gives_up_a_snapshot(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 30)
    durable.begin_snapshot(state.count, state.tables, state.blob, shard_bytes=1)
    durable.close()
    assert digest_in(tmp_path) == State().up_to(30).digest()


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path):
    durable = opened(tmp_path)
    with pytest.raises(DurabilityError, match=r"Another process uses .*server-0"):
        opened(tmp_path)
    opened(tmp_path, server=1).close()
    durable.close()
    opened(tmp_path).close()


def test_a_folder_of_another_job_is_refused(tmp_path):
    opened(tmp_path, job="sync training, 2 trainers").close()
    with pytest.raises(DurabilityError, match=r"2 trainers'.*'other'.*another durability_dir"):
        opened(tmp_path, job="other")
    with pytest.raises(DurabilityError, match="snapshots only"):
        opened(tmp_path, job="sync training, 2 trainers", fsync=None)
    opened(tmp_path, job="sync training, 2 trainers").close()


def test_the_folder_of_another_version_is_refused(tmp_path):
    opened(tmp_path).close()
    file = tmp_path / "server-0" / "owner.json"
    file.write_text(file.read_text().replace(f'"version": {OWNER_VERSION}', '"version": 9'))
    with pytest.raises(DurabilityError, match="format 9"):
        opened(tmp_path)


def test_a_damaged_owner_is_refused_by_its_path(tmp_path):
    opened(tmp_path).close()
    file = tmp_path / "server-0" / "owner.json"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(DamagedError, match=f"{file} is damaged.* remove {file.parent}\\.$"):
        opened(tmp_path)


def test_a_url_is_no_durable_folder(tmp_path):
    with pytest.raises(UsageError, match="directory of this node"):
        DurableFolder("s3://bucket/x", job="a", server=0, fsync="no")


def test_a_job_that_is_over_leaves_nothing(tmp_path):
    durable = opened(tmp_path)
    push(durable, recovered(durable), 3)
    durable.discard()
    assert list(tmp_path.iterdir()) == []
    durable = opened(tmp_path)
    assert recovered(durable).count == 0
    durable.close()


def test_a_job_that_is_over_in_the_middle_of_a_snapshot_leaves_nothing(tmp_path):
    """The snapshot's thread must not make the folder again."""
    for number in range(40):
        where = tmp_path / str(number)
        durable = opened(where)
        state = recovered(durable)
        push(durable, state, 3)
        durable.begin_snapshot(state.count, state.tables, state.blob, shard_bytes=300)
        durable.discard()
        assert list(where.iterdir()) == []


def test_a_snapshot_whose_thread_cannot_start_loses_nothing(tmp_path, monkeypatch):
    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # what CPython raises

    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        with pytest.raises(MemoryError, match="cannot start a thread"):
            durable.begin_snapshot(state.count, state.tables, state.blob)
    push(durable, state, 3)
    snapshot(durable, state)
    push(durable, state, 3)
    durable.close()
    assert digest_in(tmp_path) == state.digest()


def full(where: Path) -> None:
    """Snapshots fail for want of room; pushes go on, and nothing is lost."""
    import resource

    durable = opened(where)
    state = recovered(durable)
    push(durable, state, 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))
    durable.begin_snapshot(state.count, state.tables, state.blob).wait()
    ended = durable.end_snapshot()
    assert ended is not None
    with pytest.raises(SaveError, match=r"MB are free"):
        ended.result()
    assert not list(where.rglob("*.safetensors"))
    push(durable, state, 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    push(durable, state, 3)
    durable.close()
    assert digest_in(where) == State().up_to(46).digest()
    durable = opened(where)
    state = recovered(durable)
    snapshot(durable, state)
    durable.close()
    assert digest_in(where) == State().up_to(46).digest()


def test_a_snapshot_that_finds_no_room_loses_nothing(tmp_path):
    in_fork(full, tmp_path)


def test_a_table_that_is_new_has_a_whole_snapshot(tmp_path):
    durable = opened(tmp_path)
    state = recovered(durable)
    push(durable, state, 3)
    durable.begin_snapshot(3, state.tables[:1], state.blob).wait()
    durable.end_snapshot()
    snapshot(durable, state)
    assert len(saves_in(tmp_path)) == 1
    durable.close()
    assert digest_in(tmp_path) == State().up_to(3).digest()
