"""Checkpoints of collective jobs that survive: written aside by all ranks, published atomically, read by
any number of ranks.

This module has the order of steps, which rank does them, and saves in the background; files, tensors and
states are in the other modules of this folder. Every function is called by all ranks of the process
group, with equal arguments; a process without a group is a rank of one.
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

# ---- One save at a time in the background: in a thread, with a process group of its own


class Background:
    """`start` and `wait` are called by all ranks, in the same order."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._under_way: Future[str] | None = None
        self._groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)

    def start(self, work: Callable[[], str]) -> None:
        """After `wait`. Raises nothing that `work` raises."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="fleet-checkpoint")
            # After the group's own, so before it: the save needs its peers.
            at_exit(self._end)
        self._under_way = self._threads.submit(work)

    @property
    def busy(self) -> bool:
        """Whether a save is under way; not the same on all ranks."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self) -> str | None:
        """What the save under way returns, None when there is none; raises what it raises, once."""
        ended, self._under_way = self._under_way, None
        return None if ended is None else ended.result()

    def group(self) -> dist.ProcessGroup | None:
        """Gloo among all ranks, for the thread alone: in a group of the training's its messages would get
        between the training's own. Made at the first call, by all ranks together.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        if self._groups[0] is not dist.group.WORLD:
            self._groups = dist.group.WORLD, dist.new_group(backend="gloo")
        return self._groups[1]

    def _end(self) -> None:
        """The interpreter has waited for the thread. A save that has failed unnoticed must not stay
        so: an exit code of 0 would say that it is complete.
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
"""Paths of those that this process has found damaged: it ignores them, and may replace them."""

_own: set[str] = set()
"""Paths of those that this run has saved or loaded, or continues."""

_background, _staging = Background(), Staging()


@frozen(kw_only=True)
class _Order:
    """One save. `tensors` is what this rank saves, `keys` what all of them together must; `parts` returns its
    other values, or raises what was wrong with them.
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
    """Save all of it as `directory/step-XXXXXXXX`, and remove what is older than the newest `keep`. When it
    returns its path, on any rank, the checkpoint is complete and durable.

    A step that this run has saved or loaded already is not saved again. `state`: by name, dicts and objects
    with `state_dict` and `load_state_dict`; rank 0's count. Raises CheckpointError, then nothing has changed,
    also for a save in the background that has failed; UsageError.

    background: make a copy now and write it while training continues, and return None. The next call of this
    module raises what went wrong meanwhile, on all ranks.
    """
    wait()
    ranks = Ranks(_background.group() if background else None)

    def ordered() -> _Order:
        contents = Contents(model, optimizer, state or {})
        if not is_whole(step) or step < 0:
            raise UsageError(f"the step of a checkpoint is {step!r}; it must be a whole number from 0 on")
        if keep < 1:
            raise UsageError(f"keep is {keep!r}; at least 1 checkpoint must be kept")
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
"""When the last save behind `keep_newest` began, by the clock of this process."""


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
    """Keep all of it in memory that outlives this process (`memory.save`), for `load` of the same directory.
    Save it in the background too, as `save`, if no such save is under way and the last one began `every`
    seconds ago (None: never). `as_one`: inside it ranks have one model; memory has each rank's own.
    """
    global _written
    ranks = Ranks()

    def everything() -> tuple[Fields, bool]:
        contents = Contents(model, optimizer, state or {})
        kept = {"tensors": contents.everything(ranks.rank), "parts": contents.own_parts(ranks.rank)}
        return kept, every is not None and time.monotonic() - _written >= every and not _background.busy

    made = done(everything)
    # It also keeps ranks together: memory has two versions of each, one of which must be of the same step.
    due, *_ = ranks.all_tell(lambda: made()[1])
    memory.save(step, made()[0], name=os.fspath(directory), neighbour=neighbour)
    if due:
        _written = time.monotonic()
        with as_one():
            save(directory, step, model, optimizer, keep=keep, state=state, background=True)


def wait() -> str | None:
    """The path of the save in the background, once it is complete and durable; None when there is none.
    Raises CheckpointError when it has failed.
    """
    return _background.wait()


def load(
    directory: Where,
    model: Module,
    optimizer: Optimizer | None = None,
    *,
    state: Fields | None = None,
) -> int | None:
    """Bring all of it to the newest checkpoint in `directory`; its step, or None when there is none: then
    nothing has changed. Any number of ranks may load what any number has saved.

    A damaged checkpoint is skipped with a warning, for the one before. Raises CheckpointError when all
    are damaged, when it is of another model, or for a save in the background that has failed; UsageError.
    """
    wait()
    ranks = Ranks()
    checkpoints, contents = ranks.each(
        lambda: (open_directory(directory), Contents(model, optimizer, state or {}))
    )
    kept = memory.newest(os.fspath(directory))
    if kept is None:
        ranks.first_tells(lambda: _mention_interrupted(checkpoints))
    while True:
        chosen = ranks.first_tells(lambda: _newest(checkpoints, -1 if kept is None else kept.step))
        if chosen is None and kept is not None:
            _take_kept(kept, contents, ranks)
            # Those of the run that this one continues.
            ranks.first_tells(lambda: _own.update(map(checkpoints.path, checkpoints.complete())))
            return kept.step
        if chosen is None:
            return None
        name, manifest = chosen
        shares = ranks.all_tell(partial(_look_at_share, checkpoints, name, manifest, ranks))
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
    """From memory. As in a checkpoint the small values of rank 0 count."""
    read = done(lambda: kept.read({"tensors": contents.everything(ranks.rank)}))
    state = ranks.all_tell(lambda: read()["parts"]["state"])[0]
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
    name, begun = ranks.first_tells(lambda: _begin(order))
    if not begun:
        return checkpoints.path(name)
    try:
        with progress.activity(f"saving the checkpoint of step {order.step}"):
            written = checkpoint_tensors.write(order.tensors, checkpoints, name, ranks.group)
        shares = ranks.all_tell(partial(_share, order, ranks.rank, written))
        name = ranks.first_tells(lambda: _commit(order, name, written.index, shares))
    except FleetError:
        if ranks.rank == 0:
            with contextlib.suppress(OSError):
                checkpoints.discard(name)
        raise
    progress.meter.saved(order.step)
    progress.meter.flush()  # the launcher knows of it also if the process is killed now
    if ranks.rank == 0:
        _prune(checkpoints, order.keep)
    return checkpoints.path(name)


def _begin(order: _Order) -> tuple[str, bool]:
    """A name to write under; or that of this step's checkpoint, and False, when it is saved already."""
    checkpoints, step = order.checkpoints, order.step
    saved = [name for name in checkpoints.complete() if checkpoints.path(name) not in _damaged]
    if saved and step_of(saved[0]) > step:
        raise UsageError(
            f"{checkpoints.where} has a checkpoint of step {step_of(saved[0])}, and this is step {step}: "
            "another run's? Load the newest checkpoint before you train, or save to another directory"
        )
    if saved and step_of(saved[0]) == step:
        if checkpoints.path(saved[0]) not in _own:
            raise UsageError(
                f"{checkpoints.where} has a checkpoint of step {step}, which this run has neither saved nor "
                "loaded: another run's? Load it before you train, or save to another directory"
            )
        return saved[0], False
    order.parts()
    return checkpoints.begin(step), True


