"""Streams of files: what a trainer is given, and in which pieces. The servers are in this process."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from trainers.data.loop import prefetched
from trainers.data.parquet import ParquetFiles
from trainers.data.positions import Intervals, Records
from trainers.data.slots import Batch, Slot
from trainers.data.stream import Reading, Split, Stream, UnavailableError
from trainers.data.stream_files import MultiSlotFiles
from trainers.errors import DataError, NotSupportedError, UsageError

SLOTS = [Slot("id"), Slot("bag", length=None)]


class Servers:
    """A trainer and its servers, which have what it gave out; `have`: ends of intervals by shard, of each."""

    def __init__(self, *have: dict[str, list[int]], rank: int = 0, trainers: int = 1) -> None:
        self.have = list(have) or [{}]
        self.place = rank, trainers
        self.interrupted = False
        self.given: list[Records] = []
        self.forgotten: list[Records] = []
        self.flushed = threading.Event()
        self.on: list[tuple[bool, ...] | None] = []
        self.streams: dict[str, Reading] = {}

    def positions(self, stream: str) -> Sequence[dict[str, list[int]]]:
        assert stream in ("test", "other")
        return self.have

    def give(self, records: Records, on: tuple[bool, ...] | None) -> None:
        self.given.append(records)
        self.on.append(on)
        for each in self.have:
            counted = Intervals(each.get(records.shard, ()))
            if not counted.has(*records[2:]):
                counted.add(*records[2:])
                each[records.shard] = counted.ends

    def forget(self, records: Records) -> None:
        self.forgotten.append(records)

    def flush(self) -> None:
        self.flushed.set()


def text(start: int, stop: int) -> str:
    """Ten bytes a record up to 99."""
    return "".join(f"1 {number:02} 1 7\n".replace(" 1 7", "  1 7") for number in range(start, stop))


def made(where: Path | list[Path], servers: Servers, **settings: object) -> Stream:
    bad, name = settings.pop("max_bad_lines", 0), settings.pop("name", "test")
    source = MultiSlotFiles(where, use_var=SLOTS, name=name, max_bad_lines=bad)  # type: ignore[arg-type]
    return Stream(source, lambda: servers, **{"batch_size": 4, "poll_s": 0.001, **settings})  # type: ignore[arg-type]


def ids(batches: Iterator[Batch] | Stream) -> list[list[int]]:
    return [batch.tensor("id")[:, 0].tolist() for batch in batches]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name.startswith("reader-")] == []


def test_a_pass_gives_what_the_servers_lack_and_the_next_one_what_is_new(tmp_path: Path) -> None:
    (tmp_path / "b").write_text(text(0, 6))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c").write_text(text(6, 9))
    (tmp_path / ".hidden").write_text("x")
    servers = Servers({}, {})
    stream = made(tmp_path, servers)
    assert ids(stream) == [[6, 7, 8], [0, 1, 2, 3], [4, 5]]
    assert servers.have == [{"a/c": [0, 30], "b": [0, 60]}] * 2
    assert servers.given[1] == ("test", "b", 0, 40)
    assert ids(stream) == []
    with (tmp_path / "b").open("a") as file:
        file.write(text(9, 11).rstrip("\n"))
    assert ids(stream) == [[9, 10]], "also a last line without its end"
    assert servers.have[0]["b"] == [0, 79]


def test_pieces_that_some_servers_have_come_first_and_by_themselves(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(text(0, 8))
    servers = Servers({"a": [0, 10], "b": [0, 50]}, {"a": [0, 10], "b": [0, 20, 30, 40]})
    first, rest = [[2], [4]], [[1, 2, 3, 4], [5, 6, 7], [5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(made(tmp_path, servers)) == first + rest
    assert servers.have == [{name: [0, 80] for name in "bac"}] * 2
    assert servers.on == [(True, False)] * 2 + [None] * 5


def test_each_file_is_read_by_one_trainer(tmp_path: Path) -> None:
    paths = []
    for number in range(20):
        paths.append(tmp_path / f"part-{number}")
        paths[-1].write_text(text(number, number + 1))
    for where in (tmp_path, paths):
        shares = [ids(made(where, Servers(rank=rank, trainers=3))) for rank in range(3)]
        assert sorted(number for share in shares for batch in share for number in batch) == list(range(20))
        assert all(len(share) > 3 for share in shares)


def test_a_stream_follows_files_that_grow_and_come(tmp_path: Path) -> None:
    servers, over = Servers(), threading.Event()
    folder = tmp_path / "records"
    folder.mkdir()
    stream = made(folder, servers, follow=True, until=over.is_set)
    found: list[int] = []

    def read() -> None:
        found.extend(number for batch in ids(stream) for number in batch)

    thread = threading.Thread(target=read)
    thread.start()
    (folder / "grows").write_text(text(0, 3) + "1 03")
    eventually(lambda: len(servers.given) > 0 and servers.given[-1].stop == 30)
    (folder / "new").write_text(text(5, 6))
    with (folder / "grows").open("a") as file:
        file.write("  1 7\n1 0")
    eventually(lambda: {each.shard for each in servers.given} == {"grows", "new"})
    servers.flushed.clear()
    assert servers.flushed.wait(60), "while it waits, everything is pushed"
    with (folder / "grows").open("a") as file:
        file.write("4  1 7")
    over.set()
    thread.join(60)
    assert sorted(found) == list(range(6))


def test_a_stream_that_waits_ends_when_the_process_is_to_stop(tmp_path: Path) -> None:
    servers = Servers()
    servers.interrupted = True
    (tmp_path / "a").write_text(text(0, 2))
    assert ids(made(tmp_path, servers, follow=True)) == [[0, 1]]


def test_a_loop_that_is_left_forgets_its_last_batch_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text(0, 20))
    servers = Servers()
    stream, other = made(tmp_path, servers), made(tmp_path, servers, name="other")
    batches = iter(stream)
    next(batches)
    next(iter(other))
    assert servers.forgotten == [("other", "a", 40, 80)], "collected"
    iter(stream)
    assert servers.forgotten[1:] == [("test", "a", 0, 40)], "replaced by another pass"
    for _ in stream:
        break
    assert servers.forgotten[2:] == [("test", "a", 80, 120)]


def test_two_streams_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(text(0, 8))
    servers = Servers()
    batches = iter(made(tmp_path / "first", servers, batch_size=2))
    next(batches)
    with pytest.raises(UsageError, match="Another loop reads the stream 'test'"):
        iter(made(tmp_path / "first", servers))
    del batches
    found = prefetched(iter(made(tmp_path / "first", servers)), lambda batch: None, ahead=3)
    next(found)
    with pytest.raises(UsageError, match="Another loop reads the stream"):
        iter(made(tmp_path / "first", servers))
    assert len(ids(found)) == 1
    assert ids(made(f"{tmp_path}/first/", servers)) == []
    for source in (
        MultiSlotFiles(tmp_path / "second", use_var=SLOTS, name="test"),
        ParquetFiles(tmp_path / "first", use_var=SLOTS, name="test"),
    ):
        with pytest.raises(UsageError, match="Two sources have the name 'test'"):
            iter(Stream(source, lambda: servers, batch_size=4))


def test_batches_are_taken_ahead_only_where_they_are_there(tmp_path: Path) -> None:
    """And count when it is their turn."""
    (tmp_path / "a").write_text(text(0, 20))
    servers, over = Servers(), threading.Event()
    batches = iter(made(tmp_path, servers, follow=True, until=over.is_set))
    prepared: list[int] = []
    turns = prefetched(batches, lambda batch: prepared.append(int(batch.ids[0, 0])), ahead=2)
    for number in range(5):
        assert next(turns).ids[0, 0] == 4 * number
        assert len(servers.given) == number + 1
    assert prepared == [4, 8, 12, 16]
    over.set()
    assert next(turns, None) is None


def test_broken_lines_are_passed_over_and_counted_with_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text(0, 2) + "broken\n" + text(2, 3) + "x\n")
    servers = Servers()
    stream = made(tmp_path, servers, max_bad_lines=2)
    assert ids(stream) == [[0, 1, 2]]
    assert stream.skipped_lines == 2
    assert servers.have == [{"a": [0, 39]}]
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'a'} from byte 20:1: expected")):
        ids(made(tmp_path, Servers({"a": [0, 20]})))


def test_broken_lines_behind_the_last_record_are_told_with_it_or_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text(0, 8) + "x\n")
    servers = Servers()
    coming = iter(["y\n", "", text(8, 9), "z\n", "", text(9, 10), ""])

    def until() -> bool:
        more = next(coming, None)
        with (tmp_path / "a").open("a") as file:
            file.write(more or "")
        return more is None

    stream = made(tmp_path, servers, max_bad_lines=3, follow=True, until=until)
    assert ids(stream) == [[0, 1, 2, 3], [4, 5, 6, 7], [8], [9]]
    assert stream.skipped_lines == 3, "each once"
    assert [each[2:] for each in servers.given] == [(0, 40), (40, 84), (84, 94), (94, 106)]
    assert servers.have == [{"a": [0, 106]}]
    again = Servers()
    batches = iter(made(tmp_path, again, batch_size=8, max_bad_lines=2))
    with pytest.raises(DataError, match="3 lines are broken, but max_bad_lines is 2"):
        for _ in batches:
            pass
    assert again.have == [{"a": [0, 80]}], "the batch before the error"


def test_a_line_that_was_counted_without_its_end_and_goes_on(tmp_path: Path) -> None:
    path, servers = tmp_path / "a", Servers()

    def write(more: str) -> None:
        with path.open("a") as file:
            file.write(more)

    write("1 0  1 7")
    assert ids(made(tmp_path, servers)) == [[0]]
    write("\n")
    assert ids(made(tmp_path, servers)) == []
    write("1 1  1 7")
    assert ids(made(tmp_path, servers)) == [[1]]
    write(" \n" + text(2, 4).rstrip("\n"))
    assert ids(made(tmp_path, servers)) == [[2, 3]]
    write("7\n" + text(4, 5))
    message = f"{path}: the line up to byte 38 was read before it was complete, and continues with '7'"
    with pytest.raises(DataError, match=re.escape(message)):
        ids(made(tmp_path, servers))
    stream = made(tmp_path, servers, max_bad_lines=1)
    assert ids(stream) == [[4]]
    assert stream.skipped_lines == 1
    assert servers.have == [{"a": [0, path.stat().st_size]}]


class Away(MultiSlotFiles):
    """Files of a disk that is away at each second call, or `gone`."""

    calls, gone = 0, False

    def _call(self) -> None:
        self.calls += 1
        if self.gone or self.calls % 2:
            raise UnavailableError("the disk is away")

    def shards(self) -> list[str]:
        self._call()
        return super().shards()

    def read(
        self, shard: str, start: int, stop: int, rows: int, *, grows: bool
    ) -> Iterator[tuple[Batch | None, int]]:
        for each in super().read(shard, start, stop, rows, grows=grows):
            yield each
            self._call()


def test_a_source_that_cannot_be_read_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text(text(0, 20))
    servers = Servers({"a": [0, 10]}, {"a": [0, 20]})
    source = Away(tmp_path, use_var=SLOTS, name="test")
    stream = Stream(source, lambda: servers, batch_size=4, poll_s=0.001)
    assert ids(stream) == [[1], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]
    assert servers.have == [{"a": [0, 200]}] * 2
    assert "the stream 'test' waits: the disk is away" in capfd.readouterr().err
    source.gone = servers.interrupted = True
    assert ids(stream) == [], "this process is to stop"


class Trimmed(MultiSlotFiles):
    """Its files have lost two records."""

    def splits(self, shards: Sequence[str], rank: int, trainers: int) -> Iterator[Split]:
        for split in super().splits(shards, rank, trainers):
            yield split._replace(start=20, first=20)


def test_files_whose_positions_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text(0, 2))
    with pytest.raises(DataError, match="'a' of the stream 'test' ends at 20, but was read up to 30"):
        ids(made(tmp_path, Servers({"a": [0, 30]})))
    with pytest.raises(DataError, match=r"records \[10, 20\) of 'a' in the stream 'test' were deleted"):
        ids(
            Stream(
                Trimmed(tmp_path, use_var=SLOTS, name="test"), lambda: Servers({"a": [0, 10]}), batch_size=4
            )
        )
    with pytest.raises(
        DataError, match="'gone' of the stream 'test' no longer exists, but some servers have more"
    ):
        ids(made(tmp_path, Servers({"gone": [0, 3]}, {})))
    assert ids(made(tmp_path, Servers({"gone": [0, 3]}))) == [[0, 1]], "all have it: it may leave"
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(NotSupportedError, match=r"b\.gz is compressed"):
        ids(made(tmp_path, Servers()))
    with pytest.raises(DataError, match="nothing, because it does not exist"):
        ids(made([tmp_path / "a", tmp_path / "nothing"], Servers()))
    with pytest.raises(NotSupportedError, match=r"s3://bucket/a is not a file of this node"):
        MultiSlotFiles("s3://bucket/a", use_var=SLOTS)
    with pytest.raises(UsageError, match="until ends a stream that follows its source"):
        made(tmp_path, Servers(), until=lambda: True)


def test_the_same_file_by_two_paths_is_refused_and_a_list_needs_a_name(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(UsageError, match="the same file twice"):
        MultiSlotFiles([tmp_path / "a", tmp_path / "b"], use_var=[Slot("ids")], name="test")
    (tmp_path / "c").touch()
    with pytest.raises(UsageError, match="needs a name"):
        MultiSlotFiles([tmp_path / "a", tmp_path / "c"], use_var=[Slot("ids")])
    assert MultiSlotFiles(f"{tmp_path}/", use_var=[Slot("ids")]).name == str(tmp_path)


def test_links_to_directories_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "a").touch()
    (tmp_path / "latest").symlink_to(tmp_path / "day")
    (tmp_path / "day" / "up").symlink_to(tmp_path)
    assert MultiSlotFiles(tmp_path, use_var=[Slot("ids")]).shards() == ["day/a"]
