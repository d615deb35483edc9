"""A worker: answers requests over HTTP with the model that the server tells it to map. `python -m
trainers.inference_server.worker SETTINGS LISTENING CONTROL`, the last two are descriptors.

Over the control socket come JSON lines: first whether to accept at once or when ready, then the versions to
serve; back go the sequence of each version that is served, and the number of its values. When the server is
gone the worker ends.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

from trainers.errors import FleetError
from trainers.inference_server.batching import Batcher, BusyError
from trainers.inference_server.metrics import Metrics
from trainers.inference_server.model import ModelVersion, ServedModel
from trainers.inference_server.protocol import (
    InferRequest,
    RequestError,
    decode_request,
    encode_answer,
)
from trainers.inference_server.settings import ServeSettings
from trainers.process.log import glog

JSON_SIZE = "Inference-Header-Content-Length"
_LAST_S = 1.0
"""Connections that were accepted already have so long to send a request; after its answer they are closed."""


class Handlers:
    """The protocol's paths. Until there is a model, the worker is live and not ready."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._model: ServedModel | None = None
        self._batcher: Batcher | None = None
        self.stopping = False

    async def serve(self, version: ModelVersion) -> None:
        """Serve this version from the next batch on."""
        if self._batcher is None or self._model is None:
            model = await asyncio.to_thread(ServedModel, version)
            limits = self._settings.max_batch_rows, self._settings.max_waiting
            self._batcher = Batcher(model, *limits, self._metrics.batch)
            await self._batcher.between_batches(model.warm_up)
            self._model = model
        else:
            await self._batcher.between_batches(partial(self._model.swap, version))
        self._metrics.serves(version)

    def close(self) -> None:
        if self._batcher is not None:
            self._batcher.close()

    def routes(self) -> list[web.RouteDef]:
        name = "/v2/models/{model}"
        return [
            web.get("/v2/health/live", self._live),
            web.get("/v2/health/ready", self._ready),
            web.get("/v2", self._server_metadata),
            *(
                route
                for base in (name, name + "/versions/{version}")
                for route in (
                    web.get(base, self._metadata),
                    web.get(base + "/ready", self._model_ready),
                    web.post(base + "/infer", self._infer),
                )
            ),
            web.get("/metrics", self._scraped),
        ]

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._model is not None and not self.stopping
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _model_ready(self, request: web.Request) -> web.Response:
        self._served(request)
        return await self._ready(request)

    async def _server_metadata(self, request: web.Request) -> web.Response:
        about = {"name": "fleetrun", "version": self._settings.fleetrun}
        return web.json_response({**about, "extensions": ["binary_tensor_data"]})

    async def _metadata(self, request: web.Request) -> web.Response:
        model = self._served(request)
        program = model.program
        return web.json_response(
            {
                "name": self._settings.name,
                "versions": [model.version.version],
                "platform": "pytorch_torch_export",
                "inputs": [spec.described() for spec in program.inputs],
                "outputs": [spec.described() for spec in program.outputs],
            }
        )

    async def _infer(self, request: web.Request) -> web.Response:
        started = time.perf_counter()
        model = self._served(request)
        read = False
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                body = await request.read()
                read = True
                asked = self._decoded(model, body, request.headers.get(JSON_SIZE))
                assert self._batcher is not None
                version, outputs = await self._batcher.submit(asked.inputs)
        except TimeoutError:
            raise _failed(504 if read else 408, f"no answer within {self._settings.timeout_s:g} s") from None
        except BusyError:
            raise _failed(503, f"{self._settings.max_waiting} requests are waiting already") from None
        except RequestError as error:
            raise _failed(400, str(error)) from None
        except web.RequestPayloadError as error:
            raise _failed(400, f"the body cannot be read: {_first_line(error)}") from None
        except (web.HTTPException, ConnectionError):
            raise
        except IndexError as error:  # an id that the program has no row for
            raise _failed(400, f"inputs: {_first_line(error)}") from None
        except Exception as error:  # noqa: BLE001  (a program may raise anything)
            glog(f"a request failed: {error}")
            raise _failed(500, f"the program failed: {_first_line(error)}") from None
        if request.match_info.get("version") not in (None, version.version):
            raise _failed(404, f"version {request.match_info['version']!r} is not served any more")
        pieces, json_size = encode_answer(self._settings.name, version.version, asked, outputs)
        headers: dict[str, str] = {"Content-Type": "application/json"}
        if json_size is not None:
            headers = {"Content-Type": "application/octet-stream", JSON_SIZE: str(json_size)}
        self._metrics.answered(_rows(asked), time.perf_counter() - started)
        return web.Response(body=b"".join(pieces), headers=headers)

    async def _scraped(self, request: web.Request) -> web.Response:
        text, kind = await asyncio.to_thread(self._metrics.text)
        return web.Response(body=text, headers={"Content-Type": kind})

    def _decoded(self, model: ServedModel, body: bytes, json_size: str | None) -> InferRequest:
        program = model.program
        asked = decode_request(body, json_size, program.inputs, [spec.name for spec in program.outputs])
        rows = _rows(asked)
        if not 0 < rows <= self._settings.max_rows:
            raise RequestError(
                f"{program.inputs[0].name}.shape has {rows} rows; a request may have 1 to "
                f"{self._settings.max_rows}"
            )
        if program.joins:
            for spec, tensor in zip(program.inputs, asked.inputs, strict=True):
                if (other := tensor.shape[0]) != rows:
                    raise RequestError(
                        f"{spec.name}.shape has {other} rows, and {program.inputs[0].name} has {rows}"
                    )
        return asked

    def _served(self, request: web.Request) -> ServedModel:
        """The model of the path."""
        name, version = request.match_info["model"], request.match_info.get("version")
        if name != self._settings.name:
            raise _failed(404, f"there is no model {name!r}; the model is {self._settings.name!r}")
        if self._model is None:
            raise _failed(503, "the model is being loaded")
        served = self._model.version.version
        if version not in (None, served):
            raise _failed(404, f"version {version!r} is not served; the version is {served!r}")
        return self._model


