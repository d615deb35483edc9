"""Which modules of a model FSDP2 fetches and frees as one. Pure: knows modules and their sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from trainers.errors import UsageError

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Nobody calls them, so nobody would fetch their parameters."""

WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""They use the parameters of modules inside them without calling those."""


def units(model: nn.Module, least: int) -> list[str]:
    """Names of modules, the inner ones first: each has `least` bytes of parameters that are in no unit inside
    it. What is left is the model's own. The rule of torch's `size_based_auto_wrap_policy`.
    """
    found: list[str] = []
    _rest(model, model, "", least, found)
    return found


def _rest(model: nn.Module, module: nn.Module, name: str, least: int, found: list[str]) -> int:
    """How many bytes of the module's parameters are in no unit."""
    if isinstance(module, WHOLE):
        size = _size(module.parameters())
    else:
        size = _size(module.parameters(recurse=False))
        prefix = f"{name}." if name else ""
        size += sum(
            _rest(model, child, f"{prefix}{at}", least, found) for at, child in module.named_children()
        )
    if size < least or not name or isinstance(module, CONTAINERS) or shared(model, module):
        return size
    found.append(name)
    return 0


def shared(model: nn.Module, module: nn.Module) -> bool:
    """Whether the module, or a parameter in it, has another place in the model too."""
    everywhere = Counter(map(id, _places(model)))
    inside = Counter(map(id, _places(module)))
    modules = Counter(id(each) for _, each in model.named_modules(remove_duplicate=False))
    return modules[id(module)] > 1 or any(everywhere[key] > count for key, count in inside.items())


def check_unit(model: nn.Module, name: str) -> None:
    """Raises UsageError for a module that cannot be one."""
    module = model.get_submodule(name)
    why = None
    if isinstance(module, CONTAINERS):
        why = f"is a {type(module).__name__}, which is never called; name what is in it, as `{name}.*`"
    elif not any(True for _ in module.parameters()):
        why = "has no parameters"
    elif shared(model, module):
        why = "has parameters that are used elsewhere too; name a module around both, or none"
    if why is not None:
        raise UsageError(f"sharding_configs segment_anchors names {name!r}, which {why}")


def _places(module: nn.Module) -> list[nn.Parameter]:
    """Every parameter, as often as it has a name."""
    return [param for _, param in module.named_parameters(remove_duplicate=False)]


def _size(params: Iterable[torch.Tensor]) -> int:
    return sum(param.numel() * param.element_size() for param in params)
