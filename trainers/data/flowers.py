"""Provide pictures to train a ResNet on, from Flowers-102 or synthetic ones without a download.

Flowers-102 as published (Nilsback and Zisserman, "Automated Flower Classification over a Large Number of
Classes", 2008) consists of `jpg/image_00001.jpg` and so on, `imagelabels.mat` and `setid.mat`. A synthetic
picture is a function of (seed, index), with colours per class behind noise. `shard` assigns pictures to
trainers.
"""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from fleetrun.aliases import Document
from fleetrun.frozen import frozen
from trainers.errors import DataError, UsageError

# ---- Flowers-102

# The published test set has 6,149 pictures, and the training set 1,020. Paddle's loader swaps them, and so
# does this module.
SPLITS = {"train": "tstid", "valid": "valid", "test": "trnid"}

# a picture is resized to a shorter side of 256 pixels, and 224 x 224 are cropped
_RESIZED, _CROPPED = 256, 224
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)  # red, green and blue of ImageNet's pictures in [0, 1]
_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
_NARROWEST = 100  # ratio of the sides, because a stripe of 2 x 40,000 would need 5 GB
_WORD = 1 << 32


@frozen(eq=False)
class Flowers(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of (3, size, size) float32, normalised by ImageNet's mean and deviation, and an int64 class.

    For training, a picture is cropped at random and mirrored half of the time, as a function of (seed, epoch,
    index). Otherwise the middle is cropped. Reading a damaged picture raises DataError with the file's name.
    """

    files: tuple[Path, ...]
    labels: NDArray[np.int64]
    size: int
    training: bool
    seed: int = 0
    epoch: int = 0

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def at(self, epoch: int) -> Self:
        """Return the same pictures, cropped as in that epoch."""
        return replace(self, epoch=epoch)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        chance: Chance | None = None
        if self.training:
            chance = np.random.RandomState([self.seed % _WORD, self.epoch % _WORD, index])
        pixels = read_picture(self.files[index], self.size, chance)
        return torch.from_numpy(pixels), torch.tensor(self.labels[index])


Chance = np.random.RandomState


def flowers(directory: str, *, split: str = "train", size: int = 224, seed: int = 0) -> Flowers:
    """Load the pictures of "train" (6,149), "valid" (1,020) or "test" (1,020), `size` pixels along each side.

    The call checks that all pictures exist, and reads them later. Raises DataError with the name of a missing
    or invalid file, and UsageError for a wrong split or size.
    """
    if split not in SPLITS:
        raise UsageError(f"split is {split!r}; Flowers-102 has {', '.join(SPLITS)}")
    if size < 1:
        raise UsageError(f"size is {size} pixels; it must be at least 1")
    folder = Path(directory)
    labels = _vector(folder / "imagelabels.mat", "labels")
    numbers = _vector(folder / "setid.mat", SPLITS[split])
    if numbers.max() > len(labels):
        raise DataError(
            f"{folder / 'setid.mat'} names picture {numbers.max()}, but {folder / 'imagelabels.mat'} has "
            f"labels for only {len(labels)}. Use both files of the same data set."
        )
    return Flowers(_files(folder / "jpg", numbers), labels[numbers - 1] - 1, size, split == "train", seed)


def _files(folder: Path, numbers: NDArray[np.int64]) -> tuple[Path, ...]:
    names = [f"image_{number:05d}.jpg" for number in numbers]
    try:
        there = set(os.listdir(folder))  # noqa: PTH208  # once for 8,189 names, and no Path for each
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read: {error.strerror}. It must contain the pictures of Flowers-102."
        ) from None
    missing = [name for name in names if name not in there]
    if missing:
        raise DataError(f"{folder} has no {missing[0]}. {len(missing)} of {len(names)} pictures are missing.")
    return tuple(folder / name for name in names)


def _vector(path: Path, name: str) -> NDArray[np.int64]:
    """Return a row of numbers from a MATLAB file, each at least 1."""
    content = _matlab(path)
    if name not in content:
        found = ", ".join(key for key in content if not key.startswith("__")) or "nothing"
        raise DataError(f"{path} has no {name!r}; it has {found}")
    numbers = np.asarray(content[name]).reshape(-1)
    if not len(numbers) or numbers.dtype.kind not in "iu" or numbers.min() < 1:
        raise DataError(f"{name!r} in {path} must contain only whole numbers of at least 1")
    return numbers.astype(np.int64)


def _matlab(path: Path) -> Document:
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise UsageError("Flowers-102 needs SciPy and Pillow. Run: pip install scipy pillow") from None
    try:
        raw = path.read_bytes()
    except OSError as error:
        parts = "imagelabels.mat, setid.mat and the directory jpg"
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Flowers-102 consists of {parts}."
        ) from None
    try:
        content: Document = loadmat(io.BytesIO(raw))
    except Exception as error:  # SciPy raises almost any error for invalid bytes
        raise DataError(f"{path} is not a whole MATLAB file: {error}") from error
    return content


def read_picture(path: Path, size: int, chance: Chance | None = None) -> NDArray[np.float32]:
    """Return a picture as (3, size, size) float32.

    The shorter side is resized to 256/224 of `size`, then a part is cropped. With `chance` the part is random
    and mirrored half of the time. Without, it is the middle. Raises DataError if the file is not a whole
    picture.
    """
    from PIL import Image

    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is not a complete picture: {error}") from error
    resized = max(size, round(size * _RESIZED / _CROPPED))
    shorter = min(picture.size)
    width, height = (max(resized, round(side * resized / shorter)) for side in picture.size)
    if max(width, height) > _NARROWEST * resized:
        raise DataError(f"{path} has {' x '.join(map(str, picture.size))} pixels, too narrow for a picture")
    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    if chance is not None:
        left, top = chance.randint(width - size + 1), chance.randint(height - size + 1)
    pixels = np.asarray(picture.crop((left, top, left + size, top + size)), np.float32) / 255
    if chance is not None and chance.randint(2):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(((pixels - _MEAN) / _DEVIATION).transpose(2, 0, 1))


# ---- Synthetic pictures, each a pure function of (seed, index)

_GRID = 4  # patches of colour along each side
_SEED_WORD = 1 << 32


@frozen
class SyntheticPictures(Dataset[tuple[Tensor, Tensor]]):
    """`samples` pairs of (3, size, size) float32, mean about 0, variance about 2, and an int64 class.

    The classes take turns.
    """

    samples: int
    classes: int
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [f"{name} is {value}" for name, value in self._sizes().items() if value < 1]
        if wrong:
            raise UsageError(f"{wrong[0]}; it must be at least 1")

    def _sizes(self) -> dict[str, int]:
        return {"samples": self.samples, "classes": self.classes, "size": self.size}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(f"picture {index} of {self.samples}")
        label = index % self.classes
        patches = self._normal(0, label, _GRID)
        picture = interpolate(patches[None], size=(self.size, self.size), mode="nearest")[0]
        return picture + self._normal(1, index, self.size), torch.tensor(label)

    def _normal(self, kind: int, index: int, size: int) -> Tensor:
        """Return (3, size, size) normal numbers, always the same."""
        generator = np.random.RandomState([self.seed % _SEED_WORD, kind, index])
        return torch.from_numpy(generator.standard_normal((3, size, size)).astype(np.float32))
