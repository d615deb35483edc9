"""Checkpoints as folders: which are complete, which are damaged, how one comes to its name. Knows POSIX;
leaves tensors to `checkpoint_tensors` and who does what to `checkpoint`.

    DIR/step-00000120/               complete: it got its name by one rename, after all in it was fsynced
    DIR/step-00000140.5c3e9a01.tmp/  being written, or left by a save that was interrupted
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainers.errors import FleetError, NotSupportedError, UsageError
from trainers.ps.saved.descriptors import sync_folder, write_file

MANIFEST = "checkpoint.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_ASIDE = re.compile(r"step-\d{8,}\.[0-9a-f]{8}\.tmp")
_PIECE = 1 << 22


class CheckpointError(FleetError):
    """A checkpoint could not be written, or there are some and none of them can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself: `files` are (bytes, xxh3-128) by name, `index` where each tensor
    is, `parts` what is no tensor.
    """

    step: int
    world: int
    files: Mapping[str, tuple[int, str]]
    index: Mapping[str, Any]
    parts: Mapping[str, Any]


def folder_of(directory: str | os.PathLike[str]) -> Path:
    """Raises NotSupportedError for a URL."""
    text = os.fspath(directory)
    if "://" in text:
        raise NotSupportedError(
            f"checkpoints go to folders of a file system, not to {text!r}; give a path that every machine "
            "of the job sees under the same name"
        )
    if not text:
        raise UsageError("the directory of the checkpoints is empty; give a path")
    return Path(text)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def complete(folder: Path) -> list[int]:
    """The steps whose checkpoints are complete, newest first; what is in them nobody has looked at yet."""
    found = [match for name in _names(folder) if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]) for match in found), reverse=True)


def interrupted(folder: Path) -> list[Path]:
    """What saves have left that did not come to their end; also one that is under way."""
    return [folder / name for name in _names(folder) if _ASIDE.fullmatch(name)]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []


# ---- writing


def begin(folder: Path, step: int) -> Path:
    """A new folder to write in. Its name is nobody else's: a process of a former life of this job that still
    writes, on a machine that was thought dead, does so elsewhere.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in interrupted(folder):
        shutil.rmtree(path, ignore_errors=True)
    aside = folder / f"{path_of(folder, step).name}.{uuid.uuid4().hex[:8]}.tmp"
    aside.mkdir()
    return aside


def seal(path: Path) -> tuple[int, str]:
    """Make a file's content durable; its size and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size, _checksum(path)


def commit(aside: Path, final: Path, manifest: Manifest) -> None:
    """Give a written checkpoint its name. Raises CheckpointError when a file is not here that another rank
    has written, OSError.
    """
    for name, (size, _) in manifest.files.items():
        found = _size(aside / name)
        if found != size:
            raise CheckpointError(
                f"{aside / name} has {size} bytes where it was written and {found} here; the directory of "
                "checkpoints must be one that all machines of the job share"
            )
    write_file(aside / MANIFEST, [_text(manifest).encode()])  # durable, and so are all names beside it
    if final.exists():
        discard(final)  # it was found damaged, or nobody would save this step again
    aside.rename(final)
    sync_folder(final.parent)  # else the name might not outlive a power failure


def discard(path: Path) -> None:
    """Take a checkpoint's name from it, then its files: half of it is never a checkpoint."""
    if _ASIDE.fullmatch(path.name) is None:
        doomed = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
        path.rename(doomed)
        path = doomed
    shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int, damaged: Collection[Path] = ()) -> None:
    """Remove what is older than the newest `keep` checkpoints. Damaged ones do not count."""
    whole = [path for step in complete(folder) if (path := path_of(folder, step)) not in damaged]
    for path in whole[keep:]:
        discard(path)


def _text(manifest: Manifest) -> str:
    body = json.dumps({"format": FORMAT, **asdict(manifest)})
    return json.dumps({"xxh3": xxhash.xxh3_128_hexdigest(body.encode()), "manifest": body})


# ---- reading


def read_manifest(path: Path) -> Manifest:
    """Raises CheckpointError for anything but a whole manifest and files of its sizes."""
    try:
        outer = json.loads((path / MANIFEST).read_bytes())
        body = outer["manifest"]
        if xxhash.xxh3_128_hexdigest(body.encode()) != outer["xxh3"]:
            raise CheckpointError(f"{path / MANIFEST} is damaged: its checksum does not fit")
        told = json.loads(body)
        version = told.pop("format")
        if version != FORMAT:
            raise NotSupportedError(f"{path} has format {version}; this version reads {FORMAT}")
        told["files"] = {name: (int(size), str(digest)) for name, (size, digest) in told["files"].items()}
        manifest = Manifest(**told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is missing or damaged: {error!r}") from error
    for name, (size, _) in manifest.files.items():
        found = _size(path / name)
        if found != size:
            raise CheckpointError(f"{path / name} has {found} bytes; the manifest says {size}")
    return manifest


def damage(path: Path, files: Mapping[str, tuple[int, str]]) -> str | None:
    """What is wrong with the content of these files of a checkpoint, if anything."""
    for name, (_, digest) in files.items():
        try:
            if _checksum(path / name) != digest:
                return f"{path / name} is damaged: its checksum does not fit"
        except OSError as error:
            return f"{path / name} cannot be read: {error}"
    return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
