"""Read and write exported models. An exported model is a few files and a manifest that names them.
`publication` has the order of writes that keeps it consistent, and this module has the content of the
manifest.

    DIR/inference.json                              the description, and its files with sizes and checksums
    DIR/inference-program-5c3e9a01.pt2
    DIR/inference-weights-5c3e9a01.safetensors

A former exported model in the same directory counts until the new manifest is written. Its files are removed
after that.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import xxhash
from torch import Tensor

from fleetrun.aliases import Document, Fields
from fleetrun.frozen import frozen
from trainers.storage.errors import LoadError, SaveError
from trainers.storage.folder import Buffer, Folder, Where, open_folder
from trainers.storage.manifest import FileRecord, ManifestError, opened, sealed
from trainers.storage.publication import current, listed, publish, sweep, withdraw

VERSION = 1
_ID = re.compile(r"-([0-9a-f]{8})\.")


@frozen(eq=False)
class Bundle:
    """An exported model that was read."""

    where: str
    id: str
    """Differs for each save."""
    about: Fields
    """The description that its writer gave."""
    contents: Mapping[str, Tensor]
    """(size,) uint8 by part."""


@frozen
class _Manifest:
    about: Fields
    files: Mapping[str, FileRecord]

    @property
    def id(self) -> str:
        """The id in the names of its files."""
        return next((found[1] for file in self.files.values() if (found := _ID.search(file.name))), "")


def write_bundle(
    where: Where,
    kind: str,
    about: Fields,
    files: Mapping[str, tuple[str, Sequence[Buffer]]],
) -> None:
    """Write an exported model. `files` holds (suffix, content) by part. Raises SaveError. The former exported
    model of this kind then still counts.
    """
    folder = open_folder(where)
    id = secrets.token_hex(4)
    written: list[str] = []
    records = {}
    try:
        folder.make("")
        for part, (suffix, content) in files.items():
            name = f"{kind}-{part}-{id}{suffix}"
            written.append(name)
            folder.write(name, content)
            records[part] = asdict(FileRecord.of(name, [memoryview(piece).cast("B") for piece in content]))
        body = {"files": records, "about": about}
        durable = publish(folder, f"{kind}.json", sealed(_format(kind), VERSION, body, whole=True))
    except OSError as error:
        withdraw(folder, f"{kind}.json", written)
        raise SaveError(
            f"{folder.where} could not be written: {error}. Its former content is still valid."
        ) from error
    if durable:  # only now, because the former files were the only complete ones until here
        sweep(folder, re.compile(rf"\.?{kind}-[a-z]+-[0-9a-f]{{8}}(\.[a-z0-9]+)*").fullmatch, written)


def read_bundle(
    where: Where,
    kind: str,
    parts: Sequence[str],
    memory: Callable[[str, int], Tensor] | None = None,
) -> Bundle:
    """Read and check these parts of the current exported model. `memory` returns (size,) uint8 to read a part
    into. Raises LoadError. Without an exported model, its message lists the content of the directory.
    """
    folder = open_folder(where)
    manifest = _manifest(folder, kind)
    while True:
        try:
            contents = {part: _content(folder, manifest, part, memory) for part in parts}
            return Bundle(folder.where, manifest.id, manifest.about, contents)
        except LoadError:
            newer = _manifest(folder, kind)
            if newer == manifest:
                raise
            manifest = newer  # a new save came during the read


def _content(
    folder: Folder, manifest: _Manifest, part: str, memory: Callable[[str, int], Tensor] | None
) -> Tensor:
    record = manifest.files.get(part)
    if record is None:
        raise LoadError(
            f"{folder.where} was saved without {part}. Save it with {part}, or do not load {part}."
        )
    path = folder.path(record.name)
    try:
        content = folder.read(record.name, None if memory is None else memory(part, record.size))
    except OSError as error:
        raise LoadError(f"{path} cannot be read, although the manifest lists it: {error}") from error
    if len(content) != record.size or xxhash.xxh3_64_hexdigest(content.numpy().data) != record.xxh3_64:
        raise LoadError(
            f"{path} is damaged: its size or checksum differs from the manifest. Copy it again from its "
            "origin, or save it again."
        )
    return content


def _manifest(folder: Folder, kind: str) -> _Manifest:
    name = f"{kind}.json"
    try:
        text = current(folder, name)
        if text is None:
            raise LoadError(
                f"{folder.where} has no {name}, so it has no complete {_format(kind)}. It has: "
                f"{listed(folder.names())}"
            )
    except OSError as error:
        raise LoadError(f"{folder.path(name)} cannot be read: {error}") from error
    try:
        return opened(text, _format(kind), VERSION, _manifest_of, whole=True)
    except ManifestError as error:
        raise LoadError(f"{folder.path(name)} cannot be used: {error}") from error


def _manifest_of(body: Document) -> _Manifest:
    files = {part: FileRecord(**record) for part, record in body["files"].items()}
    return _Manifest(body["about"], files)


def _format(kind: str) -> str:
    return f"fleetrun {kind}"
