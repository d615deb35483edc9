"""Keep checkpoints in memory that outlives the process.

The launcher keeps the newest two versions of each rank's state in shared memory, until its end. A save is one
copy. A restart continues from the newest version that all ranks have.

    from trainers.checkpoints import memory

    state = {"model": model, "optimizer": optimizer}
    step = memory.load(state) or 0       # after init_process_group; all ranks
    ...
    memory.save(step, state)             # all ranks, as often as you like

While ranks train together, they are at most one save apart. A version that all have is therefore among their
newest two, and it is whole after any kind of end (`slots`). With `neighbour=True`, the next node also has
copies of the versions, in case a node is lost (`neighbour`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import cache

import torch
import torch.distributed as dist
import xxhash

from fleetrun.aliases import Document, Fields
from fleetrun.envs.channels import MEMORY_VARIABLE
from fleetrun.frozen import frozen
from trainers import progress
from trainers.checkpoints.manifest import CheckpointError, put_values
from trainers.checkpoints.neighbour import Neighbour, NoNeighbour, neighbours, place_on_node
from trainers.checkpoints.ranks import Ranks
from trainers.checkpoints.slots import Head, Packed, Slot, StepAndRun, Store, meshes_of
from trainers.checks import is_whole
from trainers.errors import UsageError
from trainers.process.log import glog

_PIECE = 1 << 26  # bytes that ranks send at once


def save(step: int, state: Fields, name: str = "", *, neighbour: bool = False) -> bool:
    """Keep the state after `step` steps. All ranks must call it, with a later step than the last.

    `state` maps names to dicts, and to objects with `state_dict` and `load_state_dict`. States with different
    `name` are kept separately. Return False without a launcher that keeps memory, or without enough memory.
    Raises UsageError for values that cannot be kept.
    """
    keeper = _keeper_of(name)
    if keeper is None or not keeper.save(step, state, neighbour=neighbour):
        return False
    progress.meter.saved(step)
    return True


def load(state: Fields, name: str = "") -> int | None:
    """Load the newest version that all ranks have into `state`, dicts in place, and return its step.

    Return None, without any change, if there is none: at the first start, after the launcher has ended, or
    with another number of ranks. All ranks must call it after joining their group. Raises CheckpointError for
    a state of other names.
    """
    found = newest(name)
    if found is None:
        return None
    _take(state, found.read(state))
    progress.meter.resumed(found.made)
    return found.step


def newest(name: str = "") -> Version | None:
    """Return the newest version that all ranks have. All ranks must call it."""
    keeper = _keeper_of(name)
    return None if keeper is None else keeper.newest()


def _take(state: Fields, saved: Fields) -> None:
    """Load saved values into the state. Raises CheckpointError if a name is missing."""
    if missing := sorted(state.keys() - saved.keys()):
        raise CheckpointError(
            f"The state in memory was saved without {', '.join(missing)}. Load it without these names."
        )
    put_values(state, saved)


@frozen
class Version:
    """One version of this rank's state."""

    step: int
    made: int
    """Number of steps at that time. `step` does not show it if a script saves by epochs."""
    _slot: Slot

    def read(self, state: Fields) -> Document:
        """Return the saved state. Sharded tensors use the meshes of the tensors in `state`."""
        return self._slot.read(cache(lambda: meshes_of(state)))


_keepers: dict[str, Keeper] = {}


def _keeper_of(name: str) -> Keeper | None:
    path = os.environ.get(MEMORY_VARIABLE)
    if not path:
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise UsageError("Checkpoints in memory need all ranks. Call init_process_group() first.")
    if name not in _keepers:
        _keepers[name] = Keeper(name, Store(path))
    return _keepers[name]


_Versions = dict[int, list[StepAndRun]]
"""The versions on a node, by the rank that they belong to."""


