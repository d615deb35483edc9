"""Pictures out of nothing: the same for ever, and with something to see in them."""

import pytest
import torch

from trainers.data.flowers import SyntheticPictures
from trainers.errors import UsageError


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
def test_what_cannot_be(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match=r"(samples|classes|size) is 0; it must be at least 1"):
        SyntheticPictures(*wrong)
