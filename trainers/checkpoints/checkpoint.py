"""Save and load checkpoints of collective jobs, written by all ranks and published atomically.

Any number of ranks can read them. This module defines the order of steps, the rank that does each step, and
saves in the background. The other modules of this directory handle files, tensors and states. All ranks of
the process group must call every function, with equal arguments. A process without a group is a rank of one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.nn import Module
from torch.optim import Optimizer

from fleetrun.aliases import Document, Fields
from fleetrun.frozen import frozen
from trainers import progress
from trainers.checkpoints import directory as checkpoint_directory
from trainers.checkpoints import memory
from trainers.checkpoints import tensors as checkpoint_tensors
from trainers.checkpoints.directory import CheckpointDirectory, open_directory
from trainers.checkpoints.manifest import CheckpointError, Manifest, step_of
from trainers.checkpoints.ranks import Ranks, done
from trainers.checkpoints.state import Contents
from trainers.checkpoints.tensors import Staging
from trainers.checks import is_whole
from trainers.errors import FleetError, UsageError
from trainers.process.hooks import at_exit, failed
from trainers.process.log import glog
from trainers.storage.folder import Where

# ---- One save at a time in the background, in a thread with a separate process group


class Background:
    """Runs one save at a time in a thread, with a separate process group.

    All ranks must call `start` and `wait` in the same order.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: Future[str] | None = None
        self._groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)

    def start(self, work: Callable[[], str]) -> None:
        """Start a save, after `wait`. Errors of `work` are not raised here."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="fleet-checkpoint")
            # It is registered after the group's own exit hook and so runs before it, because the save needs
            # its peers.
            at_exit(self._end)
        self._under_way = self._threads.submit(work)

    @property
    def busy(self) -> bool:
        """True while a save runs. It may differ between ranks."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> str | None:
        """Wait for the current save. Return its path, or None without a save. Raises the errors of the save,
        once.
        """
        ended, self._under_way = self._under_way, None
        return None if ended is None else ended.result()

    def group(self) -> dist.ProcessGroup | None:
        """Return a Gloo group of all ranks for the thread only. The first call makes it, on all ranks
        together.

        In a group of the training, its messages would mix with the training's messages.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._groups[0] is not dist.group.WORLD:
            self._groups = dist.group.WORLD, dist.new_group(backend="gloo")
        return self._groups[1]

    def _end(self) -> None:
        """Report a failed save, after the interpreter has waited for the thread.

        Otherwise an exit code of 0 would hide the failure.
        """
        error = None if self._under_way is None else self._under_way.exception()
        if error is None:
            return
        if failed():
            glog(f"warning: the last checkpoint was not saved: {error}")
            return
        raise error


# ---- Saving and loading

KEEP = 2

_damaged: set[str] = set()
"""Paths of checkpoints that this process found damaged. It ignores them, and may replace them."""

_own: set[str] = set()
"""Paths of checkpoints that this run has saved or loaded, or that it continues."""

_background, _staging = Background(), Staging()


@frozen(kw_only=True)
class _Order:
    """One save.

    `tensors` are this rank's tensors, and `keys` the names that all ranks must save together. `parts` returns
    the other values of this rank, or raises their error.
    """

    checkpoints: CheckpointDirectory
    step: int
    keep: int
    tensors: checkpoint_tensors.Tensors
    keys: set[str]
    parts: Callable[[], Document]


def save(
    directory: Where,
    step: int,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    keep: int = KEEP,
    state: Fields | None = None,
    background: bool = False,
) -> str | None:
    """Save model, optimizer and state as `directory/step-XXXXXXXX`, and remove all but the newest `keep`.

    When it returns the path, on any rank, the checkpoint is complete and durable. A step that this run has
    already saved or loaded is not saved again. `state` maps names to dicts, and to objects with `state_dict`
    and `load_state_dict`. Rank 0's values are saved.

    With `background`, make a copy now, write it while training continues, and return None. The next call of
    this module raises the errors of this save on all ranks.

    Raises CheckpointError, without any change, also for an earlier background save that failed. Raises
    UsageError for wrong arguments.
    """
    wait()
    ranks = Ranks(_background.group() if background else None)

    def ordered() -> _Order:
        contents = Contents(model, optimizer, state or {})
        if not is_whole(step) or step < 0:
            raise UsageError(f"The step of a checkpoint is {step!r}; it must be a whole number of at least 0")
        if keep < 1:
            raise UsageError(f"keep is {keep!r}; it must be at least 1")
        checkpoints, tensors = open_directory(directory), contents.tensors(ranks.rank, ranks.world)
        return _Order(
            checkpoints=checkpoints,
            step=step,
            keep=keep,
            tensors=_staging.copies(tensors) if background else tensors,
            keys=contents.keys(),
            parts=done(lambda: contents.parts(ranks.rank)),
        )

    order = ranks.each(ordered)
    if not background:
        return _write(order, ranks)
    _background.start(partial(_write, order, ranks))
    return None


_written = float("-inf")
"""When the last save after `keep_newest` started, by the clock of this process."""


def keep_newest(
    directory: Where,
    step: int,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    keep: int = KEEP,
    every: float | None = 60.0,
    neighbour: bool = False,
    state: Fields | None = None,
    as_one: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Keep the state in memory that outlives this process (`memory.save`), for `load` of the same directory.

    Also save it in the background, as `save` does, if no such save is running and the last one started at
    least `every` seconds ago (None for never). Inside the context `as_one`, ranks have one model. The memory
    holds each rank's own.
    """
    global _written
    ranks = Ranks()

    def everything() -> tuple[Fields, bool]:
        contents = Contents(model, optimizer, state or {})
        kept = {"tensors": contents.everything(ranks.rank), "parts": contents.own_parts(ranks.rank)}
        return kept, every is not None and time.monotonic() - _written >= every and not _background.busy

    made = done(everything)
    # This also keeps ranks together. The memory has two versions per rank, and one must be of a common step.
    due, *_ = ranks.gather(lambda: made()[1])
    memory.save(step, made()[0], name=os.fspath(directory), neighbour=neighbour)
    if due:
        _written = time.monotonic()
        with as_one():
            save(directory, step, model, optimizer, keep=keep, state=state, background=True)


