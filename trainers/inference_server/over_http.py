"""Serve the Open Inference Protocol over HTTP, and the metrics for Prometheus."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakSet

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trainers.inference_server.answers import Answers, first_line
from trainers.inference_server.protocol import RefusedError, encode_answer
from trainers.process.log import glog

JSON_SIZE = "Inference-Header-Content-Length"
LAST_S = 1.0
"""Seconds after a stop in which an accepted connection may send another request.

The connection is closed after its answer.
"""
FIRST_S = 5.0
"""The same for a connection without a request so far, because its client does not expect a closed
connection.
"""
_POLL_S = 0.05
_ASKED: web.AppKey[WeakSet[asyncio.BaseTransport]] = web.AppKey("asked", WeakSet)
"""The connections that have sent a request."""


class _Routes:
    """The protocol's paths. Without a model, they report that the server is live and not ready."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def all(self) -> list[web.RouteDef]:
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
        return web.json_response({"ready": self._answers.ready}, status=200 if self._answers.ready else 503)

    async def _model_ready(self, request: web.Request) -> web.Response:
        self._answers.served(*_place(request))
        return await self._ready(request)

    async def _server_metadata(self, request: web.Request) -> web.Response:
        about = {"name": "fleetrun", "version": self._answers.settings.fleetrun}
        return web.json_response({**about, "extensions": ["binary_tensor_data"]})

    async def _metadata(self, request: web.Request) -> web.Response:
        name, version = _place(request)
        return web.json_response(self._answers.served(name, version).described(name))

    async def _infer(self, request: web.Request) -> web.Response:
        name, version = _place(request)

        if encoding := request.headers.get("Content-Encoding"):
            raise RefusedError(
                415, f"Content-Encoding {encoding!r} is not supported; send the body without it"
            )

        async def body() -> AsyncIterator[bytes]:
            try:
                async for piece in request.content.iter_any():
                    yield piece
            except web.RequestPayloadError as error:
                raise RefusedError(400, f"the body cannot be read: {first_line(error)}") from None

        answer = await self._answers.infer(name, version, body(), request.headers.get(JSON_SIZE))
        size = sum(tensor.numel() for tensor in answer.outputs.values())
        pieces, json_size = await self._answers.aside(size, lambda: encode_answer(name, answer))
        headers = {"Content-Type": "application/json"}
        if json_size is not None:
            headers = {"Content-Type": "application/octet-stream", JSON_SIZE: str(json_size)}
        return web.Response(body=b"".join(pieces), headers=headers)

    async def _scraped(self, request: web.Request) -> web.Response:
        text, kind = await asyncio.to_thread(self._answers.metrics.text)
        return web.Response(body=text, headers={"Content-Type": kind})


def _place(request: web.Request) -> tuple[str, str | None]:
    """Return the model in the path, and its version if the path has one."""
    return request.match_info["model"], request.match_info.get("version")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _error_text(request: web.Request, error: web.HTTPException) -> str:
    """Return the error and its remedy, even for errors of the library."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        methods = " or ".join(sorted(error.allowed_methods))
        return f"{error.method} is not a method of {request.path}; use {methods}"
    if request.match_info.http_exception is error:
        return f"path {request.path} does not exist; send requests to /v2/models/NAME/infer"
    return error.text or error.reason


def _completed(answers: Answers) -> Any:
    """Return a middleware that answers errors in the protocol's form."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport is not None:  # otherwise its client has left
            request.app[_ASKED].add(request.transport)
        try:
            response = await handler(request)
        except RefusedError as error:
            response = web.json_response({"error": str(error)}, status=error.status)
        except web.HTTPException as error:
            response = web.json_response({"error": _error_text(request, error)}, status=error.status)
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = error.headers["Allow"]
        answers.metrics.request(request.path.rpartition("/")[2], response.status)
        if answers.closing:
            response.force_close()
        return response

    return answer


def _one_line(record: logging.LogRecord) -> bool:
    """Report errors of clients in one line. Errors of this server keep their traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (HttpProcessingError, web.RequestPayloadError, ConnectionError)):
        return True
    glog(f"{record.getMessage()}: {' '.join(str(error).split())[:200]}")
    return False


async def runner_of(answers: Answers, grace_s: float) -> web.AppRunner:
    """Return the runner of the HTTP server. `grace_s` limits how long `cleanup` waits for started answers."""
    app = web.Application(middlewares=[_completed(answers)])
    app[_ASKED] = WeakSet()
    logging.getLogger("aiohttp.server").addFilter(_one_line)
    app.add_routes(_Routes(answers).all())
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,  # a few compressed kilobytes may expand beyond --max_body
        shutdown_timeout=grace_s,
        handle_signals=False,
        keepalive_timeout=answers.settings.keepalive_s,
    )
    await runner.setup()
    return runner


async def last_requests(runner: web.AppRunner) -> None:
    """Wait for last requests, after the server stopped accepting connections."""
    assert runner.server is not None
    until = time.monotonic() + FIRST_S
    await asyncio.sleep(LAST_S)
    asked = runner.app[_ASKED]
    while time.monotonic() < until and any(each.transport not in asked for each in runner.server.connections):
        await asyncio.sleep(_POLL_S)
