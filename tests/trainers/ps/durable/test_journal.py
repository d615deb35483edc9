"""The journal's files: what comes back, torn tails, damage, full disks."""

import os
import random
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.isolated import in_fork
from tests.support.waiting import eventually
from trainers.ps.durable.journal import (
    DamagedError,
    DurabilityError,
    Fsync,
    Journal,
    JournalFullError,
    JournalSync,
    file_head,
    journal_files,
    journal_path,
    recover_records,
)

ROOT = Path(__file__).resolve().parents[4]


def frames(number: int) -> list[bytes]:
    """Any number of frames of any length, none and empty ones among them."""
    chance = random.Random(number)
    return [chance.randbytes(chance.choice((0, 1, 7, 60))) for _ in range(number % 4)]


def opened(folder: Path, fsync: Fsync = "no", start: int = 0) -> tuple[Journal, list[list[bytes]]]:
    journal = Journal(folder, fsync)
    return journal, [[bytes(frame) for frame in record] for record in recover_records(folder, start, journal)]


def written(folder: Path, count: int, rotate_at: tuple[int, ...] = ()) -> None:
    journal, found = opened(folder)
    for number in range(len(found), count):
        if number in rotate_at:
            journal.rotate()
        assert journal.append(frames(number)) == number
    journal.close()


@pytest.mark.parametrize("fsync", ["no", "everysec", "always"])
def test_what_was_appended_comes_back_in_order(tmp_path, fsync):
    journal, found = opened(tmp_path, fsync)
    assert found == []
    for number in range(40):
        journal.append([memoryview(bytearray(frame)) for frame in frames(number)])
    journal.close()
    journal, found = opened(tmp_path, fsync)
    assert found == [frames(number) for number in range(40)]
    assert journal.append([b"more"]) == 40
    journal.close()
    assert opened(tmp_path)[1][40:] == [[b"more"]]


def test_frames_of_a_record_are_writable_memory_of_their_own(tmp_path):
    written(tmp_path, 8)
    journal = Journal(tmp_path, "no")
    records = list(recover_records(tmp_path, 0, journal))
    records[3][0][:1] = b"x"
    assert [bytes(frame) for frame in records[7]] == frames(7)


def test_a_record_of_many_frames_and_bytes(tmp_path):
    journal, _ = opened(tmp_path)
    many = [bytes([number % 256]) * 3 for number in range(5000)]
    large = [b"a" * (9 << 20), b"b" * 100]
    journal.append(many)
    journal.append(large)
    journal.close()
    assert opened(tmp_path)[1] == [many, large]


def test_several_files_are_one_sequence(tmp_path):
    written(tmp_path, 30, rotate_at=(10, 17))
    assert [first for first, _ in journal_files(tmp_path)] == [0, 10, 17]
    assert opened(tmp_path)[1] == [frames(number) for number in range(30)]
    assert opened(tmp_path, start=17)[1] == [frames(number) for number in range(17, 30)]
    assert opened(tmp_path, start=12)[1] == [frames(number) for number in range(12, 30)]


def test_rotating_an_empty_file_does_nothing(tmp_path):
    journal, _ = opened(tmp_path)
    assert journal.rotate() == 0
    journal.append([b"a"])
    assert (journal.rotate(), journal.rotate()) == (1, 1)
    assert [first for first, _ in journal_files(tmp_path)] == [0, 1]


def test_files_before_a_number_are_removed_but_not_the_last(tmp_path):
    written(tmp_path, 30, rotate_at=(10, 17))
    journal, _ = opened(tmp_path)
    journal.remove_before(16)
    assert [first for first, _ in journal_files(tmp_path)] == [10, 17]
    journal.remove_before(99)
    assert [first for first, _ in journal_files(tmp_path)] == [17]


@pytest.mark.slow
def test_a_tail_torn_at_any_byte_is_cut_off(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    written(whole, 4)
    ((_, path),) = journal_files(whole)
    content = path.read_bytes()
    head = len(content)
    ends = []
    for count in range(5):
        part = tmp_path / f"part-{count}"
        part.mkdir()
        written(part, count)
        ends.append(journal_files(part)[0][1].stat().st_size)
    for size in range(ends[0], head + 1):
        path.write_bytes(content[:size])
        journal, found = opened(whole)
        expected = sum(end <= size for end in ends[1:])
        assert found == [frames(number) for number in range(expected)]
        assert path.stat().st_size == ends[expected]
        assert journal.append([b"next"]) == expected
        assert opened(whole)[1][expected:] == [[b"next"]]


def test_a_tail_of_zeros_is_cut_off_with_a_line_in_the_log(tmp_path, capfd):
    """What some file systems leave of an append that a power failure met."""
    written(tmp_path, 6)
    ((_, path),) = journal_files(tmp_path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5000))
    for _ in range(2):
        assert opened(tmp_path)[1] == [frames(number) for number in range(6)]
    assert path.stat().st_size == size
    (line,) = capfd.readouterr().err.splitlines()
    why = "cut short by a crash: the head of a record is damaged"
    assert line.endswith(f"] Dropped the last 5000 bytes of the write-ahead log {path}, {why}")


