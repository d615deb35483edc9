"""Provide a storage writer and reader for torch.distributed.checkpoint, over the files of one checkpoint.

The checksum of each file is computed while writing, so that the file is not read again. The reader finds
tensors by our manifest's index and not by torch's pickled one. Import the module only to write or read a
checkpoint, because torch's part takes a while.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from fleetrun.aliases import Document, Fields
from fleetrun.frozen import frozen
from trainers.checkpoints.directory import CheckpointDirectory
from trainers.storage.folder import Where

# ---- Writing


class DirectoryFiles(FileSystemBase):
    """The file system that FileSystemWriter and FileSystemReader need, one checkpoint with paths as file
    names.

    `written` maps names to (bytes, xxh3-128).
    """

    def __init__(self, checkpoints: CheckpointDirectory, name: str) -> None:
        self._checkpoints, self._name = checkpoints, name
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: Where, mode: str) -> Generator[io.IOBase, None, None]:
        file = os.fspath(path)
        with self._checkpoints.open(self._name, file, mode) as raw:
            if mode == "rb":
                yield cast(io.IOBase, raw)
                return
            stream = _Summed(raw)
            try:
                yield stream
            except RuntimeError as error:
                if stream.failure is None:
                    raise
                raise stream.failure from error  # torch's own error describes positions and not the disk
        self.written[file] = (stream.tell(), stream.digest.hexdigest())

    def concat_path(self, path: Where, suffix: str) -> str:
        return suffix

    def rename(self, path: Where, new_path: Where) -> None:
        file, to = os.fspath(path), os.fspath(new_path)
        self._checkpoints.rename(self._name, file, to)
        self.written[to] = self.written.pop(file)

    def init_path(self, path: Where) -> str:
        return os.fspath(path)

    def mkdir(self, path: Where) -> None:
        """Do nothing, because `CheckpointDirectory.begin` has made the directory."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        return True

    def exists(self, path: Where) -> bool:
        return os.fspath(path) in self.written

    def rm_file(self, path: Where) -> None:
        raise NotImplementedError(f"{path} already exists in a new checkpoint")


class DirectoryWriter(FileSystemWriter):
    """Writes without fsync, because files of a checkpoint are durable when they are closed."""

    def __init__(self, checkpoints: CheckpointDirectory, name: str) -> None:
        super().__init__(checkpoints.path(name), sync_files=False)
        self.fs = self.files = DirectoryFiles(checkpoints, name)  # type: ignore[assignment]  # torch's is a FileSystem
        self.path = ""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # In torch 2.11 only the written copy locates the tensors, and the result of `save` does not.
        metadata.storage_data = {each.index: each.storage_data for rank in results for each in rank}


class _Summed(io.RawIOBase):
    """A file that is only written, from start to end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._length = 0
        self.failure: OSError | None = None
        self.digest = xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def write(self, content: Any, /) -> int:
        view = memoryview(content).cast("B")
        self.digest.update(view)
        try:
            self._raw.write(view)
        except OSError as error:
            self.failure = error
            raise
        self._length += len(view)
        return len(view)

    def tell(self) -> int:
        return self._length


# ---- Reading


@frozen
class _Piece:
    """The place of one piece of a tensor, with the names that FileSystemReader uses."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class IndexReader(FileSystemReader):
    """Reads tensors by `index`, the result of `tensors.write`."""

    def __init__(self, checkpoints: CheckpointDirectory, name: str, index: Fields) -> None:
        super().__init__(checkpoints.path(name))
        self.fs = DirectoryFiles(checkpoints, name)  # type: ignore[assignment]  # torch's is a FileSystem
        self.path = ""
        self._index = index

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        described: Document = {}
        places = {}
        for key, entry in self._index.items():
            chunks = []
            for offsets, sizes, *place in entry["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(key, offsets)] = _Piece(*place)
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            described[key] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(described, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))
