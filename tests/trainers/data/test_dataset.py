"""QueueDataset: files and pipe commands as batches, and nothing left behind."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from tests.support.waiting import ended, eventually
from trainers.data.dataset import InMemoryDataset, QueueDataset
from trainers.data.loop import train_from_dataset
from trainers.data.shard import get_file_shard
from trainers.data.slots import Slot
from trainers.errors import DataError, NotSupportedError, UsageError

SLOTS = [Slot("dense", "float32", 2), Slot("id"), Slot("bag", length=None), Slot("label")]


def line(number: int) -> str:
    return f"2 {number}.5 -1 1 {number} {number % 3} {'9 ' * (number % 3)}1 {number % 2}"


def write(folder: Path, *sizes: int) -> list[Path]:
    paths, number = [], 0
    for index, size in enumerate(sizes):
        paths.append(folder / f"part-{index}")
        paths[-1].write_text("".join(f"{line(i)}\n" for i in range(number, number + size)))
        number += size
    return paths


def dataset(paths: list[Path] | list[str], **settings: object) -> QueueDataset:
    made = QueueDataset()
    made.init(use_var=SLOTS, **{"batch_size": 4, **settings})  # type: ignore[arg-type]
    made.set_filelist(paths)
    return made


def numbers(made: QueueDataset) -> list[list[int]]:
    return [batch.tensor("id")[:, 0].tolist() for batch in made]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def children() -> set[int]:
    """Processes below this one."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("reader-")]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before, descriptors = children(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    yield
    assert not readers()
    assert children() <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors  # noqa: PTH208


def test_batches_are_the_files_in_order(tmp_path: Path) -> None:
    made = dataset(write(tmp_path, 10, 0, 5))
    wanted = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14]]
    assert numbers(made) == wanted
    assert numbers(made) == wanted, "every iteration is a whole pass"
    batch = next(iter(made))
    assert batch.tensor("dense").tolist() == [[0.5, -1], [1.5, -1], [2.5, -1], [3.5, -1]]
    assert batch.bag("bag").offsets.tolist() == [0, 0, 1, 3, 3]


@pytest.mark.parametrize("command", ["cat", "cat | cat", "exec /bin/cat"])
def test_several_threads_lose_and_double_nothing(tmp_path: Path, command: str) -> None:
    sizes = [3000, 1, 777, 0, 5000, 2]
    batches = numbers(dataset(write(tmp_path, *sizes), thread_num=4, batch_size=64, pipe_command=command))
    assert sorted(flat(batches)) == list(range(sum(sizes)))
    assert [len(batch) for batch in batches[:-1]] == [64] * (sum(sizes) // 64), "only the last is short"


def test_a_command_makes_the_text(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("7\n8\n9")
    code = "import sys\nfor line in sys.stdin: print('2 0 0 1', int(line), '0 1 1')"
    made = dataset([tmp_path / "part-0"], pipe_command=f'"{sys.executable}" -c "{code}"')
    assert numbers(made) == [[7, 8, 9]]


def test_gzip_files_are_read_plainly_and_given_to_commands_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "part-0.gz"
    path.write_bytes(gzip.compress("\r\n".join(map(line, range(6))).encode()))
    assert numbers(dataset([path])) == [[0, 1, 2, 3], [4, 5]]
    assert numbers(dataset([path], pipe_command="gzip -dc")) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("command", ["cat", "cat -", "head -n 5"])
def test_remote_files_are_read_through_fsspec(command: str) -> None:
    count = 40_000  # more than pipes hold
    with fsspec.open("memory://bucket/part-0", "wb") as stream:
        stream.write("".join(f"{line(i)}\n" for i in range(count)).encode())
    wanted = 5 if command.startswith("head") else count
    made = dataset(["memory://bucket/part-0"], pipe_command=command, batch_size=1000)
    assert flat(numbers(made)) == list(range(wanted))


# ---- what goes wrong


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cat; echo sorry >&2; exit 3", "ended with exit code 3 on {file}; its last lines:\n    sorry"),
        ("no_such_program_here", "ended with exit code 127 (command not found) on {file}; its last lines:\n"),
        ("cat > /dev/null; kill -TERM $$", "was ended by SIGTERM on {file}; it printed nothing"),
        ("seq 30 >&2; exit 1", "on {file}; its last lines:\n    21\n    22\n"),
        ("cat; sleep 100 & exit 4", "ended with exit code 4 on {file}"),
    ],
)
def test_a_command_that_fails_is_named_with_its_last_words(
    tmp_path: Path, command: str, message: str
) -> None:
    paths, began = write(tmp_path, 6), time.monotonic()
    with pytest.raises(DataError) as caught:
        numbers(dataset(paths, pipe_command=command))
    assert time.monotonic() - began < 60, "it does not wait for processes in the background"
    assert f"pipe_command {command!r} " in str(caught.value)
    assert message.format(file=paths[0]) in str(caught.value)


