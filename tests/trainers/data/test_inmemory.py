"""InMemoryDataset: what is loaded is kept, in any order, on any trainer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetrun.envs.contract import Role
from tests.support.cluster import PATH
from tests.support.forking import Forker
from tests.support.waiting import eventually
from trainers.data.dataset import InMemoryDataset
from trainers.data.exchange import pack, take, unpack
from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout, Slot
from trainers.data.store import GrowingArray, Store
from trainers.errors import DataError, UsageError

pytestmark = pytest.mark.slow

SLOTS = [Slot("id"), Slot("dense", "float32", 2), Slot("bag", length=None), Slot("weights", "float32", None)]


def example(number: int) -> list[Any]:
    return [number, [number + 0.5, -number], [number] * (number % 4), [0.25] * (number % 3)]


def line(number: int) -> str:
    identity, dense, bag, weights = example(number)
    words = [1, identity, len(dense), *dense, len(bag), *bag, len(weights), *weights]
    return " ".join(map(str, words))


def write(path: Path, numbers: range) -> Path:
    path.write_text("".join(f"{line(number)}\n" for number in numbers))
    return path


def loaded(paths: list[Path], **settings: Any) -> InMemoryDataset:
    made = InMemoryDataset()
    made.init(use_var=SLOTS, **{"batch_size": 64, **settings})
    made.set_filelist(paths)
    made.load_into_memory()
    return made


def examples(made: InMemoryDataset) -> list[Any]:
    found = []
    for batch in made:
        bags, weights = batch.bag("bag"), batch.bag("weights")
        for i in range(len(batch)):
            bag = bags.values[bags.offsets[i] : bags.offsets[i + 1]].tolist()
            weight = weights.values[weights.offsets[i] : weights.offsets[i + 1]].tolist()
            found.append([batch.tensor("id")[i].item(), batch.tensor("dense")[i].tolist(), bag, weight])
    return found


def test_another_batch_size_is_that_of_the_next_pass(tmp_path: Path) -> None:
    made = loaded([write(tmp_path / "a", range(10))], batch_size=4)
    sizes = []
    for batch in made:
        sizes.append(len(batch))
        made.set_batch_size(2)
    assert sizes == [4, 4, 2]
    assert [len(batch) for batch in made] == [2] * 5


def test_examples_stay_in_the_order_of_the_files_until_they_are_shuffled(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", range(1000)), write(tmp_path / "b", range(1000, 1500))]
    made = loaded(paths)
    wanted = [example(number) for number in range(1500)]
    assert examples(made) == wanted
    assert made.get_memory_data_size() == 1500
    orders = []
    for _ in range(2):
        made.local_shuffle()
        orders.append(examples(made))
        assert sorted(orders[-1]) == wanted
        assert orders[-1] != wanted
    assert orders[0] != orders[1]
    again = loaded(paths)
    again.local_shuffle()
    assert examples(again) == orders[0], "a run can be repeated"
    again.set_shuffle_seed(1)
    again.local_shuffle()
    assert examples(again) != orders[1]


def test_several_threads_load_everything(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(i), range(i * 700, i * 700 + 700)) for i in range(7)]
    made = loaded(paths, thread_num=3)
    assert sorted(examples(made)) == [example(number) for number in range(4900)]


def test_a_single_trainers_global_shuffle_is_local(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a", range(300))]
    one, other = loaded(paths), loaded(paths)
    one.local_shuffle()
    other.global_shuffle()
    assert examples(one) == examples(other)
    assert (one.get_shuffle_data_size(), other.get_shuffle_data_size()) == (0, 300)


def test_loading_goes_on_in_the_background(tmp_path: Path) -> None:
    made = loaded([write(tmp_path / "a", range(10))])
    made.set_filelist([write(tmp_path / "b", range(20, 50))])
    made.preload_into_memory(thread_num=2)
    for call in (made.local_shuffle, made.preload_into_memory, lambda: next(iter(made))):
        with pytest.raises(UsageError, match=r"wait_preload_done\(\) first"):
            call()
    made.wait_preload_done()
    assert examples(made) == [example(number) for number in range(20, 50)]


def test_calls_out_of_order(tmp_path: Path) -> None:
    made = loaded([write(tmp_path / "a", range(10))])
    made.release_memory()
    assert made.get_memory_data_size() == 0
    for call in (made.local_shuffle, made.global_shuffle, lambda: next(iter(made))):
        with pytest.raises(UsageError, match=r"Call load_into_memory\(\) first"):
            call()
    with pytest.raises(UsageError, match="is not being loaded"):
        made.wait_preload_done()


def test_an_error_of_loading_is_raised_and_nothing_is_kept(tmp_path: Path) -> None:
    made = loaded([write(tmp_path / "a", range(10))])
    (tmp_path / "b").write_text(f"{line(1)}\nx\n")
    made.set_filelist([tmp_path / "b"])
    with pytest.raises(DataError, match="b:2: expected the number of values of slot 'id', found 'x'"):
        made.load_into_memory()
    assert made.get_memory_data_size() == 0
    made.init(use_var=SLOTS, max_bad_lines=1)
    made.load_into_memory()
    assert (made.get_memory_data_size(), made.skipped_lines) == (1, 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reader")]


@pytest.mark.parametrize(
    ("name", "command", "wait"),
    [
        ("InMemoryDataset", "sleep 1000", "made.load_into_memory()"),
        ("QueueDataset", "yes 1 7", "for batch in made: pass"),
    ],
)
def test_an_interrupt_ends_what_was_started(tmp_path: Path, name: str, command: str, wait: str) -> None:
    """The command would never end."""
    (tmp_path / "a").write_text("x")
    code = (
        "import os, signal, threading\n"
        f"from trainers.data.dataset import {name}\n"
        "from trainers.data.slots import Slot\n"
        f"made = {name}()\n"
        f"made.init(use_var=[Slot('id')], pipe_command='echo $$ > PID; {command}')\n"
        "made.set_filelist(['a'])\n"
        "try:\n"
        f"    {wait}\n"
        "except KeyboardInterrupt:\n"
        "    children = open('/proc/self/task/%d/children' % os.getpid()).read().split()\n"
        "    print(threading.active_count(), children)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": PATH},
    ) as process:
        try:
            eventually(lambda: (tmp_path / "PID").exists(), within=200)  # it imports torch first
            process.send_signal(2)
            assert process.communicate(timeout=60) == ("1 []\n", None)
            assert process.returncode == 0
        finally:
            process.kill()


def test_examples_cannot_be_added_under_an_open_pass() -> None:
    array = GrowingArray(np.int64, 2)
    array.extend(np.ones((10, 2), dtype=np.int64))
    view = array.view()
    with pytest.raises(UsageError, match="during a pass over the data set"):
        array.extend(np.ones((10_000, 2), dtype=np.int64))
    assert view.sum() == 20


def resident(array: GrowingArray) -> int:
    """Bytes of memory behind the array's pages, from the kernel."""
    start = array.view().ctypes.data
    here = False
    for text in Path("/proc/self/smaps").read_text().splitlines():
        if text[0] in "0123456789abcdef" and "-" in text.split()[0]:
            low, high = (int(part, 16) for part in text.split()[0].split("-"))
            here = low <= start < high
        elif here and text.startswith("Rss:"):
            return int(text.split()[1]) << 10
    raise AssertionError("not mapped")


