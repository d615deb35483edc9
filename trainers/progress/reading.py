"""Numbers out of whatever a script has: floats, arrays, tensors. Nobody waits for a device here: what is on
one is copied to memory that the device can write by itself, and read when it has.
"""

from __future__ import annotations

import sys
from typing import Any

_LARGEST = 1 << 62

Waiting = list[tuple[str, Any, Any]]
"""(name, the copy in memory, the event after which it is there)"""


def kept(value: Any) -> Any:
    """The value without what it was computed from: a loss would hold a whole graph."""
    return value.detach() if hasattr(value, "detach") else value


def whole(value: Any) -> int | None:
    """A count, from 0 on; None for what is none."""
    try:
        number = int(_item(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if 0 <= number < _LARGEST else None


class Reader:
    """Of one process."""

    def __init__(self) -> None:
        self._waiting: Waiting = []

    @property
    def waits(self) -> bool:
        """Whether something is on its way from a device."""
        return bool(self._waiting)

    def read(self, given: dict[str, Any]) -> dict[str, float]:
        """The numbers that are there: of `given`, and of those that came from a device since the last call.
        What is taken out of `given` is read, on its way, or no number; what stays in it waits for its turn.
        """
        numbers = self._arrived()
        for name in list(given):
            value = given[name]
            if _on_cuda(value):
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
        if self._waiting and _capturing():  # whoever asks for an event then breaks the capture
            return {}
        try:
            if not all(event.query() for _, _, event in self._waiting):
                return {}
            numbers = {name: float(copy) for name, copy, _ in self._waiting}
        except RuntimeError:  # the device's own error: the training hears of it
            numbers = {}
        self._waiting = []
        return numbers

    def _send_for(self, given: dict[str, Any]) -> None:
        torch = sys.modules["torch"]
        if _capturing():  # into a graph, which would copy at each replay
            return
        waiting: Waiting = []
        try:
            for name, tensor in list(given.items()):
                if not _on_cuda(tensor):
                    continue  # another thread has just said it
                del given[name]
                copy = torch.empty((), dtype=tensor.dtype, pin_memory=True)
                copy.copy_(tensor.reshape(()), non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(tensor.device))
                waiting.append((name, copy, event))
        except RuntimeError:
            waiting = []
        self._waiting = waiting


def _number(value: Any) -> float | None:
    """None for what is no single number. A DTensor is none here: its value would be a collective call."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and not _plain(value):
        return None
    try:
        return float(_item(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _item(value: Any) -> Any:
    """The one element of an array or a tensor; anything else itself."""
    return value.item() if hasattr(value, "item") else value


def _on_cuda(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor) and value.is_cuda and _plain(value)


def _capturing() -> bool:
    """Whether a CUDA graph is being made. Never starts CUDA."""
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _plain(tensor: Any) -> bool:
    torch = sys.modules["torch"]
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() == 1
