"""Load image data sets as tensors, from scikit-learn's digits (without a download) or MNIST's idx files.

`shard` assigns examples to trainers.
"""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from fleetrun.frozen import frozen
from trainers.errors import DataError, UsageError

_IMAGES_MAGIC, _LABELS_MAGIC = 2051, 2049
_TEST_SHARE = 5  # every fifth digit is for testing


@frozen
class Images:
    """Train and test sets of (image float32 in [0, 1], label int64)."""

    train: TensorDataset
    test: TensorDataset
    pixels: int


def digits() -> Images:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8, always with the same 1,437 to train and 360 to
    test.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "the digits need scikit-learn: pip install scikit-learn, or use --data DIR"
        ) from None
    data = load_digits()
    images = torch.from_numpy(np.asarray(data.images, dtype=np.float32) / 16)
    labels = torch.from_numpy(np.asarray(data.target, dtype=np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[: -(-len(order) // _TEST_SHARE)], order[-(-len(order) // _TEST_SHARE) :]
    return Images(
        TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]), pixels=64
    )


def mnist(directory: str) -> Images:
    """Load the four idx files of MNIST from `directory`, gzipped or not.

    Raises DataError with the name of a missing or invalid file.
    """
    train = _pair(Path(directory), "train")
    test = _pair(Path(directory), "t10k")
    return Images(train, test, pixels=math.prod(train.tensors[0].shape[1:]))


def _pair(directory: Path, prefix: str) -> TensorDataset:
    image_path = _find(directory, f"{prefix}-images-idx3-ubyte")
    label_path = _find(directory, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(image_path, _IMAGES_MAGIC), read_idx(label_path, _LABELS_MAGIC)
    if len(images) != len(labels):
        raise DataError(f"{image_path} has {len(images)} images and {label_path} {len(labels)} labels")
    scaled = torch.from_numpy(images.astype(np.float32) / 255)
    return TensorDataset(scaled, torch.from_numpy(labels.astype(np.int64)))


def _find(directory: Path, name: str) -> Path:
    candidates = [directory / name, directory / f"{name}.gz", directory / name.replace("-idx", ".idx")]
    for path in candidates:
        if path.is_file():
            return path
    raise DataError(f"{directory} has no {name} or {name}.gz; MNIST's four idx files belong there")


def read_idx(path: Path, magic: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the unsigned bytes of an idx file in its shape.

    The format (http://yann.lecun.com/exdb/mnist) is magic number, sizes, data. Raises DataError if the file
    does not follow it.
    """
    content = _content(path)
    dimensions = magic & 0xFF
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} ends after {len(content)} bytes, inside its header of {start}")
    found, *sizes = struct.unpack_from(f">{dimensions + 1}I", content)
    if found != magic:
        raise DataError(f"{path} starts with magic number {found}; an idx file of this name has {magic}")
    wanted = math.prod(sizes)
    if len(content) - start != wanted:
        shape = " x ".join(map(str, sizes))
        raise DataError(
            f"{path} has {len(content) - start} bytes of data; its header says {shape} = {wanted}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes)


def _content(path: Path) -> bytes:
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error