class Keeper:
    """The versions of one state.

    In the launcher's store, own versions are named `NAME.RANK.own.0` and so on, and copies for other nodes
    `NAME.RANK.copy.0`.
    """

    def __init__(self, name: str, store: Store) -> None:
        self._name = xxhash.xxh3_64_hexdigest(name.encode(errors="surrogateescape"))
        self._store = store
        self._slots: dict[str, Slot] = {}
        self._own: list[Slot] | None = None
        self._copies: dict[int, list[Slot]] = {}
        self._unused: list[Slot] = []
        self._neighbour: Neighbour | NoNeighbour | None = None
        self._number = self._run = self._saves = 0
        self._loaded: StepAndRun | None = None
        self._copied: StepAndRun | None = None
        self._last = -1
        self._warned = False

    def save(self, step: int, state: Fields, *, neighbour: bool = False) -> bool:
        ranks = Ranks()
        if self._own is None:
            self._begin(ranks, self._held())
        if not is_whole(step) or step <= self._last:
            raise UsageError(
                f"The step is {step!r}; it must be a whole number above the last step, {self._last}"
            )
        packed = Packed(state)
        self._number += 1
        made = max(step, progress.meter.steps)
        head = Head(self._number, step, self._run, ranks.world, made, packed.size, len(packed.values))
        if neighbour and ranks.world > 1 and self._neighbour is None:
            copied = next((slot for slot in self._own or () if slot.head.version == self._copied), None)
            self._neighbour = Neighbour.of(ranks, self._room, copied)
        slot: Slot | None = None
        try:
            slot = self._free(ranks.rank)
            slot.write(head, packed.tensors, packed.values)
        except (CheckpointError, OSError) as error:
            self._warn(error)
            slot = None
        if neighbour and self._neighbour is not None:
            self._neighbour.offer(slot)
        self._last = step
        self._saves += slot is not None
        if self._unused and self._is_replaced():
            self._give_back()
        return slot is not None

    def newest(self) -> Version | None:
        ranks = Ranks()
        held = self._held()
        mine = {owner: _versions(slots, ranks.world) for owner, slots in held.items()}
        first = place_on_node()[1] == 0
        shared = {owner: list(versions) for owner, versions in mine.items()} if first else {}
        everywhere = ranks.gather(lambda: shared)
        version = self._loaded = _newest_of(everywhere, ranks.world)
        self._copied = _newest_of(everywhere, ranks.world, machines=2) or version
        chosen = None
        if version is not None:
            chosen = mine.get(ranks.rank, {}).get(version)
            chosen = self._fetched(ranks, version, held, everywhere) or chosen
        self._begin(ranks, self._held())
        if chosen is None:
            return None
        self._last = chosen.head.step
        return Version(chosen.head.step, chosen.head.made, chosen)

    def _held(self) -> dict[int, list[Slot]]:
        """Return the slots in the memory of this node by rank, copies before own ones."""
        try:
            given = self._store.give(f"{self._name}.")
        except CheckpointError as error:
            self._warn(error)
            return {}
        held: dict[int, list[Slot]] = {}
        for name in sorted(given, key=lambda name: name.split(".")[2:]):
            held.setdefault(int(name.split(".")[1]), []).append(self._slot(name, given[name]))
        return held

    def _slot(self, name: str, descriptor: int) -> Slot:
        """Return the one slot for this memory, because it may already be in use for the training."""
        known = self._slots.get(name)
        if known is None or not os.path.sameopenfile(known.descriptor, descriptor):
            known = self._slots[name] = Slot(descriptor, name)
        else:
            os.close(descriptor)
            known.look()
        return known

    def _begin(self, ranks: Ranks, held: Mapping[int, list[Slot]]) -> None:
        """Start a run, which all ranks start together."""
        gathered = ranks.gather(lambda: (place_on_node(), int.from_bytes(os.urandom(7))))
        self._run = gathered[0][1]
        mine = held.get(ranks.rank, [])
        self._own = _of_kind("own", mine)
        self._copies = {owner: _of_kind("copy", slots) for owner, slots in held.items()}
        self._unused = _unused(held, [place for place, _ in gathered], ranks.rank)
        self._number = max((slot.head.number for slot in mine), default=0)
        self._saves = 0

    def _is_replaced(self) -> bool:
        """Return True if all ranks have a version of this run, on two nodes if copies are enabled.

        A rank that has saved twice can be sure of this for its first save.
        """
        return self._saves > 1 and (self._neighbour is None or self._neighbour.has_copies_of(self._run))

    def _give_back(self) -> None:
        """Release slots that ranks on this node have stopped writing. Each rank must release them."""
        for slot in self._unused:
            self._slots.pop(slot.name, None)
            slot.close()
        try:
            if place_on_node()[1] == 0:
                for slot in self._unused:
                    self._store.drop(slot.name)
        except CheckpointError as error:
            self._warn(error)
        self._unused = []

    def _free(self, rank: int) -> Slot:
        """Return the slot for the next version, other than the best slot and slots being copied.

        Raises CheckpointError or OSError.
        """
        assert self._own is not None
        taken = [] if self._neighbour is None else self._neighbour.pinned()
        if self._own:
            taken.append(max(self._own, key=self._worth))
        free = [slot for slot in self._own if slot not in taken]
        return min(free, key=self._worth) if free else self._new(self._own, rank, "own")

    def _room(self, owner: int) -> Slot:
        """Return the slot for another copy of this rank's state."""
        copies = self._copies.setdefault(owner, [])
        return self._lesser_of_two(copies, owner, "copy", self._worth_as_copy)

    def _lesser_of_two(
        self, slots: list[Slot], owner: int, kind: str, worth: Callable[[Slot], tuple[int, int]]
    ) -> Slot:
        return min(slots, key=worth) if len(slots) > 1 else self._new(slots, owner, kind)

    def _worth(self, slot: Slot) -> tuple[int, int]:
        """Return the worth of a slot. The loaded version is worth more than later ones of the run before.

        Another rank may lack such a later version. Until the first save is complete everywhere, all ranks
        share only the loaded version. The same holds for the version with copies, until newer copies exist.
        """
        head = slot.head
        return head.run == self._run or head.version in (self._loaded, self._copied), head.number

    def _worth_as_copy(self, slot: Slot) -> tuple[int, int]:
        """Return the worth of a copy. The version with copies everywhere is worth more than later versions.

        Other ranks may lack a copy of a later version, even of the loaded one.
        """
        head = slot.head
        return 2 if head.run == self._run else head.version == self._copied, head.number

    def _new(self, slots: list[Slot], owner: int, kind: str) -> Slot:
        slot = Slot.new(f"{self._name}.{owner}.{kind}.{len(slots)}")
        self._store.keep(slot.name, slot.descriptor)
        self._slots[slot.name] = slot
        slots.append(slot)
        return slot

    def _fetched(
        self,
        ranks: Ranks,
        version: StepAndRun,
        held: Mapping[int, list[Slot]],
        everywhere: Sequence[_Versions],
    ) -> Slot | None:
        """Receive this rank's version from another node, if this one lacks it. All ranks send what
        others lack.
        """
        there = ranks.gather(lambda: version in _versions(held.get(ranks.rank, []), ranks.world))
        if all(there):
            return None
        group = dist.new_group(backend="gloo")
        fetched = None
        for owner in (rank for rank, has in enumerate(there) if not has):
            holder = next(rank for rank, each in enumerate(everywhere) if version in each.get(owner, []))
            if holder == ranks.rank:
                _send(_versions(held[owner], ranks.world)[version], owner, group)
            elif owner == ranks.rank:
                own = _of_kind("own", held.get(owner, []))
                fetched = self._lesser_of_two(own, owner, "own", self._worth)
                _receive(fetched, holder, group)
        return fetched

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            glog(f"warning: no checkpoints in memory: {error}")
            self._warned = True


