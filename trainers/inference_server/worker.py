"""Run a worker, which answers requests over HTTP and gRPC with the model that the server assigns.

Start it with `python -m trainers.inference_server.worker SETTINGS LISTENING CONTROL`. The last two are
descriptors. The control socket carries JSON lines with the versions to serve. The worker accepts connections
from the first version on. It answers with the sequence of each served version and the number of its values.
When the server ends, the worker ends immediately.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web

from trainers.errors import FleetError
from trainers.inference_server.answers import Answers
from trainers.inference_server.metrics import Metrics
from trainers.inference_server.model import ModelVersion
from trainers.inference_server.over_http import last_requests, runner_of
from trainers.inference_server.settings import ServeSettings
from trainers.process.log import glog

if TYPE_CHECKING:
    import grpc.aio


class _Site:
    """The ports of HTTP and, if enabled, of gRPC."""

    def __init__(self, answers: Answers, runner: web.AppRunner, listening: socket.socket) -> None:
        self._answers, self._runner = answers, runner
        self._http = web.SockSite(runner, listening)
        self._grpc: grpc.aio.Server | None = None
        self._open = False

    async def start(self) -> None:
        """Start listening, once."""
        if self._open:
            return
        self._open = True
        if self._answers.settings.grpc_port is not None:
            from trainers.inference_server import over_grpc  # late, because its extra may be missing

            self._grpc = await over_grpc.start(self._answers)
        await self._http.start()

    async def stop(self) -> None:
        """Stop listening, and answer started requests."""
        if self._open:
            await self._http.stop()
            last = asyncio.create_task(last_requests(self._runner))
            if self._grpc is not None:
                await self._grpc.stop(self._answers.settings.grace_s)
            await last


async def work(settings: ServeSettings, listening: socket.socket, control: socket.socket) -> None:
    """Work until SIGTERM, and then answer started requests."""
    answers = Answers(settings, Metrics(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
    runner = await runner_of(answers, settings.grace_s)
    site = _Site(answers, runner, listening)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    # Ctrl-C also reaches the server, which then stops the workers
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    lines, writer = await asyncio.open_connection(sock=control, limit=1 << 26)
    versions: asyncio.Queue[ModelVersion] = asyncio.Queue()
    receiving = asyncio.create_task(_receive(lines, versions))
    follower = asyncio.create_task(_follow(versions, writer, answers, site, stop))
    await stop.wait()
    answers.closing = True
    await site.stop()
    await runner.cleanup()
    answers.close()
    follower.cancel()
    receiving.cancel()
    with suppress(asyncio.CancelledError):
        await follower


async def _receive(lines: asyncio.StreamReader, versions: asyncio.Queue[ModelVersion]) -> None:
    with suppress(OSError):
        # otherwise the server was killed in the middle of a line
        while (line := await lines.readline()).endswith(b"\n"):
            versions.put_nowait(ModelVersion.decode(line))
    os._exit(1)  # the server has ended, so the worker drops the model and running requests


async def _follow(
    versions: asyncio.Queue[ModelVersion],
    writer: asyncio.StreamWriter,
    answers: Answers,
    site: _Site,
    stop: asyncio.Event,
) -> None:
    """Serve the versions from the server. Raises LoadError and OSError."""
    try:
        while True:
            version = await versions.get()
            await answers.serve(version)
            await site.start()
            number = 0 if version.values is None else version.values.number
            writer.write(f"{version.sequence} {number}\n".encode())
    finally:
        stop.set()


def main(settings: str, listening: str, control: str) -> None:
    sockets = (socket.socket(fileno=int(each)) for each in (listening, control))
    try:
        asyncio.run(work(ServeSettings.decode(settings), *sockets))
    except (FleetError, OSError) as error:
        glog(f"the worker stops: {error}")
        sys.exit(1)
    os._exit(0)  # all work is done, and tearing down torch takes a second


if __name__ == "__main__":
    main(*sys.argv[1:])
