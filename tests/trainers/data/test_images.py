import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainers.data.images import digits, mnist
from trainers.errors import DataError

IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
LABELS = np.array([7, 0, 9], dtype=np.uint8)
FILES = {
    "train-images-idx3-ubyte": struct.pack(">4I", 2051, 3, 4, 5) + IMAGES.tobytes(),
    "train-labels-idx1-ubyte": struct.pack(">2I", 2049, 3) + LABELS.tobytes(),
    "t10k-images-idx3-ubyte": struct.pack(">4I", 2051, 2, 4, 5) + IMAGES[:2].tobytes(),
    "t10k-labels-idx1-ubyte": struct.pack(">2I", 2049, 2) + LABELS[:2].tobytes(),
}


def write(folder: Path, *, gz: bool = False) -> Path:
    for name, content in FILES.items():
        if gz:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("gz", [False, True])
def test_mnist_files_are_read_plain_and_zipped(tmp_path: Path, gz: bool) -> None:
    data = mnist(str(write(tmp_path, gz=gz)))
    images, labels = data.train.tensors
    assert labels.tolist() == [7, 0, 9]
    assert np.allclose(images.numpy() * 255, IMAGES)
    assert data.pixels == 20
    assert len(data.test) == 2


TRAIN = "train-images-idx3-ubyte"
Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), f"no {TRAIN} or {TRAIN}.gz"),
        (lambda path: path.write_bytes(b"\0\0"), f"{TRAIN} ends after 2 bytes"),
        (
            lambda path: path.write_bytes(FILES[TRAIN][:-1]),
            "has 59 bytes of data; its header says 3 x 4 x 5 = 60",
        ),
        (lambda path: path.write_bytes(FILES[TRAIN] + b"x"), "has 61 bytes"),
        (lambda path: path.write_bytes(b"PK\3\4" + FILES[TRAIN][4:]), "magic number 1347093252"),
        (lambda path: path.write_bytes(FILES["t10k-images-idx3-ubyte"]), "has 2 images and .* 3 labels"),
        (
            lambda path: path.replace(path.with_name(f"{TRAIN}.gz")),
            r"idx3-ubyte\.gz is not a whole gzip file",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, change: Change, words: str) -> None:
    change(write(tmp_path) / TRAIN)
    with pytest.raises(DataError, match=words):
        mnist(str(tmp_path))


def test_a_truncated_gzip_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, gz=True) / f"{TRAIN}.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"ubyte\.gz is not a whole gzip file"):
        mnist(str(tmp_path))


@pytest.mark.slow
def test_digits_are_split_the_same_way_every_time() -> None:
    first, second = digits(), digits()
    assert (len(first.train), len(first.test), first.pixels) == (1437, 360, 64)
    for mine, other in zip(first.train.tensors, second.train.tensors, strict=True):
        assert mine.equal(other)
    images = first.train.tensors[0]
    assert float(images.min()) == 0
    assert float(images.max()) == 1