def _rows(asked: InferRequest) -> int:
    return asked.inputs[0].shape[0] if asked.inputs[0].dim() else 1


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _failed(status: int, message: str) -> web.HTTPException:
    kinds: Mapping[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        404: web.HTTPNotFound,
        408: web.HTTPRequestTimeout,
        500: web.HTTPInternalServerError,
        503: web.HTTPServiceUnavailable,
        504: web.HTTPGatewayTimeout,
    }
    return kinds[status](text=message)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _completed(handlers: Handlers, metrics: Metrics) -> Any:
    """Errors as the protocol has them, also those of the library: no such path, a body that is too large."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.json_response({"error": error.text}, status=error.status)
        metrics.request(request.path.rpartition("/")[2], response.status)
        if handlers.stopping:
            response.force_close()
        return response

    return answer


async def work(settings: ServeSettings, listening: socket.socket, control: socket.socket) -> None:
    """Until SIGTERM, or until the server is gone; requests that have begun are answered."""
    metrics = Metrics()
    handlers = Handlers(settings, metrics)
    app = web.Application(client_max_size=settings.max_body, middlewares=[_completed(handlers, metrics)])
    app.add_routes(handlers.routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=settings.grace_s, handle_signals=False)
    await runner.setup()
    site = web.SockSite(runner, listening)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C reaches the server too, which says stop
    lines, answers = await asyncio.open_connection(sock=control, limit=1 << 26)
    told = asyncio.create_task(_follow(lines, answers, handlers, site, stop))
    await stop.wait()
    handlers.stopping = True
    if site in runner.sites:
        await site.stop()
        await asyncio.sleep(_LAST_S)
    await runner.cleanup()
    handlers.close()
    told.cancel()
    with suppress(asyncio.CancelledError):
        await told


async def _follow(
    lines: asyncio.StreamReader,
    answers: asyncio.StreamWriter,
    handlers: Handlers,
    site: web.SockSite,
    stop: asyncio.Event,
) -> None:
    """Do what the server says until it is gone. Raises LoadError, OSError."""
    try:
        started = json.loads(await lines.readline() or b"false")
        if started:
            await site.start()
        while line := await lines.readline():
            version = ModelVersion.decode(line)
            await handlers.serve(version)
            if not started:
                await site.start()
                started = True
            number = 0 if version.values is None else version.values.number
            answers.write(f"{version.sequence} {number}\n".encode())
    finally:
        stop.set()


def main(settings: str, listening: str, control: str) -> None:
    sockets = (socket.socket(fileno=int(each)) for each in (listening, control))
    try:
        asyncio.run(work(ServeSettings.decode(settings), *sockets))
    except (FleetError, OSError) as error:
        glog(f"the worker ends: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
