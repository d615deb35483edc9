"""Declare immutable value classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: Any = None, **options: bool) -> Any:
    """Make a class a dataclass with slots and fields that cannot be set again.

    `options` are the options of `dataclasses.dataclass`. Use `@frozen` or `@frozen(kw_only=True)`.
    """
    return dataclass(cls, frozen=True, slots=True, **options)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def frozen_by_name(cls: Any) -> Any:
    """Do the same for a class whose fields are passed by name."""
    return frozen(cls, kw_only=True)
