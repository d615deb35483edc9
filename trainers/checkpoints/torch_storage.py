"""Storage writer and reader for torch.distributed.checkpoint, over the files of one checkpoint.

Each file's checksum is taken while it is written, so that nothing is read again for it. The reader finds
its tensors by our manifest's index, not by torch's pickled one. Imported when a checkpoint is written or
read: torch's part takes its time.
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
    """What FileSystemWriter and FileSystemReader need of a file system: one checkpoint, in which a path is
    the name of a file. `written` are (bytes, xxh3-128) by name.
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
                raise stream.failure from error  # torch's own complains of positions, not of the disk
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
        """`CheckpointDirectory.begin` has made it."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Where) -> bool:
        return True

    def exists(self, path: Where) -> bool:
        return os.fspath(path) in self.written

    def rm_file(self, path: Where) -> None:
        raise NotImplementedError(f"{path} is in the way in a checkpoint that has just begun")


class DirectoryWriter(FileSystemWriter):
    """Does not fsync: files of a checkpoint are durable when they are closed."""

    def __init__(self, checkpoints: CheckpointDirectory, name: str) -> None:
        super().__init__(checkpoints.path(name), sync_files=False)
        self.fs = self.files = DirectoryFiles(checkpoints, name)  # type: ignore[assignment]  # torch's is a FileSystem
        self.path = ""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        # In torch 2.11 only the copy that it writes says where the tensors are, not what `save` returns.
        metadata.storage_data = {each.index: each.storage_data for rank in results for each in rank}


class _Summed(io.RawIOBase):
    """A file that is only written, from its beginning to its end."""

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
    """Where one piece of a tensor is, by the names that FileSystemReader looks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class IndexReader(FileSystemReader):
    """`index` as `tensors.write` returns it."""

    def __init__(self, checkpoints: CheckpointDirectory, name: str, index: Fields) -> None:
        super().__init__(checkpoints.path(name))
        self.fs = DirectoryFiles(checkpoints, name)  # type: ignore[assignment]  # torch's is a FileSystem
        self.path = ""
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