def cut_gzip(folder: Path) -> Path:
    """A gzip file without its last bytes."""
    path = folder / "cut.gz"
    path.write_bytes(gzip.compress("".join(f"{line(i)}\n" for i in range(20_000)).encode())[:-9000])
    return path


@pytest.mark.parametrize("command", ["gzip -dc | cat", "gzip -dc | cat | cat", "{ gzip -dc | cat; } | cat"])
def test_a_failure_inside_a_pipeline_is_an_error(tmp_path: Path, command: str) -> None:
    path = cut_gzip(tmp_path)
    with pytest.raises(
        DataError, match=re.escape(f"pipe_command {command!r} ended with exit code 1 on {path}")
    ):
        numbers(dataset([path], pipe_command=command))


def test_a_pipeline_needs_a_shell_that_notices_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without bash the error is that of /bin/sh, or that of gzip if that shell has pipefail too."""
    path, whole = cut_gzip(tmp_path), write(tmp_path, 6)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gzip", "cat"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(DataError, match=r"pipe_command 'gzip -dc \| cat' ended with exit code"):
        numbers(dataset([path], pipe_command="gzip -dc | cat"))
    assert flat(numbers(dataset(whole, pipe_command="cat -"))) == list(range(6))


@pytest.mark.parametrize("command", ["cat | head -n 5", "head -n 5 | cat", "yes | head -n 0; head -n 5"])
def test_a_command_may_read_a_part_of_its_file(tmp_path: Path, command: str) -> None:
    """SIGPIPE ends what comes before `head`."""
    assert flat(numbers(dataset(write(tmp_path, 40_000), pipe_command=command))) == list(range(5))


class Short(io.BytesIO):
    """A remote file whose reads end before its size."""

    def __init__(self, content: bytes, size: int) -> None:
        super().__init__(content)
        self.size = size


class ShortFiles(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A store that gives whole lines, or whole gzip members, and not all of them."""

    protocol = "short"

    def _open(self, path: str, mode: str = "rb", **options: object) -> Short:
        text = "".join(f"{line(i)}\n" for i in range(8)).encode()
        content = gzip.compress(text) if path.endswith(".gz") else text
        return Short(content, 2 * len(content))


@pytest.mark.parametrize("name", ["part-0", "part-0.gz"])
@pytest.mark.parametrize("command", ["cat", "cat -"])
def test_a_remote_file_that_ends_before_its_size_is_an_error(name: str, command: str) -> None:
    fsspec.register_implementation("short", ShortFiles, clobber=True)
    command = command.replace("cat -", "gzip -dc") if name.endswith(".gz") else command
    with pytest.raises(DataError, match=rf"short://{name} cannot be read to its end: .* of \d+ bytes"):
        numbers(dataset([f"short://{name}"], pipe_command=command))


def test_a_gzip_file_without_a_byte_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "part-0.gz").touch()
    with pytest.raises(DataError, match=r"part-0\.gz cannot be read to its end: the file is empty"):
        numbers(dataset([tmp_path / "part-0.gz"]))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_batches_before_an_error_come_first(tmp_path: Path, threads: int) -> None:
    paths = write(tmp_path, 9)
    paths[0].write_text(paths[0].read_text() + "2 1 1 1 x 0 1 1\n")
    batches = iter(dataset(paths, thread_num=threads))
    assert [len(next(batches)), len(next(batches))] == [4, 4]
    with pytest.raises(DataError, match=re.escape(f"{paths[0]}:10: expected value 1 of 1 of slot 'id'")):
        next(batches)


