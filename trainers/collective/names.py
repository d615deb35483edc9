"""Modules of a model by name and pattern. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from trainers.errors import UsageError
from trainers.ps.configs import nearest


def matching(model: torch.nn.Module, patterns: Iterable[str], what: str) -> list[str]:
    """The names of the modules that the patterns name, as in the model. A star stands for one step of a
    name or a part of it: `blocks.*` is each of the blocks, and nothing in them.

    Raises UsageError, with `what`, for a pattern that names none.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if _fits(name.split("."), pattern.split("."))}
        if not matched:
            raise UsageError(
                f"{what} names {pattern!r}, and the model has no such module{nearest(pattern, names)}"
            )
        found |= matched
    return [name for name in names if name in found]


def outermost(names: Iterable[str]) -> list[str]:
    """Without those that are inside another one of them."""
    kept: list[str] = []
    for name in sorted(names, key=lambda each: each.count(".")):
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept


def _fits(steps: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(steps) == len(pattern) and all(map(fnmatchcase, steps, pattern))
