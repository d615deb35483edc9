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
    """The ports: of HTTP, and of gRPC if there is one."""

    def __init__(self, answers: Answers, runner: web.AppRunner, listening: socket.socket) -> None:
        self._answers, self._runner = answers, runner
        self._http = web.SockSite(runner, listening)
        self._grpc: grpc.aio.Server | None = None
        self._open = False

    async def start(self) -> None:
        """Once."""
        if self._open:
            return
        self._open = True
        if self._answers.settings.grpc_port is not None:
            from trainers.inference_server import over_grpc  # late: its extra may not be there

            self._grpc = await over_grpc.start(self._answers)
        await self._http.start()

    async def stop(self) -> None:
        """Requests that have begun are answered."""
        if self._open:
            await self._http.stop()
            last = asyncio.create_task(last_requests(self._runner))
            if self._grpc is not None:
                await self._grpc.stop(self._answers.settings.grace_s)
            await last


async def work(settings: ServeSettings, listening: socket.socket, control: socket.socket) -> None:
    """Until SIGTERM; requests that have begun are answered."""
    answers = Answers(settings, Metrics(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
    runner = await runner_of(answers, settings.grace_s)
    site = _Site(answers, runner, listening)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # Ctrl-C reaches the server too, which says stop
    lines, writer = await asyncio.open_connection(sock=control, limit=1 << 26)
    versions: asyncio.Queue[ModelVersion] = asyncio.Queue()
    receiving = asyncio.create_task(_receive(lines, versions))
    told = asyncio.create_task(_follow(versions, writer, answers, site, stop))
    await stop.wait()
    answers.closing = True
    await site.stop()
    await runner.cleanup()
    answers.close()
    told.cancel()
    receiving.cancel()
    with suppress(asyncio.CancelledError):
        await told


async def _receive(lines: asyncio.StreamReader, versions: asyncio.Queue[ModelVersion]) -> None:
    with suppress(OSError):
        while (line := await lines.readline()).endswith(b"\n"):  # else it was killed in the middle of one
            versions.put_nowait(ModelVersion.decode(line))
    os._exit(1)  # the server is gone: neither the model nor a request in the middle is waited for


async def _follow(
    versions: asyncio.Queue[ModelVersion],
    writer: asyncio.StreamWriter,
    answers: Answers,
    site: _Site,
    stop: asyncio.Event,
) -> None:
    """Serve what the server says. Raises LoadError, OSError."""
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
        glog(f"the worker ends: {error}")
        sys.exit(1)
    os._exit(0)  # nothing is left to do, and to take torch apart takes a second


if __name__ == "__main__":
    main(*sys.argv[1:])
