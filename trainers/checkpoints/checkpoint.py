"""Checkpoints of collective jobs that survive: written aside by all ranks, named by one rename, read by any
number of ranks. Knows who does what in which order; leaves files, tensors and states to its siblings.

Everything here is called by all ranks of the process group, with equal arguments; a process without a group
is a rank of one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainers.checkpoints import files
from trainers.checkpoints import tensors as checkpoint_tensors
from trainers.checkpoints.files import CheckpointError, Manifest
from trainers.checkpoints.ranks import Ranks
from trainers.checkpoints.state import Contents
from trainers.errors import UsageError
from trainers.glog import glog

KEEP = 2

_damaged: set[Path] = set()
"""Those that this process has found so: they are no checkpoints to it, and may be replaced."""


def save(
    directory: str | os.PathLike[str],
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep: int = KEEP,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Save all of it as `directory/step-XXXXXXXX`, and remove what is older than the newest `keep`. When it
    returns, on any rank, the checkpoint is complete and durable.

    A step that is saved already is not saved again. `state`: by name, dicts and objects with `state_dict` and
    `load_state_dict`; rank 0's count. Raises CheckpointError, then nothing has changed; UsageError.
    """
    folder = files.folder_of(directory)
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"the step of a checkpoint is {step!r}; it must be a whole number from 0 on")
    if keep < 1:
        raise UsageError(f"keep is {keep!r}; at least 1 checkpoint must be kept")
    contents, ranks = Contents(model, optimizer, state or {}), Ranks()
    tensors = contents.tensors(ranks.rank)
    begun = ranks.first_tells(lambda: _begin(folder, step, contents))
    final = files.path_of(folder, step)
    if begun is None:
        return final
    aside, parts = begun
    try:
        index = checkpoint_tensors.write(tensors, aside)
        sums = ranks.all_tell(partial(_seal, aside, ranks.rank))
        content = {name: about for share in sums for name, about in share.items()}
        manifest = Manifest(step=step, world=ranks.world, files=content, index=index, parts=parts)
        ranks.first_tells(lambda: _commit(aside, final, manifest))
    except CheckpointError:
        if ranks.rank == 0:
            files.discard(aside)
        raise
    if ranks.rank == 0:
        _prune(folder, keep)
    return final


def load(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state: Mapping[str, Any] | None = None,
) -> int | None:
    """Bring all of it to the newest checkpoint in `directory`; its step, or None when there is none: then
    nothing has changed. Any number of ranks may load what any number has saved.

    A damaged checkpoint is passed over with a warning, for the one before. Raises CheckpointError when all
    are damaged, or when it is of another model; UsageError.
    """
    folder = files.folder_of(directory)
    contents, ranks = Contents(model, optimizer, state or {}), Ranks()
    ranks.first_tells(lambda: _mention_interrupted(folder))
    while True:
        chosen = ranks.first_tells(lambda: _newest(folder))
        if chosen is None:
            return None
        path, manifest = chosen
        shares = ranks.all_tell(partial(_look_at_share, path, manifest, ranks))
        wrong = next(filter(None, shares), None)
        if wrong is None:
            break
        _pass_over(path, wrong, ranks.rank)
    contents.check(manifest)
    tensors = contents.wanted(manifest, ranks.rank, ranks.world)
    checkpoint_tensors.read(tensors, path, manifest.index)
    contents.take(manifest, tensors)
    return manifest.step


def _begin(folder: Path, step: int, contents: Contents) -> tuple[Path, dict[str, Any]] | None:
    """The folder to write in, and what is no tensor; None when this step is saved already."""
    saved = [there for there in files.complete(folder) if files.path_of(folder, there) not in _damaged]
    if saved and saved[0] > step:
        raise UsageError(
            f"{folder} has a checkpoint of step {saved[0]}, and this is step {step}: another run's? Load the "
            "newest checkpoint before you train, or save to another directory"
        )
    if step in saved:
        return None
    parts = contents.parts()
    return files.begin(folder, step), parts


def _seal(aside: Path, rank: int) -> dict[str, tuple[int, str]]:
    """What this rank has written: torch calls its files `__RANK_n.distcp`."""
    mine = [*aside.glob(f"__{rank}_*"), *(aside.glob(".metadata") if rank == 0 else ())]
    return {path.name: files.seal(path) for path in sorted(mine)}


def _commit(aside: Path, final: Path, manifest: Manifest) -> None:
    files.commit(aside, final, manifest)
    _damaged.discard(final)


def _prune(folder: Path, keep: int) -> None:
    try:
        files.prune(folder, keep, _damaged)
    except OSError as error:  # the new one is there: that old ones cannot be removed is no failure of it
        glog(f"warning: old checkpoints in {folder} could not be removed: {error}")


def _mention_interrupted(folder: Path) -> None:
    for path in files.interrupted(folder):
        glog(f"{path} is of a save that was interrupted; it is not looked at")


def _newest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose manifest is whole. Raises CheckpointError when there are only others."""
    there = [files.path_of(folder, step) for step in files.complete(folder)]
    for path in there:
        if path in _damaged:
            continue
        try:
            return path, files.read_manifest(path)
        except CheckpointError as error:
            _pass_over(path, str(error), 0)
    if there:
        raise CheckpointError(
            f"all {len(there)} checkpoints in {folder} are damaged; the messages above say how. Remove "
            "them to begin anew"
        )
    return None


def _look_at_share(path: Path, manifest: Manifest, ranks: Ranks) -> str | None:
    """The ranks divide the files among them; what is wrong with mine."""
    mine = sorted(manifest.files)[ranks.rank :: ranks.world]
    return files.damage(path, {name: manifest.files[name] for name in mine})


def _pass_over(path: Path, why: str, rank: int) -> None:
    _damaged.add(path)
    if rank == 0:
        glog(f"warning: {why}; the checkpoint {path.name} is passed over for the one before it")