def _share(order: _Order, rank: int, written: checkpoint_tensors.Written) -> tuple[Any, Document]:
    """(files, parts) of this rank, but for the first one's parts, which may be large."""
    if missing := sorted(order.keys - written.index.keys()):
        raise CheckpointError(
            f"rank {rank} has {missing[0]}, and {len(missing) - 1} more, which the rank that was to save it "
            "does not have; parameters and the optimizer's state must be those of the same training on all "
            "ranks"
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
    except OSError as error:  # the new one is complete: failing to remove old ones is not an error
        glog(f"warning: old checkpoints in {checkpoints.where} could not be removed: {error}")


# ---- reading


def _mention_interrupted(checkpoints: CheckpointDirectory) -> None:
    for name in checkpoints.interrupted():
        glog(f"{checkpoints.path(name)} is of a save that was interrupted; it is not looked at")


def _newest(checkpoints: CheckpointDirectory, kept: int) -> tuple[str, Manifest] | None:
    """The newest checkpoint whose manifest is intact, of a later step than the one in memory (-1: there is
    none). Raises CheckpointError when there are only others, and none in memory.
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
            f"all {len(there)} checkpoints in {checkpoints.where} are damaged; the messages above say how. "
            "Remove them to start over"
        )
    return None


def _look_at_share(
    checkpoints: CheckpointDirectory, name: str, manifest: Manifest, ranks: Ranks
) -> str | None:
    """The ranks divide the files among them; what is wrong with mine."""
    mine = sorted(manifest.files)[ranks.rank :: ranks.world]
    return checkpoint_directory.damage(checkpoints, name, {file: manifest.files[file] for file in mine})


def _pass_over(path: str, why: str, rank: int) -> None:
    _damaged.add(path)
    if rank == 0:
        name = path.rpartition("/")[2]
        glog(f"warning: {why}; the checkpoint {name} is passed over for the one before it")