def wait() -> str | None:
    """Wait for the save in the background, and return its path once it is complete and durable.

    Return None without a save. Raises CheckpointError if the save failed.
    """
    return _background.wait()


def load(
    directory: Where,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    state: Fields | None = None,
) -> int | None:
    """Load the newest checkpoint in `directory`, and return its step.

    Return None, without any change, if there is none. Any number of ranks may load a checkpoint of any number
    of ranks. A damaged checkpoint is skipped with a warning, and the one before it is loaded. Raises
    CheckpointError if all are damaged, for a checkpoint of another model, or for a background save that
    failed. Raises UsageError for wrong arguments.
    """
    wait()
    ranks = Ranks()
    checkpoints, contents = ranks.each(
        lambda: (open_directory(directory), Contents(model, optimizer, state or {}))
    )
    kept = memory.newest(os.fspath(directory))
    if kept is None:
        ranks.broadcast(lambda: _mention_interrupted(checkpoints))
    while True:
        chosen = ranks.broadcast(lambda: _newest(checkpoints, -1 if kept is None else kept.step))
        if chosen is None and kept is not None:
            _take_kept(kept, contents, ranks)
            # The checkpoints of the run that this run continues.
            ranks.broadcast(lambda: _own.update(map(checkpoints.path, checkpoints.complete())))
            return kept.step
        if chosen is None:
            return None
        name, manifest = chosen
        shares = ranks.gather(partial(_look_at_share, checkpoints, name, manifest, ranks))
        wrong = next(filter(None, shares), None)
        if wrong is None:
            break
        _pass_over(checkpoints.path(name), wrong, ranks.rank)
    tensors = ranks.each(lambda: contents.wanted(manifest, ranks.rank, ranks.world))
    checkpoint_tensors.read(tensors, checkpoints, name, manifest.index)
    ranks.each(lambda: contents.take(manifest, tensors))
    _own.add(checkpoints.path(name))
    return manifest.step


def _take_kept(kept: memory.Version, contents: Contents, ranks: Ranks) -> None:
    """Load from memory. As in a checkpoint, rank 0's small values are loaded."""
    read = done(lambda: kept.read({"tensors": contents.everything(ranks.rank)}))
    state = ranks.gather(lambda: read()["parts"]["state"])[0]
    tensors = read()["tensors"]
    manifest = Manifest(
        step=kept.step,
        world=ranks.world,
        files={},
        index={key: {"shape": list(value.shape)} for key, value in tensors.items()},
        parts=read()["parts"] | {"state": state},
    )

    def take() -> None:
        contents.check(manifest)
        contents.take(manifest, tensors)

    ranks.each(take)


# ---- writing


