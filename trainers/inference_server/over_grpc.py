"""Serve the Open Inference Protocol over gRPC, in a worker that also serves HTTP.

A request is converted to its HTTP form, so the same code checks and answers both. The module needs the extra
`grpc`.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from fleetrun.aliases import Document
from trainers.inference_server.answers import Answers
from trainers.inference_server.protocol import DATATYPES, RefusedError
from trainers.storage.safetensors import view_of

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENTS = {
    "BOOL": ("bool_contents", np.bool_),
    "UINT8": ("uint_contents", np.uint8),
    "INT8": ("int_contents", np.int8),
    "INT16": ("int_contents", np.int16),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}
"""The fields of InferTensorContents, and their types. FP16 and BF16 have no field and are sent raw."""
_OVERHEAD = 1 << 20  # bytes of a message around its tensors

_set = FileDescriptorSet.FromString(Path(__file__).with_name("open_inference.pb").read_bytes())
_described = DescriptorPool().AddSerializedFile(_set.file[0].SerializeToString())
_messages = SimpleNamespace(
    **{name: GetMessageClass(each) for name, each in _described.message_types_by_name.items()}
)


async def start(answers: Answers) -> grpc.aio.Server:
    """Start a server of this worker at the port that all workers share."""
    settings = answers.settings
    options = [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", settings.max_body + _OVERHEAD),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_connection_idle_ms", round(1000 * settings.keepalive_s)),
    ]
    server = grpc.aio.server(options=options)
    service, called = _Service(answers), _described.services_by_name["GRPCInferenceService"]
    handlers = {
        each.name: grpc.unary_unary_rpc_method_handler(
            getattr(service, each.name),
            GetMessageClass(each.input_type).FromString,
            GetMessageClass(each.output_type).SerializeToString,
        )
        for each in called.methods
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(called.full_name, handlers)])
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    server.add_insecure_port(f"{host}:{settings.grpc_port}")
    await server.start()
    return server


class _Service:
    """The service. Its methods have the names in the .proto file."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def ServerLive(self, request: object, context: grpc.aio.ServicerContext) -> object:
        self._answers.metrics.request("live", 200)
        return _messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: object, context: grpc.aio.ServicerContext) -> object:
        self._answers.metrics.request("ready", 200)
        return _messages.ServerReadyResponse(ready=self._answers.ready)

    async def ServerMetadata(self, request: object, context: grpc.aio.ServicerContext) -> object:
        self._answers.metrics.request("metadata", 200)
        return _messages.ServerMetadataResponse(name="fleetrun", version=self._answers.settings.fleetrun)

    async def ModelReady(self, request: Any, context: grpc.aio.ServicerContext) -> object:
        try:
            self._answers.served(request.name, request.version or None)
        except RefusedError as error:
            if error.status != 503:
                await self._abort("ready", context, error)
        self._answers.metrics.request("ready", 200)
        return _messages.ModelReadyResponse(ready=self._answers.ready)

    async def ModelMetadata(self, request: Any, context: grpc.aio.ServicerContext) -> object:
        try:
            described = self._answers.served(request.name, request.version or None).described(request.name)
        except RefusedError as error:
            await self._abort("metadata", context, error)
        self._answers.metrics.request("metadata", 200)
        return _messages.ModelMetadataResponse(**described)

    async def ModelInfer(self, request: Any, context: grpc.aio.ServicerContext) -> object:
        name, version = request.model_name, request.model_version or None
        try:
            self._answers.served(name, version)
            raw = _raw(request)
            head = json.dumps(_as_json(request, raw)).encode()

            async def body() -> AsyncIterator[bytes]:
                for piece in (head, *raw):
                    yield piece

            answer = await self._answers.infer(name, version, body(), str(len(head)))
        except RefusedError as error:
            await self._abort("infer", context, error)
        self._answers.metrics.request("infer", 200)
        outputs, raw = [], []
        for name, _ in answer.request.outputs:
            tensor = answer.outputs[name].contiguous()
            datatype, shape = DATATYPES[tensor.dtype], list(tensor.shape)
            outputs.append({"name": name, "datatype": datatype, "shape": shape})
            raw.append(bytes(view_of(tensor)))
        return _messages.ModelInferResponse(
            model_name=request.model_name,
            model_version=answer.version,
            id=request.id,
            outputs=outputs,
            raw_output_contents=raw,
        )

    async def _abort(self, path: str, context: grpc.aio.ServicerContext, error: RefusedError) -> None:
        self._answers.metrics.request(path, error.status)
        await context.abort(_CODES[error.status], str(error))


def _raw(request: Any) -> list[bytes]:
    """Return the input tensors in the binary form of HTTP. Raises RefusedError."""
    raw = list(request.raw_input_contents)
    if raw:
        if len(raw) != len(request.inputs):
            raise RefusedError(
                400, f"raw_input_contents has {len(raw)} elements, but inputs has {len(request.inputs)}"
            )
        for number, given in enumerate(request.inputs):
            if given.HasField("contents"):
                raise RefusedError(
                    400, f"inputs[{number}].contents and raw_input_contents are both set; send one of them"
                )
        return raw
    return [_content(f"inputs[{number}]", given) for number, given in enumerate(request.inputs)]


def _content(where: str, given: Any) -> bytes:
    field, dtype = _CONTENTS.get(given.datatype, ("", None))
    if dtype is None:
        if given.datatype in DATATYPES.values():
            raise RefusedError(
                400, f"{where}.contents does not support {given.datatype}; send it in raw_input_contents"
            )
        return b""  # `decode_request` refuses this datatype
    numbers = getattr(given.contents, field)
    if len(numbers) != math.prod(given.shape):
        raise RefusedError(
            400,
            f"{where}.contents.{field} has {len(numbers)} elements, but shape {list(given.shape)} has "
            f"{math.prod(given.shape)}",
        )
    try:
        return np.array(numbers, dtype).tobytes()
    except OverflowError as error:
        raise RefusedError(400, f"{where}.contents.{field}: {error}") from None


def _as_json(request: Any, raw: list[bytes]) -> Document:
    """Return the request's JSON in HTTP form, which precedes the tensors."""
    inputs = [
        {
            "name": given.name,
            "datatype": given.datatype,
            "shape": list(given.shape),
            "parameters": {"binary_data_size": len(content)},
        }
        for given, content in zip(request.inputs, raw, strict=True)
    ]
    asked: Document = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if request.outputs:
        asked["outputs"] = [
            {"name": wanted.name, "parameters": dict.fromkeys(wanted.parameters, True)}
            for wanted in request.outputs
        ]
    return asked
