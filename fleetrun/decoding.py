"""Read values from JSON that another process or node wrote. Every field is checked by its kind."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from fleetrun.aliases import Document, Fields, Strings

T = TypeVar("T")

WRONG = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The exceptions that reading JSON of unknown origin may raise."""


class BadRecordError(ValueError):
    """The value is not a record of this kind. Another version of fleetrun, or another program, wrote it."""


def read_object(text: str | bytes) -> Document | None:
    """Parse a JSON object. Return None for any other text."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def number_in(value: object) -> float | None:
    """Return a finite number, without changes, or None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return value


def whole_in(value: object) -> int | None:
    """Return a whole number, or None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def finite(value: Any) -> float:
    """Read a finite number, because times are compared."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number


def texts(value: Any) -> Strings:
    return tuple(map(str, value))


def optional(kind: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else kind(value)


def of_fields(record: Callable[..., T], **kinds: Callable[[Any], Any]) -> Callable[[Fields], T]:
    """Return a function that reads a record from a JSON object, each field by its kind.

    Fields of later versions are ignored, and missing fields get their defaults.
    """

    def read(fields: Fields) -> T:
        return record(**{name: kinds[name](value) for name, value in fields.items() if name in kinds})

    return read


def of_bytes(read: Callable[[Any], T]) -> Callable[[bytes], T]:
    """Return a function that reads a record from bytes and raises BadRecordError."""

    def decoded(data: bytes) -> T:
        try:
            return read(json.loads(data))
        except WRONG as error:
            raise BadRecordError(str(error) or type(error).__name__) from None

    return decoded
