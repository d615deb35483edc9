"""Declared shapes of tensors, in which a size may be any."""

from __future__ import annotations

from collections.abc import Sequence

Sizes = tuple[int | None, ...]
"""The sizes of a tensor. None accepts any size."""


def fits(found: Sequence[int], declared: Sequence[int | None]) -> bool:
    """Return True if a tensor with the sizes `found` has the declared shape."""
    same = len(found) == len(declared)
    return same and all(wanted in (None, size) for size, wanted in zip(found, declared, strict=True))


def shape_text(shape: Sequence[int | None]) -> str:
    """Return the shape for a message, as `[any, 3]`."""
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
