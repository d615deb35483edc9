"""The residual networks: the paper's sizes, and what makes them residual."""

import pytest
import torch

from trainers.errors import UsageError
from trainers.zoo.resnet import Bottleneck, ResNet

# Of networks for 1,000 classes, as torchvision's documentation gives them.
PARAMETERS = {18: 11_689_512, 50: 25_557_032}


@pytest.mark.slow
@pytest.mark.parametrize("layers", PARAMETERS)
def test_sizes_are_the_papers(layers: int) -> None:
    model = ResNet(layers=layers, class_dim=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[layers]


@pytest.mark.parametrize("layers", [18, 34, 50, 101, 152])
def test_as_many_layers_as_its_name_says(layers: int) -> None:
    model = ResNet(layers=layers, width=1)
    convolutions = [each for each in model.modules() if isinstance(each, torch.nn.Conv2d)]
    shortcuts = [each for name, each in model.named_modules() if "shortcut" in name and each in convolutions]
    assert len(convolutions) - len(shortcuts) + 1 == layers
    bottlenecks = [each for each in model.modules() if isinstance(each, Bottleneck)]
    assert bool(bottlenecks) == (layers >= 50)
    inner = [each for block in bottlenecks for each in block.body if isinstance(each, torch.nn.Conv2d)]
    halving = [each.kernel_size for each in inner if each.stride == (2, 2)]
    assert halving == [(3, 3)] * (3 if bottlenecks else 0)  # v1.5


@pytest.mark.parametrize(("layers", "height", "width"), [(18, 32, 32), (18, 33, 70), (50, 64, 32)])
def test_any_picture_of_32_pixels_and_more(layers: int, height: int, width: int) -> None:
    model = ResNet(layers=layers, class_dim=7, width=4)
    seen: list[torch.Size] = []
    model.stages.register_forward_hook(lambda module, given, result: seen.append(result.shape))
    assert model(torch.randn(2, 3, height, width)).shape == (2, 7)
    channels = 4 * 8 * (4 if layers == 50 else 1)
    assert seen == [(2, channels, -(-height // 32), -(-width // 32))]


def test_a_block_adds_to_what_it_is_given() -> None:
    block = ResNet(layers=50, width=4).stages[1].eval()
    given = torch.randn(2, 16, 5, 5)
    with torch.no_grad():
        assert torch.equal(block(given), torch.relu(given))
        torch.nn.init.ones_(block.body[-1].weight)
        assert torch.equal(block(given), torch.relu(block.body(given) + given))
        assert not torch.equal(block(given), torch.relu(given))


def test_convolutions_are_drawn_as_he_and_others_do() -> None:
    torch.manual_seed(0)
    widest = ResNet(layers=18, width=32).stages[-1].body[-2].weight.detach()
    assert float(widest.std()) == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layers": 20}, "ResNet has no variant with 20 layers; choose one of 18, 34, 50, 101 and 152"),
        ({"width": 0}, "width is 0"),
        ({"class_dim": 0}, "class_dim 0"),
    ],
)
def test_what_cannot_be(settings: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ResNet(**settings)


def test_smaller_pictures_are_refused() -> None:
    model = ResNet(layers=18, width=2)
    with pytest.raises(UsageError, match="have 31 x 40 pixels; a ResNet needs at least 32 x 32"):
        model(torch.zeros(1, 3, 31, 40))
