"""A folder as Flowers-102 is published, of a few pictures: the colour of a class, and some noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

PICTURES, CLASSES = 60, 5
TRAIN, VALID = 40, 10  # and 10 to test on


def colour(label: int) -> tuple[int, int, int]:
    """Of class 0 to CLASSES - 1, in [0, 255]."""
    return 40 * label + 20, 220 - 40 * label, 90 * label % 256


def plant(folder: Path) -> Path:
    """`PICTURES` pictures of 90 x 70 and up, their labels, and who trains on which."""
    (folder / "jpg").mkdir(parents=True)
    chance = np.random.RandomState(0)
    labels = np.arange(PICTURES) % CLASSES + 1
    for number, label in enumerate(labels.tolist(), start=1):
        pixels = np.array(colour(label - 1)) + chance.randint(-15, 16, (70 + number % 3 * 10, 90, 3))
        picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        picture.save(folder / "jpg" / f"image_{number:05d}.jpg", quality=95)
    order = (chance.permutation(PICTURES) + 1).astype(np.uint16)[None]
    parts = {
        "tstid": order[:, :TRAIN],
        "valid": order[:, TRAIN : TRAIN + VALID],
        "trnid": order[:, TRAIN + VALID :],
    }
    savemat(folder / "imagelabels.mat", {"labels": labels.astype(np.uint8)[None]}, do_compression=True)
    savemat(folder / "setid.mat", parts, do_compression=True)
    return folder
