"""Which modules FSDP2 fetches as one."""

import pytest
from torch import nn

from trainers.collective.sharding import check_unit, units
from trainers.errors import UsageError


class Tied(nn.Module):
    """Words in and words out by the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 8)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8)) for _ in range(2))
        self.out = nn.Linear(8, 100, bias=False)
        self.out.weight = self.words.weight


def linear(inputs: int, outputs: int) -> int:
    """Bytes"""
    return 4 * (inputs + 1) * outputs


@pytest.mark.parametrize(
    ("least", "names"),
    [
        (linear(40, 8) + 1, ["body.0.0", "body.1.0"]),  # the smaller halves are the model's own
        (linear(8, 40) + 1, ["body.0", "body.1"]),
        (linear(40, 8), ["body.0.0", "body.0.1", "body.1.0", "body.1.1"]),
        (linear(8, 40) + linear(40, 8) + 1, []),  # a list is never called; tied words belong to both
    ],
)
def test_a_unit_has_a_size_of_its_own(least: int, names: list[str]) -> None:
    assert units(Tied(), least) == names


def test_layers_that_use_what_is_inside_stay_whole() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert units(nn.Sequential(layer, nn.MultiheadAttention(8, 2)), 4) == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("body", "is a ModuleList, which is never called; name what is in it, as `body.*`"),
        ("words", "has parameters that are used elsewhere too"),
        ("norm", "has no parameters"),
    ],
)
def test_a_module_that_cannot_be_a_unit_is_refused(name: str, why: str) -> None:
    model = Tied()
    model.norm = nn.LayerNorm(8, elementwise_affine=False)
    with pytest.raises(UsageError, match=f"segment_anchors names '{name}', which {why}".replace("*", r"\*")):
        check_unit(model, name)
    check_unit(model, "body.0")