def test_an_error_of_a_commands_text_names_file_and_command(tmp_path: Path) -> None:
    paths = write(tmp_path, 2)
    with pytest.raises(DataError, match=re.escape(f"{paths[0]} (through 'echo x'):1: expected")):
        numbers(dataset(paths, pipe_command="echo x"))


def test_skipped_lines_are_counted_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, 3, 0, 2)
    paths[2].write_text("x\n" + paths[2].read_text() + "y")
    made = dataset(paths, max_bad_lines=2)
    for _ in range(2):
        assert numbers(made) == [[0, 1, 2, 3], [4]]
        assert made.skipped_lines == 2
    told = capsys.readouterr().err
    assert told.count(f"skipped 2 broken lines; the first: {paths[2]}:1: expected") == 2
    assert told.count(f"{paths[1]} has no examples") == 1, "told once"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    good = write(tmp_path, 3)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(b"2 1 1 1 1 0 1 1\n" * 9999)[:-20])
    wrong = tmp_path / "plain.gz"
    wrong.write_text("2 1 1 1 1 0 1 1\n")
    cases: list[tuple[list[object], str]] = [
        (
            [*good, tmp_path / "a", tmp_path / "b"],
            f"{tmp_path / 'a'} and 1 more of 3 files in set_filelist does not exist",
        ),
        ([tmp_path], f"{tmp_path} is a directory. Pass the files in it"),
        (["memory://nowhere/part"], "memory://nowhere/part cannot be opened"),
        (["nosuch://bucket/part"], "nosuch://bucket/part cannot be opened: Protocol not known: nosuch"),
        ([cut], f"{cut} cannot be read to its end: Compressed file ended before"),
        ([wrong], f"{wrong} cannot be read to its end: Not a gzipped file"),
    ]
    for paths, message in cases:
        with pytest.raises(DataError, match=re.escape(message)):
            numbers(dataset(paths))  # type: ignore[arg-type]


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no files\. Call set_filelist"):
        numbers(dataset([]))
    with pytest.raises(UsageError, match="was given 'part-0'; it must be a list of paths"):
        QueueDataset().set_filelist("part-0")
    with pytest.raises(UsageError, match=r"no slots. Call init\(use_var"):
        next(iter(QueueDataset()))
    for name in ("batch_size", "thread_num", "queue_size"):
        with pytest.raises(UsageError, match=f"{name} is 0; it must be a whole number of at least 1"):
            dataset([], **{name: 0})
    with pytest.raises(UsageError, match="max_bad_lines is -1"):
        dataset([], max_bad_lines=-1)
    with pytest.raises(UsageError, match="pipe_command is empty"):
        dataset([], pipe_command=" ")
    with pytest.raises(NotSupportedError, match="fs_name"):
        dataset([], fs_name="hdfs://a")
    made = dataset(write(tmp_path, 30))
    first = iter(made)
    next(first)
    with pytest.raises(UsageError, match="is being read"):
        next(iter(made))
    first.close()  # type: ignore[attr-defined]
    assert len(numbers(made)) == 8


@pytest.mark.parametrize(
    "slots",
    [[], [Slot("a"), Slot("a")], ["a"]],
)
def test_lists_of_slots_that_cannot_be(slots: list[Slot]) -> None:
    with pytest.raises(UsageError, match="use_var"):
        QueueDataset().set_use_var(slots)


@pytest.mark.parametrize(
    ("name", "dtype", "length"),
    [("", "int64", 1), ("a", "int32", 1), ("a", "int64", 0), ("a", "int64", True)],
)
def test_slots_that_cannot_be(name: str, dtype: str, length: int) -> None:
    with pytest.raises(UsageError, match=r"[Ss]lot"):
        Slot(name, dtype, length)


