"""Read numbers from a script's values, such as floats, arrays and tensors, without waiting for a device.

A value on a device is copied asynchronously to pinned memory, and read once it has arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from fleetrun.aliases import Document

_LARGEST = 1 << 62

_WRONG = (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError, LookupError)
"""Exceptions of objects that cannot be converted to a number."""


class Event(Protocol):
    def query(self) -> bool: ...


Waiting = list[tuple[str, Any, Event]]
"""(name, the copy in memory, the event after which it is complete)"""


def kept(value: object) -> object:
    """Return the value without its graph, because a loss would hold the whole graph in memory."""
    try:
        return value.detach() if hasattr(value, "detach") else value
    except _WRONG:
        return None


def whole(value: object) -> int | None:
    """Return a count from 0 on, or None for other values and for values on a device."""
    if type(value) is not int and device_of(value) is not None:
        return None
    try:
        number = int(_item(value))
    except _WRONG:
        return None
    return number if 0 <= number < _LARGEST else None


class Accelerator:
    """A device by its module: `torch.cuda`, `torch.xpu`, `torch.mps`, or another package's module.

    Values on a device without events (XLA) are not fetched, because their arrival cannot be detected.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def capturing(self) -> bool:
        """Return True while operations are captured into a graph, which runs later and repeatedly.

        The call never starts the device.
        """
        is_capturing = getattr(self._module, "is_current_stream_capturing", None)
        return is_capturing is not None and bool(self._module.is_initialized() and is_capturing())

    def fetch(self, tensor: Any) -> tuple[Any, Event]:
        """Return a copy that is complete after the event. Raises RuntimeError for a device without events."""
        module = self._module
        if not hasattr(module, "Event"):
            raise RuntimeError("the device has no events")
        copy = self.memory(tensor)
        copy.copy_(tensor.reshape(()), non_blocking=True)
        event = module.Event()
        if hasattr(module, "current_stream"):
            event.record(module.current_stream(tensor.device))
        else:  # the device has only one stream
            event.record()
        return copy, event

    @staticmethod
    def memory(tensor: Any) -> Any:
        """Return pinned memory for one number, which the device writes asynchronously."""
        return sys.modules["torch"].empty((), dtype=tensor.dtype, pin_memory=True)


def device_of(value: object) -> Accelerator | None:
    """Return the device of a tensor with one value, or None for a value in memory or another type."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or not _plain(value):
        return None
    kind = value.device.type
    return None if kind in ("cpu", "meta") else Accelerator(getattr(torch, kind, None))


class Reader:
    """Reads the values of one process."""

    def __init__(self, device_of: Callable[[object], Accelerator | None] = device_of) -> None:
        self._device_of = device_of
        self._waiting: Waiting = []
        self._devices: list[Accelerator] = []

    @property
    def waits(self) -> bool:
        """True if values are on their way from a device."""
        return bool(self._waiting)

    def read(self, given: Document) -> dict[str, float]:
        """Return the available numbers, from `given` and from devices since the last call.

        Values removed from `given` are read, on their way, or invalid. The remaining values wait for their
        turn.
        """
        numbers = self._arrived()
        for name in list(given):
            value = given[name]
            if self._device_of(value) is not None:
                continue
            del given[name]
            number = _number(value)
            if number is not None and name not in numbers:
                numbers[name] = number
        if given and not self._waiting:
            self._send_for(given)
        return numbers

    def _arrived(self) -> dict[str, float]:
        """Return all fetched values, or an empty dict while one is missing."""
        if any(each.capturing() for each in self._devices):  # querying an event would break the capture
            return {}
        try:
            if not all(event.query() for _, _, event in self._waiting):
                return {}
            numbers = {name: float(copy) for name, copy, _ in self._waiting}
        except RuntimeError:  # an error of the device, which the training gets too
            numbers = {}
        self._waiting, self._devices = [], []
        return numbers

    def _send_for(self, given: Document) -> None:
        """Fetch values from devices. Values that cannot be fetched are left out."""
        for name, tensor in list(given.items()):
            device = self._device_of(tensor)
            if device is None:
                continue  # another thread has just replaced it
            if device.capturing():  # the graph would repeat the copy at each replay
                continue
            del given[name]
            try:
                copy, event = device.fetch(tensor)
            except RuntimeError:  # an unsupported device, or an error of the device
                continue
            self._waiting.append((name, copy, event))
            self._devices.append(device)


def _number(value: object) -> float | None:
    """Return a single number, or None. For a DTensor it is None, because reading it would be a
    collective call.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and not _plain(value):
        return None
    try:
        return float(_item(value))
    except _WRONG:
        return None


def _item(value: object) -> Any:
    """Return the only element of an array or tensor, or the value itself."""
    return value.item() if hasattr(value, "item") else value


def _plain(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() == 1
