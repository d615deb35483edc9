"""Checkpoints in memory: what a killed process leaves, and what the next one makes of it."""

import itertools
import os
import random
import signal
import time
from pathlib import Path

import numpy
import pytest
import torch

from trainers.checkpoints import checkpoint, memory
from trainers.checkpoints.manifest import CheckpointError
from trainers.checkpoints.memory import Keeper
from trainers.checkpoints.neighbour import neighbours
from trainers.checkpoints.slots import Slot
from trainers.errors import UsageError


class Kept(dict[str, int]):
    """The launcher's store, in this process."""

    def keep(self, name: str, descriptor: int) -> None:
        self[name] = os.dup(descriptor)

    def give(self, prefix: str) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in sorted(self.items()) if name.startswith(prefix)}

    def drop(self, name: str) -> None:
        os.close(self.pop(name))


@pytest.fixture
def store():
    made = Kept()
    yield made
    for descriptor in made.values():
        os.close(descriptor)


def saved(store: Kept, state: dict[str, object]) -> object:
    """What the next process finds: its step, and the state; None if nothing."""
    found = Keeper("x", store).newest()
    return None if found is None else (found.step, found.read(state))


def test_a_state_comes_back_as_it_was(store: Kept):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    odd = {
        "empty": torch.empty(0, 3), "none": None, "half": torch.ones(3, dtype=torch.bfloat16),
        "flag": torch.tensor(True), "turned": torch.arange(6).view(2, 3).t(), "words": ["a", (1, 2.5)],
        "grad": torch.nn.Parameter(torch.ones(2)), "twice": [model[0].weight, model[0].weight],
    }  # fmt: skip
    state = {"model": model, "optimizer": optimizer, "odd": odd}
    assert Keeper("x", store).newest() is None
    assert Keeper("x", store).save(7, state)
    step, found = saved(store, state)
    assert step == 7
    torch.testing.assert_close(dict(found["model"]), dict(model.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(found["optimizer"]["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    for name, value in odd.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found["odd"][name], value)
            assert found["odd"][name].dtype == value.dtype
    assert found["odd"]["words"] == ["a", (1, 2.5)]
    assert found["odd"]["twice"][0] is found["odd"]["twice"][1]


def test_arrays_and_lazy_views_come_back_as_they_were(store: Kept):
    wave = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"a": wave, "b": wave.conj(), "c": wave.imag, "d": wave.conj().imag}
    arrays = [numpy.array(3), numpy.arange(3, dtype=">i4"), numpy.arange(6).reshape(2, 3)[::-1, ::2]]
    Keeper("x", store).save(1, {"s": {"tensors": tensors, "arrays": arrays}})
    _, found = saved(store, {})
    for name, value in tensors.items():
        assert found["s"]["tensors"][name].tolist() == value.tolist(), name
    for value, array in zip(arrays, found["s"]["arrays"], strict=True):
        assert (array.shape, array.tolist()) == (value.shape, value.tolist())


class Versioned(torch.nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version", 1) < 2:  # weights were halves then
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_modules_know_the_version_of_their_state(monkeypatch: pytest.MonkeyPatch, store: Kept):
    monkeypatch.setattr(memory, "_keeper_of", lambda name: Keeper(name, store))
    model = torch.nn.Sequential(Versioned(2, 2))
    before = model[0].weight.clone()
    memory.save(1, {"model": model})
    assert memory.load({"model": model}) == 1
    assert torch.equal(model[0].weight, before)


def test_what_was_loaded_is_not_the_memory_itself(store: Kept):
    keeper = Keeper("x", store)
    value = torch.zeros(4)
    keeper.save(1, {"s": {"v": value}})
    _, found = saved(store, {})
    for step in (2, 3, 4):
        keeper.save(step, {"s": {"v": value + step}})
    assert torch.equal(found["s"]["v"], torch.zeros(4))


def test_a_process_may_load_as_often_as_it_likes(store: Kept):
    keeper = Keeper("x", store)
    value = torch.zeros(4)
    for step in range(1, 4):
        keeper.save(step, {"s": {"v": value + step}})
    assert keeper.newest().step == 3
    before = len(list(Path("/proc/self/fd").iterdir()))
    for step in range(4, 20):
        found = keeper.newest()
        assert found.step == step - 1
        assert torch.equal(found.read({})["s"]["v"], value + step - 1)
        keeper.save(step, {"s": {"v": value + step}})
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_state_that_grows_and_changes(store: Kept):
    keeper = Keeper("x", store)
    for step, size in enumerate((10, 100_000, 3, 200_000, 50), 1):
        assert keeper.save(step, {"s": {f"v{step}": torch.full((size,), step), "n": "x" * size}})
        _, found = saved(store, {})
        assert torch.equal(found["s"][f"v{step}"], torch.full((size,), step))
        assert found["s"]["n"] == "x" * size


@pytest.mark.parametrize("times", [15, 60])
def test_after_a_kill_at_any_moment_the_version_is_whole(store: Kept, times: int):
    """The process saves as fast as it can, tensors that are all of the number of the step."""
    random.seed(5)
    first = Keeper("x", store)
    for newest in (1, 2):  # from now on the store has both slots
        first.save(newest, {"s": {"a": torch.full((3,), newest)}, "n": {"n": newest}})
    for _ in range(times):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            keeper = Keeper("x", store)
            found = keeper.newest()
            step = 0 if found is None else found.step
            while True:
                step += 1
                keeper.save(
                    step, {"s": {name: torch.full((50_000,), step) for name in "abcd"}, "n": {"n": step}}
                )
                os.write(write, step.to_bytes(8))
        os.close(write)
        os.read(read, 8)  # once it saves
        time.sleep(random.uniform(0, 0.004))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = b""
        while data := os.read(read, 1 << 16):
            told += data
        os.close(read)
        step, state = saved(store, {})
        assert {int(value) for tensor in state["s"].values() for value in tensor.unique()} == {step}
        assert state["n"] == {"n": step}
        for slot in (Slot(fd, name) for name, fd in store.give("").items()):
            if slot.head.number:  # the other one may be what all ranks have: it is whole too, or empty
                values = {int(v) for t in slot.read(dict)["s"].values() for v in t.unique()}
                assert values == {slot.head.step}
        if told:
            assert step >= int.from_bytes(told[-8:])
        assert step >= newest
        newest = step
    assert newest > times


def test_steps_go_forward_and_names_are_apart(store: Kept):
    keeper, other = Keeper("x", store), Keeper("y", store)
    keeper.save(5, {"s": {"a": 1}})
    for step in (5, 4, -1, 2.0, True):
        with pytest.raises(UsageError, match="above"):
            keeper.save(step, {"s": {}})
    assert other.newest() is None
    assert Keeper("x", store).newest().step == 5


def test_what_cannot_be_kept_is_refused_and_loses_nothing(store: Kept):
    keeper = Keeper("x", store)
    keeper.save(1, {"s": {"a": 1}})
    for wrong in (lambda: 0, torch.eye(3).to_sparse()):
        with pytest.raises(UsageError, match="cannot be kept"):
            keeper.save(2, {"s": {"a": wrong}})
    assert saved(store, {}) == (1, {"s": {"a": 1}})


def test_without_a_launcher_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLEETRUN_MEMORY", raising=False)
    assert memory.save(1, {}, "alone") is False
    assert memory.load({}, "alone") is None


def test_a_launcher_that_has_gone_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FLEETRUN_MEMORY", str(tmp_path / "gone.memory"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(memory, "_keepers", {})
    assert memory.load({}) is None
    assert memory.save(1, {"s": {}}) is False
    assert memory.save(2, {"s": {}}) is False
    assert capfd.readouterr().err.count("no checkpoints in memory") == 1


def test_another_state_is_told(monkeypatch: pytest.MonkeyPatch, store: Kept):
    monkeypatch.setattr(memory, "_keeper_of", lambda name: Keeper(name, store))
    memory.save(3, {"a": {}})
    with pytest.raises(CheckpointError, match="saved without b"):
        memory.load({"a": {}, "b": {}})
    filled = {"old": 1}
    assert memory.load({"a": filled}) == 3
    assert filled == {}


def test_memory_counts_where_a_newer_checkpoint_on_the_disk_is_damaged(
    monkeypatch: pytest.MonkeyPatch, store: Kept, tmp_path: Path
):
    model = torch.nn.Linear(2, 2, bias=False)

    def begin_with(steps: range) -> None:
        monkeypatch.setattr(memory, "_keepers", {os.fspath(tmp_path): Keeper(os.fspath(tmp_path), store)})
        for step in steps:
            torch.nn.init.constant_(model.weight, step)
            checkpoint.keep_newest(tmp_path, step, model, every=None)

    monkeypatch.setenv("FLEETRUN_MEMORY", "not asked")
    checkpoint.save(tmp_path, 1, model)
    begin_with(range(2, 4))
    checkpoint.save(tmp_path, 4, model)
    (tmp_path / "step-00000004" / ".metadata").write_bytes(b"")
    begin_with(range(0))
    assert checkpoint.load(tmp_path, model) == 3
    assert model.weight[0, 0].item() == 3
    (tmp_path / "step-00000004" / "checkpoint.json").write_bytes(b"")
    (tmp_path / "step-00000001" / "checkpoint.json").write_bytes(b"")
    begin_with(range(0))
    assert checkpoint.load(tmp_path, model) == 3
    begin_with(range(0))
    checkpoint.save(tmp_path, 5, model)
    assert checkpoint.load(tmp_path, model) == 5


def test_the_newest_version_is_one_that_every_rank_has_somewhere():
    newest = memory._newest_of
    assert newest([], 1) is None
    assert newest([{0: [(5, 1), (4, 1)], 1: [(4, 1), (3, 1)]}], 2) == (4, 1)
    assert newest([{0: [(5, 1)], 1: [(5, 2)]}], 2) is None, "of two runs"
    assert newest([{0: [(5, 1), (3, 1)]}, {1: [(4, 1)]}], 2) is None
    assert newest([{0: [(5, 1)], 1: [(4, 1), (5, 1)]}, {}], 2) == (5, 1), "a copy for a machine that is new"
    assert newest([{0: [(5, 1)]}], 2) is None
    both = [{0: [(6, 1), (4, 1)], 1: [(4, 1)]}, {0: [(4, 1)], 1: [(6, 1), (4, 1)]}]
    assert newest(both, 2) == (6, 1)
    assert newest(both, 2, machines=2) == (4, 1), "the last that has copies"


def test_the_version_that_has_copies_is_replaced_after_those_that_have_none(store: Kept):
    """Ranks may be a save apart after a crash, and copies are older than what is loaded."""
    first = Keeper("x", store)
    first.save(1, {"s": {"a": 1}})
    first._neighbour = Pins(first._own[0])
    for step in (2, 3, 4):
        first.save(step, {"s": {"a": step}})
    assert [slot.head.step for slot in first._own] == [1, 4, 3]
    second = Keeper("x", store)
    assert second.newest().step == 4
    second._copied = second._own[0].head.version
    for copies, replaced in (([0, 1], 4), ([2, 0], 3), ([1, 2, 0], 3)):
        second._copies[9] = [second._own[number] for number in copies]
        assert second._room(9).head.step == replaced
    second.save(5, {"s": {"a": 5}})
    assert [slot.head.step for slot in second._own] == [1, 4, 5]


def test_what_no_rank_here_writes_any_more_is_given_back_once_it_is_replaced(store: Kept):
    """Of a rank that is gone, in a job that had more, and copies, for which there is no machine now."""
    keeper = Keeper("x", store)
    keeper.save(1, {"s": {"a": 1}})
    for owner, kind in ((0, "copy"), (1, "own"), (1, "copy")):
        keeper._new([], owner, kind).close()
    assert still_open(".1.own.") == 1
    keeper = Keeper("x", store)
    assert keeper.newest().step == 1
    keeper.save(2, {"s": {"a": 2}})
    assert len(store) == 5, "another rank may not have saved yet"
    keeper.save(3, {"s": {"a": 3}})
    assert [name.partition(".")[2] for name in store] == ["0.own.0", "0.own.1"]
    assert still_open(".1.own.", ".copy.") == 0
    assert saved(store, {}) == (3, {"s": {"a": 3}})


def test_it_is_kept_until_there_are_copies_on_two_machines(store: Kept):
    keeper = Keeper("x", store)
    keeper.save(1, {"s": {"a": 1}})
    keeper._new([], 1, "own")
    keeper = Keeper("x", store)
    assert keeper.newest().step == 1
    keeper._neighbour = pins = Pins()
    for step in (4, 5, 6):
        keeper.save(step, {"s": {"a": step}})
    assert any(".1.own." in name for name in store)
    pins.copied = keeper._run
    keeper.save(7, {"s": {"a": 7}})
    assert not any(".1.own." in name for name in store)


def test_a_machine_keeps_what_its_ranks_write_and_what_is_sent_there():
    held = {rank: [Slot.new(f"x.{rank}.{kind}.0") for kind in ("own", "copy")] for rank in range(5)}

    def unused(places: str, rank: int) -> list[str]:
        return [slot.name[2:-2] for slot in memory._unused(held, [(node, 0) for node in places], rank)]

    assert unused("AABB", 0) == ["0.copy", "1.copy", "2.own", "3.own", "4.own", "4.copy"]
    assert unused("AABB", 3) == ["0.own", "1.own", "2.copy", "3.copy", "4.own", "4.copy"]
    assert unused("ABC", 1) == ["0.own", "1.copy", "2.own", "2.copy", "3.own", "3.copy", "4.own", "4.copy"]
    assert unused("A", 0) == [
        "0.copy",
        *(f"{rank}.{kind}" for rank in (1, 2, 3, 4) for kind in ("own", "copy")),
    ]
    for slot in itertools.chain(*held.values()):
        slot.close()


def still_open(*names: str) -> int:
    found = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("memfd" in each and any(name in each for name in names) for each in found)


class Pins:
    copied = 0

    def has_copies_of(self, run: int) -> bool:
        return run == self.copied

    def __init__(self, *slots: Slot) -> None:
        self._slots = slots

    def pinned(self) -> list[Slot]:
        return list(self._slots)


@pytest.mark.parametrize(
    ("sizes", "targets"),
    [
        ([2], None),
        ([1, 1], [1, 0]),
        ([2, 2], [2, 3, 0, 1]),
        ([2, 2, 2], [2, 3, 4, 5, 0, 1]),
        ([3, 1], [3, 3, 3, 0]),
        ([1, 3], [1, 0, 0, 0]),
    ],
)
def test_each_rank_has_a_neighbour_on_the_next_machine(sizes: list[int], targets: list[int] | None):
    places = [(str(node), place) for node, size in enumerate(sizes) for place in range(size)]
    assert neighbours(places) == targets
