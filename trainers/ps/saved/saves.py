"""Saves: which save a folder holds. Knows the order that keeps one loadable: parts, then the manifest, then
the removal of what no manifest names. Leaves the parts to `writing` and rows to `loading`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from trainers.ps.saved.errors import LoadError, SaveError, load_error, save_error
from trainers.ps.saved.folder import Folder, open_folder
from trainers.ps.saved.manifest import MANIFEST, FileRecord, Manifest, ManifestError, Save, SavedPart
from trainers.ps.saved.modes import SaveMode

_PREFIX = "save-"


def new_id(step: int) -> str:
    """A name for a save that no other has."""
    return f"{_PREFIX}{step:012d}-{secrets.token_hex(4)}"


def current(where: str | os.PathLike[str]) -> Manifest:
    """The manifest of the folder. Raises LoadError, which says what is there instead when there is none."""
    folder = open_folder(where)
    try:
        names = folder.names()
        if MANIFEST not in names:
            raise LoadError(_no_manifest(folder, names))
        return Manifest.decode(folder.read(MANIFEST).numpy().tobytes())
    except OSError as error:
        raise load_error(error, folder.path(MANIFEST)) from error
    except ManifestError as error:
        raise LoadError(f"{folder.path(MANIFEST)} cannot be used: {error}") from error


def check_target(where: str | os.PathLike[str], mode: SaveMode, after: str | None) -> None:
    """Whether a save of this mode may go there; ask before anything is written. `after`: the id of the save
    since which the servers have noted changes, for mode 1. Raises SaveError.
    """
    _followed(open_folder(where), mode, after)


def commit(
    where: str | os.PathLike[str],
    id: str,
    mode: SaveMode,
    step: int,
    parts: Sequence[FileRecord],
    *,
    after: str | None = None,
) -> Manifest:
    """Make a save the current one, when every server has written its part; `parts` in the order of servers.

    Raises SaveError and leaves the former save current when parts are missing, or a delta does not follow
    the folder's last save.
    """
    folder = open_folder(where)
    former = _followed(folder, mode, after)
    save = Save(id, mode, step, tuple(parts))
    try:
        for number, record in enumerate(parts):
            _check_part(folder, id, record, number, len(parts))
        manifest = Manifest((*former, save))
        folder.write(MANIFEST, [manifest.encode()])
        # Only now: before the manifest was written, the former files were the only complete save.
        _remove_unnamed(folder, manifest)
    except OSError as error:
        raise save_error(error, folder.path(id), folder.free()) from error
    return manifest


def abandon(where: str | os.PathLike[str], id: str) -> None:
    """Remove a save that was not committed, because a server could not write its part. Raises SaveError."""
    folder = open_folder(where)
    named = {save.id for save in _saves(folder)}
    if id in named:
        raise SaveError(f"{folder.path(id)} is the current save and is not removed")
    try:
        folder.remove(id)
    except OSError as error:
        raise SaveError(f"{folder.path(id)} cannot be removed: {error}") from error


def _followed(folder: Folder, mode: SaveMode, after: str | None) -> tuple[Save, ...]:
    """The saves that stay current beside a new one of this mode."""
    former = _saves(folder)
    if mode is SaveMode.DELTA:
        if not former or former[-1].id != after or former[0].mode is SaveMode.VALUES:
            there = f"its last save is {former[-1].id}" if former else "there is no save"
            raise SaveError(
                f"mode 1 saves the rows changed since {after or 'a save that this job did not make'}, and in "
                f"{folder.where} {there}. Save with mode 0 there first."
            )
        return former
    training = bool(former) and former[0].mode is not SaveMode.VALUES
    if mode is SaveMode.VALUES and training:
        raise SaveError(
            f"{folder.where} holds a save to go on training from (mode {int(former[0].mode)}); a save of "
            "values only (mode 2) would replace it. Choose another folder."
        )
    return ()


def _check_part(folder: Folder, id: str, record: FileRecord, server: int, servers: int) -> None:
    content = folder.read(f"{id}/{record.name}").numpy().tobytes()
    if record != FileRecord.of(f"server-{server}.json", [content]):
        raise SaveError(f"{folder.path(id)}/{record.name} is not what server {server} wrote")
    part = SavedPart.decode(content)
    if (part.server, part.servers) != (server, servers):
        raise SaveError(
            f"{folder.path(id)}/{record.name} is the part of server {part.server} of {part.servers}, where "
            f"server {server} of {servers} should be: not every server has saved"
        )


def _saves(folder: Folder) -> tuple[Save, ...]:
    try:
        if MANIFEST not in folder.names():
            return ()
        return Manifest.decode(folder.read(MANIFEST).numpy().tobytes()).saves
    except OSError as error:
        raise save_error(error, folder.where, folder.free()) from error
    except ManifestError as error:
        raise SaveError(
            f"{folder.path(MANIFEST)} cannot be used: {error}. Choose another folder or remove it."
        ) from error


def _remove_unnamed(folder: Folder, manifest: Manifest) -> None:
    named = {save.id for save in manifest.saves}
    for name in folder.names():
        if name.startswith(_PREFIX) and name not in named:
            folder.remove(name)


def _no_manifest(folder: Folder, names: Sequence[str]) -> str:
    if not names:
        return f"{folder.where} is empty or does not exist: there is no save"
    unfinished = [name for name in names if name.startswith(_PREFIX)]
    why = f" The save {unfinished[-1]} was interrupted." if unfinished else ""
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{folder.where} has no {MANIFEST}, so there is no complete save in it.{why} It holds: {shown}"
