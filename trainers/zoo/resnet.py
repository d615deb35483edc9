"""Define residual networks (He et al., "Deep Residual Learning for Image Recognition", 2015), variant v1.5.

In this variant, a bottleneck that halves the picture does so in its 3 x 3 convolution, and not in the 1 x 1
before it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainers.errors import UsageError

SMALLEST = 32  # pixels, because the picture is halved five times

_STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_FIRST_WITH_BOTTLENECKS = 50


class ResNet(nn.Module):
    """Maps (batch, 3, H, W) float32 pictures, with H and W of at least 32, to (batch, class_dim) logits.

    `layers` is 18, 34, 50, 101 or 152 (table 1 of the paper). `width` is the number of channels in the first
    stage, 64 in the paper. Convolutions are initialised as in He et al., "Delving Deep into Rectifiers",
    2015. Every block starts as the identity, as in Goyal et al., "Accurate, Large Minibatch SGD", 2017.
    Otherwise the loss rises tenfold before it falls, at the usual rate of 0.1. Raises UsageError for another
    depth, and in `forward` for smaller pictures.
    """

    def __init__(self, layers: int = 50, class_dim: int = 102, width: int = 64) -> None:
        super().__init__()
        if layers not in _STAGES:
            raise UsageError(f"ResNet has no variant with {layers} layers; choose one of {_known()}")
        if width < 1 or class_dim < 1:
            raise UsageError(f"width is {width} and class_dim {class_dim}; both must be at least 1")
        block = Bottleneck if layers >= _FIRST_WITH_BOTTLENECKS else Basic
        self.stem = nn.Sequential(
            *_convolution(3, width, kernel=7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
        self.stages = nn.Sequential()
        channels = width
        for stage, blocks in enumerate(_STAGES[layers]):
            inner = width << stage
            for number in range(blocks):
                halved = stage > 0 and number == 0
                self.stages.append(block(channels, inner, stride=2 if halved else 1))
                channels = inner * block.expansion
        self.classifier = nn.Linear(channels, class_dim)
        _draw(self)

    def forward(self, pictures: Tensor) -> Tensor:
        if min(pictures.shape[-2:]) < SMALLEST:
            size = " x ".join(map(str, pictures.shape[-2:]))
            raise UsageError(
                f"The pictures have {size} pixels; a ResNet needs at least {SMALLEST} x {SMALLEST}"
            )
        features = self.stages(self.stem(pictures))
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


class _Residual(nn.Module):
    """relu(body(x) + x), where the body returns zeros at first.

    If the body changes the shape, x passes through a 1 x 1 convolution.
    """

    expansion = 1

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        # the factors of the last normalisation, whose offsets follow them
        nn.init.zeros_([*body.parameters()][-2])
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, kernel=1, stride=stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class Basic(_Residual):
    """Two 3 x 3 convolutions."""

    def __init__(self, inputs: int, inner: int, *, stride: int) -> None:
        body = nn.Sequential(
            *_convolution(inputs, inner, kernel=3, stride=stride),
            nn.ReLU(),
            *_convolution(inner, inner, kernel=3),
        )
        super().__init__(body, inputs, inner, stride)


class Bottleneck(_Residual):
    """A 1 x 1 convolution to fewer channels, a 3 x 3 one among them, and a 1 x 1 one to four times as
    many.
    """

    expansion = 4

    def __init__(self, inputs: int, inner: int, *, stride: int) -> None:
        outputs = inner * self.expansion
        body = nn.Sequential(
            *_convolution(inputs, inner, kernel=1),
            nn.ReLU(),
            *_convolution(inner, inner, kernel=3, stride=stride),
            nn.ReLU(),
            *_convolution(inner, outputs, kernel=1),
        )
        super().__init__(body, inputs, outputs, stride)


def _convolution(inputs: int, outputs: int, *, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """Return a convolution and its normalisation, which has the bias."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def _draw(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _known() -> str:
    *others, last = map(str, _STAGES)
    return f"{', '.join(others)} and {last}"
