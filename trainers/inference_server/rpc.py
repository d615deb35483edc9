"""The Open Inference Protocol over gRPC, for a worker that also answers it over HTTP: a request becomes what
HTTP would bring, so both are checked and answered by the same code. Needs the extra grpc.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from trainers.inference_server.model import ServedModel
from trainers.inference_server.protocol import DATATYPES, InferAnswer, RefusedError
from trainers.inference_server.settings import ServeSettings
from trainers.storage.safetensors import view_of

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENTS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}
"""The fields of InferTensorContents. FP16 and BF16 have none: they are sent raw."""
_OVERHEAD = 1 << 20  # of a message around its tensors

_messages, _services = grpc.protos_and_services("trainers/inference_server/open_inference.proto")


class Handlers(Protocol):
    """What answers requests, however they come."""

    @property
    def ready(self) -> bool: ...

    def served(self, name: str, version: str | None) -> ServedModel:
        """Raises RefusedError unless this model is served, in this version."""
        ...

    async def infer(
        self, name: str, version: str | None, read: Callable[[], Awaitable[bytes]], json_size: str | None
    ) -> InferAnswer:
        """`read`: the body, as HTTP brings it. Raises RefusedError."""
        ...


async def start(
    settings: ServeSettings, handlers: Handlers, answered: Callable[[str, int], None]
) -> grpc.aio.Server:
    """A server of this worker, at the port that all workers share. `answered`: the method and the status."""
    most = settings.max_body + _OVERHEAD
    options = [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", most),
        ("grpc.max_send_message_length", -1),
    ]
    server = grpc.aio.server(options=options)
    _services.add_GRPCInferenceServiceServicer_to_server(_Service(settings, handlers, answered), server)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    server.add_insecure_port(f"{host}:{settings.grpc_port}")
    await server.start()
    return server


class _Service(_services.GRPCInferenceServiceServicer):  # type: ignore[misc,name-defined]  # from the .proto
    def __init__(
        self, settings: ServeSettings, handlers: Handlers, answered: Callable[[str, int], None]
    ) -> None:
        self._settings, self._handlers, self._answered = settings, handlers, answered

    async def ServerLive(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return _messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return _messages.ServerReadyResponse(ready=self._handlers.ready)

    async def ServerMetadata(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return _messages.ServerMetadataResponse(name="fleetrun", version=self._settings.fleetrun)

    async def ModelReady(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            self._handlers.served(request.name, request.version or None)
        except RefusedError as error:
            if error.status != 503:
                await self._abort("ready", context, error)
        return _messages.ModelReadyResponse(ready=self._handlers.ready)

    async def ModelMetadata(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            described = self._handlers.served(request.name, request.version or None).described(request.name)
        except RefusedError as error:
            await self._abort("metadata", context, error)
        return _messages.ModelMetadataResponse(**described)

    async def ModelInfer(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def body() -> bytes:
            return b"".join([head, *request.raw_input_contents])

        try:
            head = json.dumps(_as_json(request)).encode()
            name, version = request.model_name, request.model_version or None
            answer = await self._handlers.infer(name, version, body, str(len(head)))
        except RefusedError as error:
            await self._abort("infer", context, error)
        self._answered("infer", 200)
        return _response(request, answer)

    async def _abort(self, path: str, context: grpc.aio.ServicerContext, error: RefusedError) -> None:
        self._answered(path, error.status)
        await context.abort(_CODES[error.status], str(error))


def _as_json(request: Any) -> dict[str, Any]:
    """The request's JSON over HTTP, before the raw tensors. Raises RefusedError."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RefusedError(
            400, f"raw_input_contents has {len(raw)} elements; inputs has {len(request.inputs)}"
        )
    inputs = []
    for number, given in enumerate(request.inputs):
        entry: dict[str, Any] = {"name": given.name, "datatype": given.datatype, "shape": list(given.shape)}
        if raw:
            entry["parameters"] = {"binary_data_size": len(raw[number])}
        else:
            field = _CONTENTS.get(given.datatype)
            if field is None and given.datatype in DATATYPES.values():
                raise RefusedError(400, f"inputs[{number}].contents has no {given.datatype}; send it raw")
            entry["data"] = list(getattr(given.contents, field)) if field else []
        inputs.append(entry)
    asked: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if request.outputs:
        asked["outputs"] = [{"name": wanted.name} for wanted in request.outputs]
    return asked


def _response(request: Any, answer: InferAnswer) -> Any:
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