def _of_kind(kind: str, slots: Sequence[Slot]) -> list[Slot]:
    return [slot for slot in slots if f".{kind}." in slot.name]


def _unused(held: Mapping[int, Sequence[Slot]], places: Sequence[tuple[str, int]], rank: int) -> list[Slot]:
    """Return this node's unused slots.

    These are own versions of ranks that have moved or ended, and copies of ranks that now send to another
    node.
    """
    here = {each for each, (node, _) in enumerate(places) if node == places[rank][0]}
    copied = {each for each, target in enumerate(neighbours(places) or ()) if target in here}
    return [
        slot
        for owner, slots in held.items()
        for kind, writers in (("own", here), ("copy", copied))
        for slot in _of_kind(kind, slots)
        if owner not in writers
    ]


def _versions(slots: Sequence[Slot], world: int) -> dict[StepAndRun, Slot]:
    return {slot.head.version: slot for slot in slots if slot.head.number and slot.head.world == world}


def _newest_of(everywhere: Sequence[_Versions], world: int, machines: int = 1) -> StepAndRun | None:
    """Return the newest version that exists for every rank, on at least `machines` nodes."""
    owners: dict[StepAndRun, Counter[int]] = {}
    for held in everywhere:
        for owner, versions in held.items():
            for version in versions:
                owners.setdefault(version, Counter())[owner] += 1
    whole = (each for each, of in owners.items() if all(of[rank] >= machines for rank in range(world)))
    return max(whole, default=None)


def _send(slot: Slot, to: int, group: dist.ProcessGroup) -> None:
    dist.send(torch.tensor(astuple(slot.head)), to, group)
    with slot.content() as content:
        for piece in torch.split(torch.frombuffer(content, dtype=torch.uint8), _PIECE):
            dist.send(piece, to, group)


def _receive(slot: Slot, source: int, group: dist.ProcessGroup) -> None:
    head = torch.zeros(len(astuple(Head())), dtype=torch.int64)
    dist.recv(head, source, group)

    def fill(room: memoryview) -> None:
        for piece in torch.split(torch.frombuffer(room, dtype=torch.uint8), _PIECE):
            dist.recv(piece, source, group)

    slot.fill(Head(*head.tolist()), fill)
