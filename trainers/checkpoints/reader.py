"""A reader for torch.distributed.checkpoint that finds its tensors by our manifest's index, not by torch's
pickled one. Imported when a checkpoint is loaded: torch's part takes its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainers.checkpoints.shelf import Shelf
from trainers.checkpoints.streams import ShelfFiles


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one piece of a tensor is, by the names that FileSystemReader looks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class IndexReader(FileSystemReader):
    """`index` as `tensors.write` returns it."""

    def __init__(self, shelf: Shelf, name: str, index: Mapping[str, Any]) -> None:
        super().__init__(shelf.path(name))
        self.fs = ShelfFiles(shelf, name)  # type: ignore[assignment]  # torch's is a FileSystem
        self.path = ""
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {}
        places = {}
        for key, entry in self._index.items():
            chunks = []
            for offsets, sizes, *place in entry["pieces"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                places[MetadataIndex(key, offsets)] = _Place(*place)
            properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
            described[key] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        return Metadata(described, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))
