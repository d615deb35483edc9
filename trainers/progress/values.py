"""Numbers out of whatever a script has: floats, arrays, tensors. Nothing here waits for a device: a value on
one is copied asynchronously to pinned memory, and read once it has arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from fleetrun.aliases import Document

_LARGEST = 1 << 62

_WRONG = (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError, LookupError)
"""What objects raise that are asked for their number and have none."""


class Event(Protocol):
    def query(self) -> bool: ...


Waiting = list[tuple[str, Any, Event]]
"""(name, the copy in memory, the event after which it is there)"""


def kept(value: Any) -> Any:
    """The value without what it was computed from: a loss would hold a whole graph."""
    try:
        return value.detach() if hasattr(value, "detach") else value
    except _WRONG:
        return None


def whole(value: Any) -> int | None:
    """A count, from 0 on; None for what is none, and for what one would have to wait for."""
    if type(value) is not int and device_of(value) is not None:
        return None
    try:
        number = int(_item(value))
    except _WRONG:
        return None
    return number if 0 <= number < _LARGEST else None


class Accelerator:
    """By its module: `torch.cuda`, `torch.xpu`, `torch.mps`, or one that another package has put there. What
    it has no events for (XLA) is not fetched: nothing says when it has arrived.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def capturing(self) -> bool:
        """Whether operations are being captured into a graph, to be run later and more than once. Never
        starts the device.
        """
        is_capturing = getattr(self._module, "is_current_stream_capturing", None)
        return is_capturing is not None and bool(self._module.is_initialized() and is_capturing())

    def fetch(self, tensor: Any) -> tuple[Any, Event]:
        """Return a copy that is there after the event. Raises RuntimeError."""
        module = self._module
        if not hasattr(module, "Event"):
            raise RuntimeError("it has no events")
        copy = self.memory(tensor)
        copy.copy_(tensor.reshape(()), non_blocking=True)
        event = module.Event()
        if hasattr(module, "current_stream"):
            event.record(module.current_stream(tensor.device))
        else:  # it has one only
            event.record()
        return copy, event

    @staticmethod
    def memory(tensor: Any) -> Any:
        """Pinned memory for one such number, which the device writes asynchronously."""
        return sys.modules["torch"].empty((), dtype=tensor.dtype, pin_memory=True)


def device_of(value: Any) -> Accelerator | None:
    """None for what is in memory, or no tensor of one value."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or not _plain(value):
        return None
    kind = value.device.type
    return None if kind in ("cpu", "meta") else Accelerator(getattr(torch, kind, None))


class Reader:
    """Of one process."""

    def __init__(self, device_of: Callable[[Any], Accelerator | None] = device_of) -> None:
        self._device_of = device_of
        self._waiting: Waiting = []
        self._devices: list[Accelerator] = []

    @property
    def waits(self) -> bool:
        """Whether something is on its way from a device."""
        return bool(self._waiting)

    def read(self, given: Document) -> dict[str, float]:
        """The numbers that are there: of `given`, and of those that came from a device since the last call.
        What is taken out of `given` is read, under way, or not a number; what stays waits for its turn.
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
        """All of what was sent for, or nothing yet."""
        if any(
            each.capturing() for each in self._devices
        ):  # asking for an event then would break the capture
            return {}
        try:
            if not all(event.query() for _, _, event in self._waiting):
                return {}
            numbers = {name: float(copy) for name, copy, _ in self._waiting}
        except RuntimeError:  # the device's own error: the training gets it too
            numbers = {}
        self._waiting, self._devices = [], []
        return numbers

    def _send_for(self, given: Document) -> None:
        """What cannot be fetched is left out."""
        for name, tensor in list(given.items()):
            device = self._device_of(tensor)
            if device is None:
                continue  # another thread has just said it
            if device.capturing():  # into a graph, which would copy at each replay
                continue
            del given[name]
            try:
                copy, event = device.fetch(tensor)
            except RuntimeError:  # of another kind than those before it, or the device's own error
                continue
            self._waiting.append((name, copy, event))
            self._devices.append(device)


def _number(value: Any) -> float | None:
    """None unless it is a single number. A DTensor is not: its value would be a collective call."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and not _plain(value):
        return None
    try:
        return float(_item(value))
    except _WRONG:
        return None


def _item(value: Any) -> Any:
    """The one element of an array or a tensor; anything else itself."""
    return value.item() if hasattr(value, "item") else value


def _plain(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() == 1