def _write(order: _Order, ranks: Ranks) -> str:
    checkpoints = order.checkpoints
    name, started = ranks.broadcast(lambda: _begin(order))
    if not started:
        return checkpoints.path(name)
    try:
        with progress.activity(f"saving the checkpoint of step {order.step}"):
            written = checkpoint_tensors.write(order.tensors, checkpoints, name, ranks.group)
        shares = ranks.gather(partial(_share, order, ranks.rank, written))
        name = ranks.broadcast(lambda: _commit(order, name, written.index, shares))
    except FleetError:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                checkpoints.discard(name)
        raise
    progress.meter.saved(order.step)
    progress.meter.flush()  # the launcher receives it even if the process is killed now
    if ranks.rank == 0:
        _prune(checkpoints, order.keep)
    return checkpoints.path(name)


def _begin(order: _Order) -> tuple[str, bool]:
    """Return (name to write under, True), or (name of this step's checkpoint, False) if it is saved
    already.
    """
    checkpoints, step = order.checkpoints, order.step
    saved = [name for name in checkpoints.complete() if checkpoints.path(name) not in _damaged]
    if saved and step_of(saved[0]) > step:
        raise UsageError(
            f"{checkpoints.where} has a checkpoint of step {step_of(saved[0])}, but this is step {step}. "
            "The checkpoint may belong to another run. Load the newest checkpoint before you train, or save "
            "to another directory."
        )
    if saved and step_of(saved[0]) == step:
        if checkpoints.path(saved[0]) not in _own:
            raise UsageError(
                f"{checkpoints.where} has a checkpoint of step {step}, which this run neither saved nor "
                "loaded. It may belong to another run. Load it first, or save elsewhere."
            )
        return saved[0], False
    order.parts()
    return checkpoints.begin(step), True


def _share(order: _Order, rank: int, written: checkpoint_tensors.Written) -> tuple[object, Document]:
    """Return (files, parts) of this rank. Rank 0's parts, which may be large, are left out."""
    if missing := sorted(order.keys - written.index.keys()):
        raise CheckpointError(
            f"Rank {rank} has {missing[0]} and {len(missing) - 1} other names that the rank that saves them "
            "lacks. Train the same parameters with the same optimizer on all ranks."
        )
    return written.files, order.parts() if rank else {}


def _commit(order: _Order, name: str, index: Fields, shares: Sequence[Any]) -> str:
    manifest = Manifest(
        step=order.step,
        world=len(shares),
        files={file: about for files, _ in shares for file, about in files.items()},
        index=index,
        parts=Contents.joined(order.parts(), [parts for _, parts in shares]),
    )
    final = checkpoint_directory.commit(order.checkpoints, name, manifest)
    _damaged.discard(order.checkpoints.path(final))
    _own.add(order.checkpoints.path(final))
    return final


def _prune(checkpoints: CheckpointDirectory, keep: int) -> None:
    try:
        checkpoint_directory.prune(checkpoints, keep, _damaged)
    except OSError as error:  # the new checkpoint is complete, so failing to remove old ones is not an error
        glog(f"warning: old checkpoints in {checkpoints.where} could not be removed: {error}")


# ---- reading


def _mention_interrupted(checkpoints: CheckpointDirectory) -> None:
    for name in checkpoints.interrupted():
        glog(f"{checkpoints.path(name)} is ignored, because its save was interrupted")


def _newest(checkpoints: CheckpointDirectory, kept: int) -> tuple[str, Manifest] | None:
    """Return the newest intact checkpoint of a later step than the one in memory (-1 for none).

    Raises CheckpointError if all checkpoints are damaged and the memory has none.
    """
    there = [name for name in checkpoints.complete() if step_of(name) > kept]
    for name in there:
        if checkpoints.path(name) in _damaged:
            continue
        try:
            return name, checkpoint_directory.read_manifest(checkpoints, name)
        except CheckpointError as error:
            _pass_over(checkpoints.path(name), str(error), 0)
    if there and kept < 0:
        raise CheckpointError(
            f"All {len(there)} checkpoints in {checkpoints.where} are damaged. The messages above give the "
            "reasons. Remove the checkpoints to start over."
        )
    return None


def _look_at_share(
    checkpoints: CheckpointDirectory, name: str, manifest: Manifest, ranks: Ranks
) -> str | None:
    """Check this rank's share of the files, and return their damage, or None."""
    mine = sorted(manifest.files)[ranks.rank :: ranks.world]
    return checkpoint_directory.damage(checkpoints, name, {file: manifest.files[file] for file in mine})


def _pass_over(path: str, why: str, rank: int) -> None:
    _damaged.add(path)
    if rank == 0:
        name = path.rpartition("/")[2]
        glog(f"warning: {why}, so the checkpoint {name} is skipped, and the one before it is loaded")
