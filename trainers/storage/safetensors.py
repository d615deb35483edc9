"""The safetensors format, encoded without copies and decoded into views.

A file has a u64 length of the header, a JSON header, and the tensors' bytes without gaps. See
https://github.com/huggingface/safetensors#format . The library is not used because its `serialize` first
copies all tensors into one bytes object.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainers.storage.folder import Buffer

_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # the library's own limit

Tensors = dict[str, Tensor]
"""The content of a file: tensors by name."""

TYPES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The types for which the format has a name."""
_DTYPES = {word: dtype for dtype, word in TYPES.items()}


class SafetensorsError(ValueError):
    """Bytes that are not a safetensors file of tensors of these types."""


def pack(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> list[Buffer]:
    """Return a file's content without a copy: the header, and views of the tensors. Tensors must be
    contiguous and on the CPU.

    The widest types come first, so that every tensor starts at a multiple of its item size.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": dict(about)}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [_LENGTH.pack(len(text)) + text, *(view_of(tensor) for _, tensor in ordered)]


def view_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    return bytes_of(tensor).numpy().data


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, (size,) uint8, without a copy."""
    # A tensor of one element counts as contiguous with any stride, and some strides allow no view of bytes.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def unpack(content: Tensor) -> Tensors:
    """Return tensors by name, as views into `content` (uint8). Raises SafetensorsError for an
    invalid file.
    """
    if len(content) < _LENGTH.size:
        raise SafetensorsError(f"the file has only {len(content)} bytes")
    (length,) = _LENGTH.unpack(content[: _LENGTH.size].numpy().tobytes())
    if length > min(len(content) - _LENGTH.size, _MAX_HEADER):
        raise SafetensorsError(f"the header claims {length} bytes in a file of {len(content)}")
    begin = _LENGTH.size + length
    try:
        header = json.loads(content[_LENGTH.size : begin].numpy().tobytes())
    except ValueError as error:
        raise SafetensorsError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise SafetensorsError("the header is not a JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(name, entry, content[begin:]) for name, entry in header.items()}


def _tensor(name: str, entry: Any, data: Tensor) -> Tensor:
    try:
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        numbers = all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop))
    except (KeyError, TypeError, ValueError) as error:
        raise SafetensorsError(f"the description of tensor {name!r} is invalid: {entry!r}") from error
    if not numbers or not start <= stop <= len(data) or stop - start != math.prod(shape) * dtype.itemsize:
        raise SafetensorsError(
            f"tensor {name!r} of shape {shape} cannot be at {start} to {stop} of {len(data)} bytes"
        )
    piece = data[start:stop]
    if piece.storage_offset() % dtype.itemsize:  # written by another program
        piece = piece.clone()
    return piece.view(dtype).view(shape)
