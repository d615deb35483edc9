"""Flowers-102 from its files: what is read, and what is said about files that are not whole."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from tests.support.flowers import CLASSES, PICTURES, TRAIN, VALID, colour, plant
from trainers.data.flowers import SPLITS, Flowers, SyntheticPictures, flowers, read_picture
from trainers.data.shard import shard_loader
from trainers.errors import DataError, UsageError

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("data") / "flowers")


def test_each_picture_is_in_one_part_with_its_label_from_0(folder: Path) -> None:
    parts = [flowers(str(folder), split=split, size=32) for split in SPLITS]
    assert [len(part) for part in parts] == [TRAIN, VALID, PICTURES - TRAIN - VALID]
    assert len({file for part in parts for file in part.files}) == PICTURES
    assert {part.classes for part in parts} == {CLASSES}
    for part in parts:
        for file, label in zip(part.files, part.labels, strict=True):
            assert label == (int(file.stem.removeprefix("image_")) - 1) % CLASSES


@pytest.mark.parametrize("split", SPLITS)
def test_a_picture_has_the_colours_of_its_file_normalised(folder: Path, split: str) -> None:
    data = flowers(str(folder), split=split, size=32)
    for index in range(5):
        picture, label = data[index]
        assert (picture.shape, picture.dtype) == ((3, 32, 32), torch.float32)
        assert (label.shape, label.dtype) == ((), torch.int64)
        seen = picture.mean((1, 2)) * torch.tensor(DEVIATION) + torch.tensor(MEAN)
        assert torch.allclose(seen, torch.tensor(colour(int(label))) / 255, atol=0.03)


@pytest.fixture
def ramp(tmp_path: Path) -> Path:
    """448 x 256: red grows to the right, green downwards."""
    across, down = np.meshgrid(np.arange(448), np.arange(256))
    pixels = np.stack([across * 255 / 447, down, np.zeros_like(down)], axis=2).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "ramp.png")
    return tmp_path / "ramp.png"


def shown(picture: np.ndarray) -> np.ndarray:
    """Red and green of the corners, top left and bottom right, in [0, 255]."""
    pixels = (picture * np.reshape(DEVIATION, (3, 1, 1)) + np.reshape(MEAN, (3, 1, 1))) * 255
    return np.array([pixels[:2, 0, 0], pixels[:2, -1, -1]])


def test_without_chance_the_middle_is_taken(ramp: Path) -> None:
    # 448 x 256 stays as it is for 224 pixels: columns 112 to 335, rows 16 to 239.
    expected = [[112 * 255 / 447, 16], [335 * 255 / 447, 239]]
    assert np.allclose(shown(read_picture(ramp, 224)), expected, atol=1)
    # Half the size: the same part of the picture.
    assert np.allclose(shown(read_picture(ramp, 112)), expected, atol=2)


@pytest.mark.slow
def test_chance_crops_everywhere_and_mirrors(ramp: Path) -> None:
    seen = np.stack([shown(read_picture(ramp, 112, np.random.RandomState(n))) for n in range(60)])
    mirrored = seen[:, 0, 0] > seen[:, 1, 0]
    assert 15 < mirrored.sum() < 45
    left, right = seen[:, :, 0].min(1), seen[:, :, 0].max(1)
    assert np.allclose(right - left, 223 * 255 / 447, atol=2)
    assert left.min() < 15  # of 0 to 127
    assert left.max() > 112
    assert seen[:, 0, 1].min() < 4  # of 0 to 32
    assert seen[:, 0, 1].max() > 28
    assert (seen[:, 0, 1] < seen[:, 1, 1]).all()  # never upside down


def pixels(data: Flowers, index: int = 0) -> torch.Tensor:
    return data[index][0]


def test_crops_are_a_function_of_seed_and_epoch(folder: Path) -> None:
    data, other = flowers(str(folder), size=32, seed=1), flowers(str(folder), size=32, seed=2)
    assert torch.equal(pixels(data.at(3)), pixels(flowers(str(folder), size=32, seed=1).at(3)))
    assert not torch.equal(pixels(data.at(3)), pixels(data.at(4)))
    assert not torch.equal(pixels(data), pixels(other))
    test = flowers(str(folder), split="test", size=32)
    assert torch.equal(pixels(test.at(3)), pixels(test.at(4)))


def test_grey_pictures_have_three_channels(tmp_path: Path) -> None:
    Image.new("L", (50, 40), 128).save(tmp_path / "grey.jpg")
    assert np.ptp(read_picture(tmp_path / "grey.jpg", 32), axis=(1, 2)).max() == 0


@pytest.mark.slow
def test_a_loaders_process_tells_which_picture_is_damaged(tmp_path: Path) -> None:
    folder = plant(tmp_path / "flowers")
    data = flowers(str(folder), size=32)
    for file in data.files:
        file.write_bytes(file.read_bytes()[:900])
    with pytest.raises(DataError, match=r"image_\d{5}\.jpg is not a complete picture: .*truncated"):
        list(shard_loader(data, 2, rank=0, trainers=1, num_workers=1))


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff no picture"])
def test_other_files_are_no_pictures(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "image_00001.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"image_00001\.jpg is not a complete picture"):
        read_picture(tmp_path / "image_00001.jpg", 32)


def test_a_stripe_that_would_fill_the_memory_is_no_picture(tmp_path: Path) -> None:
    Image.new("RGB", (1, 4000)).save(tmp_path / "image_00001.jpg")
    with pytest.raises(DataError, match=r"image_00001\.jpg has 1 x 4000 pixels, too narrow"):
        read_picture(tmp_path / "image_00001.jpg", 32)


def matlab(name: str, **content: object) -> object:
    return lambda folder: savemat(folder / name, content)


def cut(name: str, size: int) -> object:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


WRONG = {
    "no labels": (
        lambda folder: (folder / "imagelabels.mat").unlink(),
        r"imagelabels\.mat cannot be read: No ",
    ),
    "no parts": (lambda folder: (folder / "setid.mat").unlink(), r"setid\.mat cannot be read: No such file"),
    "empty": (cut("setid.mat", 0), r"setid\.mat is not a whole MATLAB file"),
    "no header": (cut("imagelabels.mat", 100), r"imagelabels\.mat is not a whole MATLAB file"),
    "cut": (cut("setid.mat", 160), r"setid\.mat is not a whole MATLAB file"),
    "no variable": (matlab("setid.mat", valid=[1], x=[2]), r"setid\.mat has no 'tstid'; it has valid, x"),
    "none": (
        matlab("setid.mat", tstid=np.zeros((1, 0), np.uint16)),
        "'tstid' in .* must contain only whole numbers",
    ),
    "zero": (
        matlab("setid.mat", tstid=np.array([[0, 1]])),
        "'tstid' in .* must contain only whole numbers of at least 1",
    ),
    "words": (matlab("imagelabels.mat", labels="red"), "'labels' in .* must contain only whole numbers"),
    "too many": (
        matlab("setid.mat", tstid=np.array([[61]])),
        r"names picture 61, but .* has labels for only 60",
    ),
    "no pictures": (
        lambda folder: (folder / "jpg").rename(folder / "jpeg"),
        "jpg cannot be read: No such file",
    ),
    "a picture less": (
        lambda folder: flowers(str(folder)).files[3].unlink(),
        r"jpg has no image_\d{5}\.jpg\. 1 of 40 pictures are missing",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_missing_or_wrong_are_named(tmp_path: Path, name: str) -> None:
    folder = plant(tmp_path / "flowers")
    spoil, words = WRONG[name]
    spoil(folder)
    with pytest.raises(DataError, match=words):
        flowers(str(folder))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split": "tstid"}, "split is 'tstid'; Flowers-102 has train, valid, test"),
        ({"size": 0}, "size is 0"),
    ],
)
def test_what_cannot_be(folder: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        flowers(str(folder), **settings)


# ---- Pictures out of nothing: the same for ever, and with something to see in them.


def test_a_picture_is_a_function_of_seed_and_index() -> None:
    data, twin = SyntheticPictures(20, 5, 32, seed=3), SyntheticPictures(40, 5, 32, seed=3)
    for index in (0, 7, 19):
        (picture, label), (same, its) = data[index], twin[index]
        assert (picture.shape, picture.dtype) == ((3, 32, 32), torch.float32)
        assert torch.equal(picture, same)
        assert label == its == index % 5
    assert not torch.equal(data[0][0], data[5][0])
    assert not torch.equal(data[0][0], SyntheticPictures(20, 5, 32, seed=4)[0][0])


@pytest.mark.slow
def test_pictures_of_a_class_look_alike() -> None:
    data = SyntheticPictures(200, 4, 16)
    mean = torch.stack([torch.stack([data[i][0] for i in range(c, 200, 4)]).mean(0) for c in range(4)])
    unknown, labels = zip(*(data[i] for i in range(40)), strict=True)
    nearest = torch.cdist(torch.stack(unknown).flatten(1), mean.flatten(1)).argmin(1)
    assert nearest.tolist() == [int(label) for label in labels]


def test_a_loop_over_it_ends() -> None:
    assert len(list(SyntheticPictures(3, 2, 8))) == len(SyntheticPictures(3, 2, 8)) == 3


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_that_cannot_be(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match=r"(samples|classes|size) is 0; it must be at least 1"):
        SyntheticPictures(*wrong)
