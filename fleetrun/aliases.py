"""Names for types that occur throughout the launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Environ = Mapping[str, str]
"""Environment variables by name."""

Texts = Mapping[str, str]
"""Texts by name, such as options in the form of the command line."""

Fields = Mapping[str, Any]
"""The fields of a JSON object by name: an event of the event log, the status of a job, a message."""

Numbers = Mapping[str, float]
"""Numbers by name."""

Document = dict[str, Any]
"""A JSON object under construction, or one that the caller may change."""

Callback = Callable[[], None]
"""A call without arguments, made by a loop, by a timer, or at the end of a request."""

Strings = tuple[str, ...]
"""Names, words or lines."""

Integers = tuple[int, ...]
"""Ranks, ports, devices, sizes."""

ShowText = Callable[[str], None]
"""A function that shows a text to the user."""

Clock = Callable[[], float]
"""The time in seconds."""