# ---- more trainers than files


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is trainer 1 of 2."""
    for name, value in (("TRAINER_ID", "1"), ("TRAINERS_NUM", "2")):
        monkeypatch.setenv(f"PADDLE_{name}", value)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "10.0.0.1:6170,10.0.0.1:6171")


@pytest.mark.usefixtures("second_of_two")
def test_a_trainer_without_files_has_no_batches(capsys: pytest.CaptureFixture[str]) -> None:
    streamed, kept = dataset(get_file_shard(["part-0"], 1, 2)), InMemoryDataset()
    kept.init(use_var=SLOTS)
    kept.set_filelist([])
    kept.load_into_memory()
    kept.local_shuffle()
    assert kept.get_memory_data_size() == 0
    for made in (streamed, kept, streamed):
        result = train_from_dataset(lambda batch: {"loss": 0.0}, made, fetch_list=["loss"])
        assert (result.batches, result.examples, result.fetches) == (0, 0, {})
    assert capsys.readouterr().err.count("Trainer 1 has no files") == 2, "once for each data set"


@pytest.mark.usefixtures("second_of_two")
def test_files_without_a_line_make_no_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write(tmp_path, 0, 0)
    for command in ("cat", "sed /./d"):
        assert numbers(dataset(paths, pipe_command=command, thread_num=2)) == []
    assert f"{paths[1]} has no examples" in capsys.readouterr().err


@pytest.mark.usefixtures("second_of_two")
def test_a_list_that_was_never_set_is_an_error_on_every_trainer() -> None:
    made = QueueDataset()
    made.init(use_var=SLOTS)
    with pytest.raises(UsageError, match=r"no files\. Call set_filelist"):
        next(iter(made))


def test_a_pattern_that_matches_nothing_is_an_error_on_trainer_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """With get_file_shard, and with `paths[rank::trainers]`."""
    with pytest.raises(UsageError, match="get_file_shard was given no files"):
        get_file_shard([], 1, 2)
    for name, value in (("TRAINER_ID", "0"), ("TRAINERS_NUM", "2")):
        monkeypatch.setenv(f"PADDLE_{name}", value)
    monkeypatch.setenv("PADDLE_TRAINER_ENDPOINTS", "10.0.0.1:6170,10.0.0.1:6171")
    with pytest.raises(UsageError, match=r"no files\. Call set_filelist with at least one file on trainer 0"):
        numbers(dataset([]))


# ---- leaving early

ENDLESS = "yes '2 1 1 1 7 0 1 1'"


@pytest.mark.slow
def test_a_slow_consumer_stops_the_reader(tmp_path: Path) -> None:
    """The command tells how far it came; without a bound it would write for ever."""
    told = tmp_path / "told"
    code = (
        "import os, sys\n"
        "text = b'2 1 1 1 7 0 1 1\\n' * 1000\n"
        "for count in range(10**9):\n"
        "    os.write(1, text)\n"
        f"    open({str(told)!r} + '~', 'w').write(str(count))\n"
        f"    os.replace({str(told)!r} + '~', {str(told)!r})\n"
    )
    (tmp_path / "code.py").write_text(code)
    made = dataset(write(tmp_path, 1), pipe_command=f"{sys.executable} {tmp_path}/code.py", queue_size=100)
    batches = iter(made)
    next(batches)
    eventually(lambda: told.exists() and int(told.read_text() or 0) >= 1)
    taken = 4
    for _ in range(20_000):
        taken += len(next(batches))
    ahead = int(told.read_text() or 0) * 1000 - taken
    # 100 batches of 4, two blocks of 4,096 examples, and 17 bytes a line in pipe and buffer
    assert ahead < 400 + 2 * 4096 + (2 << 20) // 17 + 1000
    batches.close()  # type: ignore[attr-defined]


def test_leaving_a_loop_ends_commands_and_what_they_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = f"sleep 1000 & echo $$ $! >> {pids}; {ENDLESS}; true"
    for batch in dataset(write(tmp_path, 1, 1), thread_num=2, pipe_command=command):
        assert len(batch) == 4
        break
    told = [*map(int, pids.read_text().split())]
    assert len(told) in (2, 4), "of the one whose batch came, at least"
    for pid in told:
        eventually(lambda pid=pid: ended(pid))  # type: ignore[misc]


def test_a_command_that_says_nothing_can_be_left(tmp_path: Path) -> None:
    """The other file's batches come; its thread waits in vain, and leaving does not."""
    paths = write(tmp_path, 1, 1)
    command = f"read x y rest; if [ $y = 0.5 ]; then exec sleep 1000; else {ENDLESS}; fi"
    batches = iter(dataset(paths, thread_num=2, pipe_command=command))
    assert len(next(batches)) == 4
    batches.close()  # type: ignore[attr-defined]