@pytest.mark.slow
def test_any_flipped_bit_before_the_last_record_is_refused(tmp_path):
    written(tmp_path, 8)
    ((_, path),) = journal_files(tmp_path)
    content = path.read_bytes()
    short = tmp_path / "short"
    short.mkdir()
    written(short, 7)
    last = journal_files(short)[0][1].stat().st_size
    chance = random.Random(3)
    for position in [*range(0, 100), *chance.sample(range(100, last), 400), last - 1]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(DamagedError, match=rf"{path.name} is damaged at byte \d+"):
            opened(tmp_path)
        assert path.read_bytes() == damaged, "a damaged file is left as it is"


def test_a_torn_file_that_is_not_the_last_is_refused(tmp_path):
    written(tmp_path, 20, rotate_at=(10,))
    (_, path), _ = journal_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError, match=f"{path.name} is damaged"):
        opened(tmp_path)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("rotate_at", [(), (8,)])
def test_a_file_that_a_failed_rotation_has_left_is_passed_over(tmp_path, rotate_at, more, torn):
    """An error after its name was there: the file before it was continued."""
    written(tmp_path, 5)
    journal_path(tmp_path, 5).write_bytes(file_head(5, 77))
    later = journal_path(tmp_path, 5).rename(tmp_path / "later")
    written(tmp_path, 5 + more, rotate_at)
    later.rename(journal_path(tmp_path, 5))
    if torn:
        (_, active), *_ = journal_files(tmp_path)
        with active.open("ab") as file:
            file.write(b"\xf1record\n")
    for count in (5 + more, 10):
        written(tmp_path, count, rotate_at)
        assert opened(tmp_path)[1] == [frames(number) for number in range(count)]


def test_a_missing_file_is_named(tmp_path):
    written(tmp_path, 30, rotate_at=(10, 17))
    files = journal_files(tmp_path)
    files[1][1].unlink()
    with pytest.raises(DamagedError, match=rf"{files[1][1].name} is missing"):
        opened(tmp_path)
    files[0][1].unlink()
    with pytest.raises(DamagedError, match=rf"{files[1][1].name} is missing"):
        opened(tmp_path, start=10)


def test_bytes_inside_a_frame_do_not_pass_for_a_record(tmp_path):
    """A tail is torn in a frame that holds a journal: that is not a record that follows."""
    other = tmp_path / "other"
    other.mkdir()
    written(other, 12)
    inner = journal_files(other)[0][1].read_bytes()
    journal, _ = opened(tmp_path)
    journal.append([b"kept"])
    journal.append([inner, b"end"])
    journal.close()
    ((_, path),) = journal_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    assert opened(tmp_path)[1] == [[b"kept"]]


def test_nothing_is_appended_before_the_records_were_taken(tmp_path):
    with pytest.raises(DurabilityError, match="before all its records"):
        Journal(tmp_path, "no").append([b"a"])


def full(folder: Path) -> None:
    """Append until the file may not grow, go on when it may again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    journal, _ = opened(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    refused = []
    for number in range(60):
        try:
            journal.append([number.to_bytes(4, "little"), bytes(200)])
            print(number)
        except JournalFullError as error:
            refused.append(str(error))
    assert len(refused) > 30
    assert all("Free some space" in words for words in refused)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append([b"after"])
    journal.close()


@pytest.mark.slow
def test_a_record_for_which_there_is_no_room_leaves_nothing_behind(tmp_path):
    acknowledged = [int(word) for word in in_fork(full, tmp_path).split()]
    found = opened(tmp_path)[1]
    assert [int.from_bytes(record[0], "little") for record in found[:-1]] == acknowledged
    assert found[-1] == [b"after"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    mount = shutil.which("mount")
    place = tmp_path / "small"
    place.mkdir()
    assert mount is not None
    made = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "none", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(
            f"no permission to mount: {made.stderr.strip()}; the limit on a file's size is tested instead"
        )
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def append_until_refused(journal: Journal, acknowledged: list[int]) -> None:
    for number in range(1000):
        journal.append([bytes([number % 256]) * 1000])
        acknowledged.append(number)


def test_a_full_disk_refuses_and_takes_again_when_there_is_room(small_disk):
    filler = small_disk / "filler"
    filler.write_bytes(bytes(900_000))
    journal, _ = opened(small_disk)
    acknowledged: list[int] = []
    with pytest.raises(JournalFullError, match="No space left"):
        append_until_refused(journal, acknowledged)
    assert acknowledged
    with pytest.raises(JournalFullError):
        journal.append([bytes(10_000)])
    filler.unlink()
    assert journal.append([b"after"]) == len(acknowledged)
    journal.close()
    found = opened(small_disk)[1]
    assert found == [*([bytes([number % 256]) * 1000] for number in acknowledged), [b"after"]]


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_failed_fsync_is_final(fsync):
    """A pipe cannot be synced. Everything after the failure is refused."""
    readable, writable = os.pipe()
    syncing = JournalSync(fsync, "here")
    syncing.switch_to(writable)
    syncing.written()
    if fsync == "always":
        with pytest.raises(DurabilityError, match="here could not be made durable"):
            syncing.sync()
    eventually(lambda: refuses(syncing.check))
    assert refuses(syncing.sync)
    syncing.close()
    os.close(readable)
    os.close(writable)


def refuses(call: Callable[[], None]) -> bool:
    try:
        call()
    except DurabilityError:
        return True
    return False
