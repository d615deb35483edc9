"""`fleetrun serve`: holds the port, reads the bundle into files that workers map, keeps so many workers
running and tells them which version to serve. It answers no request itself.

SIGTERM and SIGINT stop it when requests that have begun are answered; SIGHUP reads the bundle again, and new
workers take the place of the old ones without a request lost. When it is killed, its workers end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from prometheus_client import multiprocess

from trainers.errors import FleetError
from trainers.inference import KIND
from trainers.inference_server.files import Cache, CacheFile, tensor_of
from trainers.inference_server.model import ModelVersion
from trainers.inference_server.settings import ServeSettings
from trainers.process.log import glog
from trainers.serving.bundle import read_bundle
from trainers.serving.program import pickled
from trainers.storage.errors import LoadError

_RETRY_S = 1.0
"""Between two starts of a worker that ends."""


class ServeError(FleetError):
    """It cannot serve."""


@dataclass(eq=False, slots=True)
class _Worker:
    """One that runs. `sequence`: of the version that it serves, 0 before the first."""

    process: asyncio.subprocess.Process
    commands: asyncio.StreamWriter
    answers: asyncio.StreamReader
    sequence: int = 0
    leaving: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def serve(self, version: ModelVersion) -> None:
        self.commands.write(version.encode())

    def leave(self) -> None:
        """Answer what has begun, and end."""
        self.leaving = True
        with suppress(ProcessLookupError):
            self.process.terminate()

    async def ready(self, sequence: int) -> bool:
        """Wait until it serves this version; False when it has ended instead."""
        while self.sequence < sequence and self.process.returncode is None:
            self.changed.clear()
            await self.changed.wait()
        return self.sequence >= sequence


class Server:
    """From `run` to a signal."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._cache = Cache(settings.cache)
        self._metrics = self._cache.path / "metrics"
        self._metrics.mkdir()
        self._listening = _listening(settings.host, settings.port)
        self._sequences = itertools.count(1)
        self._version: ModelVersion | None = None
        self._workers: list[_Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._end = asyncio.Event()
        self._error: FleetError | None = None
        self._reload = asyncio.Event()

    async def run(self) -> None:
        """Raises FleetError when there is nothing to serve, or workers cannot serve it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        try:
            for _ in range(self._settings.workers):
                self._workers.append(await self._start(accept=True))
            self._spawn(self._serve())
            await self._end.wait()
            if self._error is not None:
                raise self._error
        finally:
            await self._stop()

    def close(self) -> None:
        self._cache.close()

    async def _serve(self) -> None:
        try:
            self._version = version = await asyncio.to_thread(self._read_bundle)
        except FleetError as error:
            self._fail(error)
            return
        for worker in self._workers:
            worker.serve(version)
        if not all([await worker.ready(version.sequence) for worker in self._workers]):
            return  # `_watch` says why
        host, port = self._listening.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"{self._settings.name} {version.version} is served at http://{address}:{port}\n")
        sys.stdout.flush()
        while True:
            await self._reload.wait()
            self._reload.clear()
            await self._replace_workers()

    async def _replace_workers(self) -> None:
        """By workers with the bundle that is there now. If that fails, the old ones stay."""
        try:
            version = await asyncio.to_thread(self._read_bundle)
        except FleetError as error:
            glog(f"the bundle is not loaded again: {error}")
            return
        old = self._version
        fresh = [await self._start(accept=False) for _ in range(self._settings.workers)]
        for worker in fresh:
            worker.serve(version)
        if not all([await worker.ready(version.sequence) for worker in fresh]):
            glog(f"workers cannot serve version {version.version}; the former one is still served")
            for worker in fresh:
                worker.leave()
            self._remove(version)
            return
        leaving, self._workers, self._version = self._workers, fresh, version
        for worker in leaving:
            worker.leave()
        for worker in fresh:
            if worker.process.returncode is not None:  # `_watch` did not know yet that it counts
                await self._ended(worker)
        glog(f"version {version.version} is served")
        if old is not None:
            self._remove(old)

    def _read_bundle(self) -> ModelVersion:
        """Raises LoadError, UsageError."""
        sequence = next(self._sequences)
        made: dict[str, CacheFile] = {}

        def memory(part: str, size: int) -> torch.Tensor:
            if part in made:  # the bundle was saved again while it was read
                self._cache.remove(made[part])
            made[part] = self._cache.make(f"{part}-{sequence}.pt2", size)
            return tensor_of(made[part].mapped())

        try:
            bundle = read_bundle(self._settings.bundle, KIND, ("program", "weights"), memory)
            _check_program(bundle.where, bundle.contents["program"])
        except LoadError:
            for file in made.values():
                self._cache.remove(file)
            raise
        return ModelVersion(
            sequence=sequence,
            version=bundle.id,
            time=None,
            program=made["program"],
            weights=made["weights"],
            about=bundle.about,
        )

    def _remove(self, version: ModelVersion) -> None:
        for file in (version.program, version.weights):
            self._cache.remove(file)

    async def _start(self, *, accept: bool) -> _Worker:
        """A worker that accepts connections at once, so that it says that it is not ready, or when it is."""
        ours, theirs = socket.socketpair()
        fds = self._listening.fileno(), theirs.fileno()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._settings.threads))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "trainers.inference_server.worker"),
                *(self._settings.encode(), *map(str, fds)),
                pass_fds=fds,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **threads, "PROMETHEUS_MULTIPROC_DIR": str(self._metrics)},
                start_new_session=True,  # Ctrl-C is for the server, which stops its workers
            )
        finally:
            theirs.close()
        answers, commands = await asyncio.open_connection(sock=ours)
        commands.write(b"true\n" if accept else b"false\n")
        worker = _Worker(process, commands, answers)
        self._spawn(self._watch(worker))
        return worker

    async def _watch(self, worker: _Worker) -> None:
        """Until it has ended."""
        with suppress(OSError):
            while line := await worker.answers.readline():
                worker.sequence = int(line)
                worker.changed.set()
        await worker.process.wait()
        worker.changed.set()
        worker.commands.close()
        multiprocess.mark_process_dead(worker.process.pid, str(self._metrics))  # type: ignore[no-untyped-call]
        await self._ended(worker)

    async def _ended(self, worker: _Worker) -> None:
        """Another one takes its place."""
        if worker.leaving or self._end.is_set() or worker not in self._workers:
            return
        code = worker.process.returncode
        if not any(other.sequence for other in self._workers):
            self._fail(ServeError(f"a worker has ended with exit code {code} before it could serve"))
            return
        glog(f"worker {worker.process.pid} has ended with exit code {code}; another one is started")
        if not worker.sequence:
            await asyncio.sleep(_RETRY_S)
        place = self._workers.index(worker)
        others = any(other.sequence and other.process.returncode is None for other in self._workers)
        self._workers[place] = other = await self._start(accept=not others)
        if self._version is not None:
            other.serve(self._version)
            if await other.ready(self._version.sequence):
                glog(f"worker {other.process.pid} serves version {self._version.version}")

    def _fail(self, error: FleetError) -> None:
        self._error = error
        self._end.set()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        """SIGTERM, the grace period, SIGKILL."""
        self._end.set()
        self._listening.close()  # else connections would wait here for nobody
        for worker in self._workers:
            worker.leave()
        running = [asyncio.create_task(worker.process.wait()) for worker in self._workers]
        if running:
            await asyncio.wait(running, timeout=self._settings.grace_s + 5)
        for worker in self._workers:
            if worker.process.returncode is None:
                worker.process.kill()
                await worker.process.wait()
        for task in list(self._tasks):
            task.cancel()


def _listening(host: str, port: int) -> socket.socket:
    """Raises ServeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as error:
        raise ServeError(f"{host}:{port} cannot be served at: {error.strerror or error}") from error
    return listening


def _check_program(where: str, program: torch.Tensor) -> None:
    try:
        suspects: Sequence[str] = pickled(program.numpy().tobytes())
    except ValueError as error:
        raise LoadError(f"{where} cannot be used: {error}") from error
    if suspects:
        raise LoadError(f"the program in {where} has pickled parts: {', '.join(suspects[:3])}")


async def serve(settings: ServeSettings) -> None:
    server = Server(settings)
    try:
        await server.run()
    finally:
        server.close()