def test_an_error_of_one_thread_ends_the_others(tmp_path: Path) -> None:
    paths = write(tmp_path, 1, 1)
    command = f"read x y rest; if [ $y = 0.5 ]; then exit 5; else {ENDLESS}; fi"
    with pytest.raises(DataError, match="exit code 5"):
        numbers(dataset(paths, thread_num=2, pipe_command=command))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_an_error_of_the_consumer_leaves_nothing(tmp_path: Path, kind: type[BaseException]) -> None:
    def train() -> None:
        for _ in dataset(write(tmp_path, 1), pipe_command=ENDLESS):
            raise kind

    with pytest.raises(kind):
        train()


# ---- what a model takes


def test_joined_slots_are_views_for_one_table(tmp_path: Path) -> None:
    slots = [Slot("x", torch.float32, 2), *(Slot(f"C{i}") for i in range(3)), Slot("label"), Slot("C9")]
    (tmp_path / "part-0").write_text("2 0 1 1 10 1 11 1 12 1 1 1 19\n2 2 3 1 20 1 21 1 22 1 0 1 29\n")
    made = QueueDataset()
    made.init(use_var=slots, batch_size=2)
    made.set_filelist([tmp_path / "part-0"])
    (batch,) = made
    joined = batch.joined("C0", "C1", "C2")
    assert joined.tolist() == [[10, 11, 12], [20, 21, 22]]
    assert joined.data_ptr() == batch.ids.data_ptr(), "a view"
    assert batch.joined("C2", "C9", "C0").tolist() == [[12, 19, 10], [22, 29, 20]]
    assert batch["label"].tolist() == [[1], [0]]  # type: ignore[union-attr]
    assert batch.bag("C1").ids.tolist() == [[11], [21]]
    assert "C1" in batch
    assert len(batch) == 2
    moved = batch.to("cpu")
    assert moved.dense.tolist() == [[0, 1], [2, 3]]
    for name, message in (("C7", "no slot 'C7'"), ("x", "Slot 'x' is DENSE; this call needs IDS slots")):
        with pytest.raises(UsageError, match=message):
            batch.joined(name)
    with pytest.raises(UsageError, match="No slot was given"):
        batch.joined()


def test_each_bag_has_the_values_of_its_slot(tmp_path: Path) -> None:
    slots = [
        Slot("a", length=None),
        Slot("b", length=None),
        Slot("one"),
        Slot("c", length=None),
        Slot("w", "float32", None),
    ]
    (tmp_path / "part-0").write_text("2 1 2 0 1 5 1 7 1 .5\n0 3 3 4 5 1 6 2 8 9 0\n1 1 1 2 1 5 0 2 .25 .75\n")
    made = QueueDataset()
    made.init(use_var=slots, batch_size=3)
    made.set_filelist([tmp_path / "part-0"])
    (batch,) = made
    bags = {name: batch.bag(name) for name in "abc"}
    assert [bag.values.tolist() for bag in bags.values()] == [[1, 2, 1], [3, 4, 5, 2], [7, 8, 9]]
    assert [bag.offsets.tolist() for bag in bags.values()] == [[0, 2, 2, 3], [0, 0, 3, 4], [0, 1, 3, 3]]
    assert batch.bag("w").values.tolist() == [0.5, 0.25, 0.75]
    assert batch.bag("w").offsets.tolist() == [0, 1, 1, 3]
    with pytest.raises(UsageError, match="no fixed length"):
        batch.tensor("a")
    with pytest.raises(UsageError, match="not one each"):
        _ = batch.bag("a").ids