def test_arrays_grow_and_give_their_front_back() -> None:
    array = GrowingArray(np.int64, 4)
    rows = np.arange(4 * 100_000, dtype=np.int64).reshape(-1, 4)
    for start in range(0, len(rows), 1000):
        array.extend(rows[start : start + 1000])
    assert (array.view() == rows).all()
    before = resident(array)
    assert before <= rows.nbytes + (4 << 20), "room to grow is not memory yet"
    array.forget(90_000)
    assert resident(array) <= before - rows.nbytes * 0.9 + (2 << 20)
    assert (array.view()[90_000:] == rows[90_000:]).all()
    array.extend(rows)
    assert (array.view()[100_000:] == rows).all()


def test_columns_survive_the_way_to_another_trainer() -> None:
    class Text:
        name = "x"

        def __init__(self, text: bytes) -> None:
            self._left = text

        def readinto(self, buffer: memoryview) -> int:
            got, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
            buffer[: len(got)] = got
            return len(got)

    layout = Layout.of(SLOTS)
    parser = Parser(layout, 1000, BrokenLines())
    assert not list(parser.read(Text("\n".join(map(line, range(50))).encode())))
    rest = parser.rest()
    rows = np.array(random.Random(0).sample(range(50), 23))
    piece = take(rest, rows)
    store = Store(layout)
    store.extend(unpack(layout, pack(piece)))
    store.extend(rest.rows(3, 9))
    store.extend(rest.rows(0, 0))
    order = [*rows.tolist(), *range(3, 9)]
    batch = store.columns().gather(np.arange(len(order)))
    assert batch.tensor("id")[:, 0].tolist() == order
    assert batch.bag("bag").values.tolist() == [value for number in order for value in example(number)[2]]
    assert batch.bag("weights").values.tolist() == [value for number in order for value in example(number)[3]]


# ---- across trainers

PARTS = [range(2000), range(2000, 2001), range(2001, 5000)]


@pytest.fixture(scope="module")
def results(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What three trainers say, each a process."""
    folder = tmp_path_factory.mktemp("three")
    for rank, numbers in enumerate(PARTS):
        write(folder / f"part-{rank}", numbers)
    with forker.job(folder, trainers=len(PARTS), servers=1) as running:
        for rank in range(len(PARTS)):
            command = ["-m", "tests.trainers.data.trainer_of_three", str(rank), str(folder)]
            running.start(command, Role.TRAINER, rank)
        running.expect_success()
    return [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(len(PARTS))]


def test_global_shuffle_loses_and_doubles_nothing(results: list[Any]) -> None:
    wanted = [example(number) for number in range(5000)]
    for time in ("first", "second"):
        assert sorted(found for result in results for found in result[time]) == wanted
        for result in results:
            assert 1400 < len(result[time]) < 1900, "a third each, but for chance"
            origins = [sum(found[0] in part for found in result[time]) for part in PARTS]
            assert origins[0] > 500
            assert origins[2] > 700
            assert result[time] != sorted(result[time])
    for result in results:
        assert result["first"] != result["second"]
        assert result["sizes"] == [len(result["second"]), len(result["second"]), 5000, 5000]


def test_global_shuffle_gives_examples_to_trainers_without_files(results: list[Any]) -> None:
    third = [result["third"] for result in results]
    assert sorted(found for each in third for found in each) == [example(number) for number in PARTS[0]]
    assert all(len(each) > 500 for each in third)


def test_trainers_with_other_slots_are_told(results: list[Any]) -> None:
    assert [result["other"][0] for result in results] == ["UsageError"] * 3
    assert "trainer 1 has another list of slots than trainer 0" in results[0]["other"][1]


def test_a_trainer_that_is_gone_is_an_error(results: list[Any]) -> None:
    for result in (results[0], results[2]):
        kind, message = result["lost"]
        assert kind == "TrainerLostError"
        assert "load the examples again" in message
