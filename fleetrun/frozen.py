"""Declare classes of values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: Any = None, **options: bool) -> Any:
    """Make a class a dataclass with slots whose fields cannot be set again. `options` are those of
    `dataclasses.dataclass`: `@frozen` or `@frozen(kw_only=True)`.
    """
    return dataclass(cls, frozen=True, slots=True, **options)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen_by_name(cls: Any) -> Any:
    """Do the same for a class whose fields are given by their names."""
    return frozen(cls, kw_only=True)
