"""Names for types that occur in every part of the launcher and the runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Environ = Mapping[str, str]
"""Environment variables, by name."""

Texts = Mapping[str, str]
"""Texts by name, such as options as they would be typed."""

Fields = Mapping[str, Any]
"""A JSON object by the names of its fields: an event of the record, the status of a job, a message."""

Numbers = Mapping[str, float]
"""Numbers by name."""

Document = dict[str, Any]
"""Values by name, in a dict that may change: a JSON object, a state dict, keyword arguments."""

Callback = Callable[[], None]
"""A call without arguments: from a loop, a timer, or whoever was asked to report back."""

Strings = tuple[str, ...]
"""Names, words, lines."""

Integers = tuple[int, ...]
"""Ranks, ports, devices, sizes."""

Say = Callable[[str], None]
"""Takes a text for the user."""

Clock = Callable[[], float]
"""The time in seconds."""
