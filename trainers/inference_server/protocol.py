"""Convert between tensors and the Open Inference Protocol, version 2 (KServe, Triton).

The module covers JSON and the binary tensor extension, and is independent of HTTP and the model. See
https://github.com/kserve/open-inference-protocol and, for binary data,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetrun.aliases import Document, Fields, Integers
from fleetrun.frozen import frozen
from trainers.checks import is_whole
from trainers.shapes import Sizes, fits, shape_text
from trainers.storage.safetensors import view_of

DATATYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
_ANY_SIZE = 1 << 48
_JSON_BYTES, _NUMBER_BYTES = 1 << 16, 40
"""Enough for the JSON around numbers, and for a number of 24 digits with its comma and white space."""


class RefusedError(Exception):
    """A request without an answer. `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestError(RefusedError):
    """A wrong request. The message starts with the name of the field."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


@frozen
class TensorSpec:
    """An input or output. A size of None accepts any size."""

    name: str
    dtype: torch.dtype
    shape: Sizes

    def described(self) -> Document:
        """Return the entry for the model's metadata."""
        sizes = [-1 if size is None else size for size in self.shape]
        return {"name": self.name, "datatype": DATATYPES[self.dtype], "shape": sizes}


Given = tuple[Tensor, ...]
"""Inputs or weights, in the order of the program."""


@frozen(eq=False)
class InferRequest:
    """A decoded request. `inputs` are in the order of the program.

    `outputs` holds (name, True if binary) of the requested outputs.
    """

    id: str | None
    inputs: Given
    outputs: tuple[tuple[str, bool], ...]


@frozen(eq=False)
class InferAnswer:
    """The answer to a request. All outputs are of one `version`."""

    request: InferRequest
    version: str
    outputs: Mapping[str, Tensor]


def decode_request(
    body: bytes,
    json_size: str | None,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[str],
    most: int = _ANY_SIZE,
) -> InferRequest:
    """Decode a request. Raises RequestError.

    `json_size` is the header Inference-Header-Content-Length. `most` limits a size that may be any.
    """
    head, binary = _divided(body, json_size)
    numbers = sum(math.prod(most if size is None else size for size in spec.shape) for spec in inputs)
    if len(head) > _JSON_BYTES + numbers * _NUMBER_BYTES:
        raise RequestError(
            f"the body has {len(head)} bytes of JSON, but all inputs have at most {numbers} numbers together"
        )
    request = _object(_parsed(head), "the body")
    given = {}
    wanted = {spec.name: spec for spec in inputs}
    for number, entry in enumerate(_list(request, "inputs")):
        where = f"inputs[{number}]"
        entry = _object(entry, where)
        name = entry.get("name")
        if not isinstance(name, str) or name not in wanted:
            raise RequestError(f"{where}.name is {_shown(name)}; the inputs are {', '.join(wanted)}")
        if name in given:
            raise RequestError(f"{where}.name: {name!r} occurs twice")
        given[name] = _tensor(f"{where} ({name})", entry, wanted[name], binary)
    if missing := [name for name in wanted if name not in given]:
        raise RequestError(f"inputs: {missing[0]!r} is missing")
    if rest := binary.rest():
        raise RequestError(f"the body has {rest} bytes after its last tensor")
    id = request.get("id")
    if id is not None and not isinstance(id, str):
        raise RequestError(f"id is {_shown(id)}; it must be a string")
    all_binary = _flag(_parameters(request, "parameters"), "binary_data_output", "parameters")
    return InferRequest(id, tuple(given[name] for name in wanted), _outputs(request, outputs, all_binary))


def encode_answer(model: str, answer: InferAnswer) -> tuple[list[bytes | memoryview], int | None]:
    """Return the body in pieces, and the Inference-Header-Content-Length, or None if the body is pure
    JSON.
    """
    pieces: list[bytes | memoryview] = []
    entries = []
    for name, binary in answer.request.outputs:
        tensor = answer.outputs[name].contiguous()
        entry: Document = {
            "name": name,
            "datatype": DATATYPES[tensor.dtype],
            "shape": list(tensor.shape),
        }
        if binary:
            entry["parameters"] = {"binary_data_size": tensor.numel() * tensor.element_size()}
            pieces.append(view_of(tensor))
        else:
            entry["data"] = _numbers(tensor)
        entries.append(entry)
    head: Document = {"model_name": model, "model_version": answer.version, "outputs": entries}
    if answer.request.id is not None:
        head["id"] = answer.request.id
    text = json.dumps(head, allow_nan=False, separators=(",", ":")).encode()
    binary_any = any(binary for _, binary in answer.request.outputs)
    return [text, *pieces], len(text) if binary_any else None


class _Binary:
    """The tensors after the JSON of a body, in the order of the inputs."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self._used = 0

    def take(self, size: int, where: str) -> memoryview:
        if size > self.rest():
            raise RequestError(
                f"{where}.parameters.binary_data_size is {size}, but the body has {self.rest()} bytes left"
            )
        self._used += size
        return self._content[self._used - size : self._used]

    def rest(self) -> int:
        return len(self._content) - self._used


def _divided(body: bytes, json_size: str | None) -> tuple[bytes, _Binary]:
    if json_size is None:
        return body, _Binary(memoryview(b""))
    if not (json_size.isascii() and json_size.isdigit()) or len(json_size) > 18 or int(json_size) > len(body):
        raise RequestError(
            f"Inference-Header-Content-Length is {_shown(json_size)}, but the body has {len(body)} bytes"
        )
    return body[: int(json_size)], _Binary(memoryview(body)[int(json_size) :])


def _parsed(text: bytes) -> object:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _tensor(where: str, entry: Fields, wanted: TensorSpec, binary: _Binary) -> Tensor:
    datatype = entry.get("datatype")
    if datatype != DATATYPES[wanted.dtype]:
        raise RequestError(f"{where}.datatype is {_shown(datatype)}; it must be {DATATYPES[wanted.dtype]}")
    shape = _shape(where, entry.get("shape"), wanted)
    parameters = _parameters(entry, f"{where}.parameters")
    size = parameters.get("binary_data_size")
    if size is None:
        return _from_json(where, entry.get("data"), shape, wanted.dtype)
    if "data" in entry:
        raise RequestError(f"{where} has both data and parameters.binary_data_size; send one of them")
    expected = math.prod(shape) * wanted.dtype.itemsize
    if not _is_count(size) or size != expected:
        raise RequestError(
            f"{where}.parameters.binary_data_size is {_shown(size)}; for shape {list(shape)} it must be "
            f"{expected}"
        )
    content = bytearray(binary.take(size, where))  # a copy, because torch needs aligned and writable memory
    return torch.from_numpy(np.frombuffer(content, np.uint8)).view(wanted.dtype).view(shape)


def _shape(where: str, shape: object, wanted: TensorSpec) -> Integers:
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise RequestError(f"{where}.shape is {_shown(shape)}; it must be a list of sizes")
    if not fits(shape, wanted.shape):
        raise RequestError(f"{where}.shape is {_shown(shape)}; it must be {shape_text(wanted.shape)}")
    return tuple(shape)


def _from_json(where: str, data: object, shape: Integers, dtype: torch.dtype) -> Tensor:
    if not isinstance(data, list):
        raise RequestError(f"{where}.data is {_shown(data)}; it must be a list")
    size = math.prod(shape)
    if len(data) > size:  # before a look at each element
        raise RequestError(f"{where}.data has {len(data)} elements, but shape {list(shape)} has {size}")
    try:
        found = np.array(data)
    except (ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"{where}.data is not a list of {size} numbers: {error}") from error
    if found.size != size:
        raise RequestError(f"{where}.data has {found.size} elements, but shape {list(shape)} has {size}")
    if found.ndim > 1 and found.shape != shape:
        raise RequestError(f"{where}.data is nested as {list(found.shape)}, but shape is {list(shape)}")
    if found.size:
        _check_numbers(where, data, found, dtype)
    if dtype.is_floating_point:
        values = torch.from_numpy(found.astype(np.float64)).to(dtype)
        if found.size and not bool(values.isfinite().all()):
            raise RequestError(f"{where}.data has a number that is too large for {DATATYPES[dtype]}")
        return values.view(shape)
    return torch.from_numpy(found.astype(np.int64)).to(dtype).view(shape)


def _check_numbers(where: str, data: list[Any], found: NDArray[Any], dtype: torch.dtype) -> None:
    kinds, what = ("if", "numbers") if dtype.is_floating_point else ("i", "whole numbers")
    if dtype is torch.bool:
        kinds, what = "b", "true and false"
    elif _has_flag(data):  # numpy converts true to 1
        raise RequestError(f"{where}.data contains true or false, but {DATATYPES[dtype]} needs {what}")
    if found.dtype.kind not in kinds:
        raise RequestError(f"{where}.data must contain only {what} for {DATATYPES[dtype]}")
    if kinds == "i":
        limits = torch.iinfo(dtype)
        if found.min() < limits.min or found.max() > limits.max:
            raise RequestError(f"{where}.data contains a number that is not a valid {DATATYPES[dtype]}")


def _has_flag(data: list[Any]) -> bool:
    """Return True if a nested list contains a boolean."""
    kinds = set(map(type, data))
    return bool in kinds or (list in kinds and any(map(_has_flag, data)))


def _outputs(request: Fields, known: Sequence[str], all_binary: bool) -> tuple[tuple[str, bool], ...]:
    if "outputs" not in request:
        return tuple((name, all_binary) for name in known)
    found: dict[str, bool] = {}
    for number, entry in enumerate(_list(request, "outputs")):
        where = f"outputs[{number}]"
        entry = _object(entry, where)
        name = entry.get("name")
        if not isinstance(name, str) or name not in known or name in found:
            raise RequestError(
                f"{where}.name is {_shown(name)}; the outputs are {', '.join(known)}, and each may occur once"
            )
        parameters = _parameters(entry, f"{where}.parameters")
        if "classification" in parameters:
            raise RequestError(f"{where}.parameters.classification is not supported")
        binary = "binary_data" in parameters
        found[name] = _flag(parameters, "binary_data", f"{where}.parameters") if binary else all_binary
    return tuple(found.items())


def _numbers(tensor: Tensor) -> list[object]:
    """Return the numbers row by row, flat. NaN and infinity, which JSON lacks, become null."""
    flat = tensor.reshape(-1)
    if not flat.is_floating_point():
        return list(flat.tolist())
    numbers = list(flat.to(torch.float64).tolist())
    if bool(flat.isfinite().all()):
        return numbers
    return [number if math.isfinite(number) else None for number in numbers]


def _parameters(body: Fields, where: str) -> Fields:
    return _object(body.get("parameters", {}), where)


def _flag(body: Fields, key: str, where: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise RequestError(f"{where}.{key} is {_shown(value)}; it must be true or false")
    return value


def _object(value: object, where: str) -> Fields:
    if not isinstance(value, dict):
        raise RequestError(f"{where} is {_shown(value)}; it must be an object")
    return value


def _list(body: Fields, key: str) -> Iterator[object]:
    value = body.get(key)
    if not isinstance(value, list) or not value:
        raise RequestError(f"{key} is {_shown(value)}; it must be a list of objects")
    return iter(value)


def _is_count(value: object) -> bool:
    return is_whole(value) and 0 <= value < _ANY_SIZE


def _shown(value: object) -> str:
    """Return the value as JSON, cut if it is long."""
    if value is None:
        return "missing"
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
