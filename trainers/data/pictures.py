"""Pictures that need no download: of each class its own colours, behind noise. Pure: a picture is a function
of (seed, index).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from trainers.errors import UsageError

_GRID = 4  # patches of colour along each side
_WORD = 1 << 32


@dataclass(frozen=True, slots=True)
class SyntheticPictures(Dataset[tuple[Tensor, Tensor]]):
    """`samples` pairs of (3, size, size) float32, mean about 0, variance about 2, and an int64 class; the
    classes take turns.
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
        """(3, size, size), the same for ever."""
        generator = np.random.RandomState([self.seed % _WORD, kind, index])
        return torch.from_numpy(generator.standard_normal((3, size, size)).astype(np.float32))
