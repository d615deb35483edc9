"""A worker: answers requests over HTTP and gRPC with the model that the server tells it to map. `python -m
trainers.inference_server.worker SETTINGS LISTENING CONTROL`, the last two are descriptors.

Over the control socket come JSON lines: the versions to serve. From the first one on, connections are
accepted; back go the sequence of each version that is served, and the number of its values. When the server
is gone the worker ends at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from trainers.errors import FleetError
from trainers.inference_server.batching import Batcher, BusyError
from trainers.inference_server.metrics import Metrics
from trainers.inference_server.model import ModelVersion, ServedModel
from trainers.inference_server.protocol import (
    InferAnswer,
    InferRequest,
    RefusedError,
    RequestError,
    decode_request,
    encode_answer,
)
from trainers.inference_server.settings import ServeSettings
from trainers.process.log import glog

if TYPE_CHECKING:
    import grpc.aio

JSON_SIZE = "Inference-Header-Content-Length"
LAST_S = 1.0
"""Connections that were accepted already have so long to send a request; after its answer they are closed."""


class Handlers:
    """The protocol's paths. Without a model, they say that the server is live and not ready. `closing`: no
    connection has another request, and this process is not ready.
    """

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._model: ServedModel | None = None
        self._batcher: Batcher | None = None
        self.closing = False

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

    @property
    def ready(self) -> bool:
        return self._model is not None and not self.closing

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"ready": self.ready}, status=200 if self.ready else 503)

    async def _model_ready(self, request: web.Request) -> web.Response:
        self.served(*_place(request))
        return await self._ready(request)

    async def _server_metadata(self, request: web.Request) -> web.Response:
        about = {"name": "fleetrun", "version": self._settings.fleetrun}
        return web.json_response({**about, "extensions": ["binary_tensor_data"]})

    async def _metadata(self, request: web.Request) -> web.Response:
        name, version = _place(request)
        return web.json_response(self.served(name, version).described(name))

    async def _infer(self, request: web.Request) -> web.Response:
        name, version = _place(request)
        answer = await self.infer(name, version, request.read, request.headers.get(JSON_SIZE))
        pieces, json_size = encode_answer(name, answer)
        headers: dict[str, str] = {"Content-Type": "application/json"}
        if json_size is not None:
            headers = {"Content-Type": "application/octet-stream", JSON_SIZE: str(json_size)}
        return web.Response(body=b"".join(pieces), headers=headers)

    async def infer(
        self, name: str, version: str | None, read: Callable[[], Awaitable[bytes]], json_size: str | None
    ) -> InferAnswer:
        """`read`: the body. Raises RefusedError."""
        started = time.perf_counter()
        model = self.served(name, version)
        try:
            answer = await self._computed(model, read, json_size)
        except BusyError:
            raise RefusedError(
                503, f"{self._settings.max_waiting} requests are waiting already (--max_waiting): try again"
            ) from None
        except RequestError as error:
            raise RefusedError(400, str(error)) from None
        except web.RequestPayloadError as error:
            raise RefusedError(400, f"the body cannot be read: {_first_line(error)}") from None
        except (RefusedError, web.HTTPException, ConnectionError):
            raise
        except IndexError as error:  # an id that the program has no row for
            raise RefusedError(400, f"inputs: {_first_line(error)}") from None
        except Exception as error:  # noqa: BLE001  (a program may raise anything)
            glog(f"a request failed: {error}")
            raise RefusedError(500, f"the program failed: {_first_line(error)}") from None
        if version not in (None, answer.version):
            raise RefusedError(404, f"version {version!r} is not served any more")
        self._metrics.answered(_rows(answer.request), time.perf_counter() - started)
        return answer

    async def _computed(
        self, model: ServedModel, read: Callable[[], Awaitable[bytes]], json_size: str | None
    ) -> InferAnswer:
        limit, arrived = f"{self._settings.timeout_s:g} s (--timeout)", False
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                body = await read()
                arrived = True
                asked = self._decoded(model, body, json_size)
                assert self._batcher is not None
                version, outputs = await self._batcher.submit(asked.inputs)
                return InferAnswer(asked, version.version, outputs)
        except TimeoutError:
            if not arrived:
                raise RefusedError(
                    408, f"the request has not arrived within {limit}: send it again"
                ) from None
            raise RefusedError(
                504, f"no answer within {limit}: try again later, or with fewer rows"
            ) from None

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

    def served(self, name: str, version: str | None) -> ServedModel:
        """Raises RefusedError unless this model is served, in this version."""
        if name != self._settings.name:
            raise RefusedError(404, f"there is no model {name!r}; the model is {self._settings.name!r}")
        if self._model is None:
            raise RefusedError(503, "the model is being loaded: try again")
        served = self._model.version.version
        if version not in (None, served):
            raise RefusedError(404, f"version {version!r} is not served; the version is {served!r}")
        return self._model


def _place(request: web.Request) -> tuple[str, str | None]:
    """The model of the path, and its version if it has one."""
    return request.match_info["model"], request.match_info.get("version")


def _rows(asked: InferRequest) -> int:
    return asked.inputs[0].shape[0] if asked.inputs[0].dim() else 1


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _said(request: web.Request, error: web.HTTPException) -> str:
    """What is wrong and what to do, also for errors of the library."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        methods = " or ".join(sorted(error.allowed_methods))
        return f"{error.method} is not a method of {request.path}: use {methods}"
    if request.match_info.http_exception is error:
        return (
            f"there is no path {request.path}: requests go to /v2/models/NAME/infer; GET /v2 names the server"
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return f"{error.text}: send fewer rows, or start the server with a larger --max_body"
    return error.text or error.reason


def _completed(handlers: Handlers, metrics: Metrics) -> Any:
    """Errors as the protocol has them."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except RefusedError as error:
            response = web.json_response({"error": str(error)}, status=error.status)
        except web.HTTPException as error:
            response = web.json_response({"error": _said(request, error)}, status=error.status)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = error.headers["Allow"]
        metrics.request(request.path.rpartition("/")[2], response.status)
        if handlers.closing:
            response.force_close()
        return response

    return answer


async def runner_of(
    settings: ServeSettings, handlers: Handlers, metrics: Metrics, grace_s: float
) -> web.AppRunner:
    """What answers at its sites. `grace_s`: how long `cleanup` waits for answers that have begun."""
    app = web.Application(client_max_size=settings.max_body, middlewares=[_completed(handlers, metrics)])
    app.add_routes(handlers.routes())
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=grace_s,
        handle_signals=False,
        keepalive_timeout=settings.keepalive_s,
    )
    await runner.setup()
    return runner


class _Site:
    """The ports: of HTTP, and of gRPC if there is one."""

    def __init__(
        self, settings: ServeSettings, handlers: Handlers, metrics: Metrics, http: web.SockSite
    ) -> None:
        self._settings, self._handlers, self._metrics, self._http = settings, handlers, metrics, http
        self._grpc: grpc.aio.Server | None = None
        self._open = False

    async def start(self) -> None:
        """Once."""
        if self._open:
            return
        self._open = True
        if self._settings.grpc_port is not None:
            from trainers.inference_server import rpc  # late: its extra may not be there

            self._grpc = await rpc.start(self._settings, self._handlers, self._metrics.request)
        await self._http.start()

    async def stop(self) -> None:
        """Requests that have begun are answered."""
        if self._open:
            await self._http.stop()
            last = asyncio.create_task(asyncio.sleep(LAST_S))
            if self._grpc is not None:
                await self._grpc.stop(self._settings.grace_s)
            await last


async def work(settings: ServeSettings, listening: socket.socket, control: socket.socket) -> None:
    """Until SIGTERM; requests that have begun are answered."""
    metrics = Metrics(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    handlers = Handlers(settings, metrics)
    runner = await runner_of(settings, handlers, metrics, settings.grace_s)
    site = _Site(settings, handlers, metrics, web.SockSite(runner, listening))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C reaches the server too, which says stop
    lines, answers = await asyncio.open_connection(sock=control, limit=1 << 26)
    versions: asyncio.Queue[ModelVersion] = asyncio.Queue()
    hearing = asyncio.create_task(_hear(lines, versions))
    told = asyncio.create_task(_follow(versions, answers, handlers, site, stop))
    await stop.wait()
    handlers.closing = True
    await site.stop()
    await runner.cleanup()
    handlers.close()
    told.cancel()
    hearing.cancel()
    with suppress(asyncio.CancelledError):
        await told


async def _hear(lines: asyncio.StreamReader, versions: asyncio.Queue[ModelVersion]) -> None:
    with suppress(OSError):
        while (line := await lines.readline()).endswith(b"\n"):  # else it was killed in the middle of one
            versions.put_nowait(ModelVersion.decode(line))
    os._exit(1)  # the server is gone: neither the model nor a request in the middle is waited for


async def _follow(
    versions: asyncio.Queue[ModelVersion],
    answers: asyncio.StreamWriter,
    handlers: Handlers,
    site: _Site,
    stop: asyncio.Event,
) -> None:
    """Serve what the server says. Raises LoadError, OSError."""
    try:
        while True:
            version = await versions.get()
            await handlers.serve(version)
            await site.start()
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
    os._exit(0)  # nothing is left to do, and to take torch apart takes a second


if __name__ == "__main__":
    main(*sys.argv[1:])
