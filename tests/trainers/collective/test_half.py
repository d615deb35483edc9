"""What a model that computes in half precision returns, in any container."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch

from trainers.collective.data_parallel import compute_in

Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclass
class Output:
    logits: torch.Tensor
    more: Any = None
    count: int = field(default=3, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    logits: torch.Tensor
    more: Any = None


class ModelOutput(OrderedDict[str, Any]):
    """As Hugging Face's: keys are attributes too, and each is set by the other."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__.update(values)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value


class Tuple(tuple[Any, ...]):
    pass


def out(make: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What a model in half precision gives that returns `make(its output)`."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            found = self.layer(x)
            assert found.dtype == dtype
            return make(found)

    model = Model()
    compute_in(model, dtype)
    return model(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (Output, lambda found: found.logits),
        (lambda value: Output(value[0], [value]), lambda found: found.more[0]),
        (Frozen, lambda found: found.logits),
        (lambda value: ModelOutput(logits=value), lambda found: found["logits"]),
        (lambda value: ModelOutput(logits=value), lambda found: found.logits),
        (lambda value: ModelOutput(more=Output(value)), lambda found: found.more.logits),
        (lambda value: UserDict(logits=value), lambda found: found["logits"]),
        (lambda value: {"logits": (value,)}, lambda found: found["logits"][0]),
        (lambda value: Pair(value, None), lambda found: found.logits),
        (lambda value: Tuple([value]), lambda found: found[0]),
        (lambda value: value.max(dim=1), lambda found: found.values),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_in_full_precision_wherever_they_are(make: Any, get: Any, dtype: torch.dtype) -> None:
    kinds = []
    found = out(lambda value: kinds.append(made := make(value)) or made, dtype)
    assert type(found) is type(kinds[0])
    assert get(found).dtype == torch.float32
    get(found).sum().backward()
    assert get(kinds[0]).dtype == dtype, "what the model keeps is not changed"


def test_what_has_nothing_to_change_is_the_same_object() -> None:
    kept = Output(torch.ones(1), MappingProxyType({"a": torch.zeros(1)}))
    assert out(lambda value: kept) is kept


def test_what_cannot_be_changed_is_an_error() -> None:
    with pytest.raises(TypeError, match="mappingproxy"):
        out(lambda value: MappingProxyType({"logits": value}))
