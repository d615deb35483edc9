"""Run the server process of `fleetrun serve`.

The server holds the port, reads the exported model into files that workers map, keeps the workers running,
and sends them the versions to serve. While workers cannot answer, the server itself answers "not ready".

SIGTERM and SIGINT stop it after started requests are answered. SIGHUP reads the model again, and new workers
replace the old ones without losing a request. If the server is killed, its workers end.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from aiohttp import web
from prometheus_client import multiprocess

from fleetrun.aliases import Fields
from fleetrun.frozen import frozen
from trainers.errors import FleetError
from trainers.inference import KIND, checked_program
from trainers.inference_server.answers import Answers
from trainers.inference_server.files import Cache, CacheFile
from trainers.inference_server.follow import Followed, Follower
from trainers.inference_server.metrics import Metrics
from trainers.inference_server.model import ModelVersion, check_values
from trainers.inference_server.over_http import LAST_S, last_requests, runner_of
from trainers.inference_server.settings import ServeSettings
from trainers.process.log import glog
from trainers.serving.bundle import read_bundle
from trainers.storage.errors import LoadError

_RETRY_S = 1.0
_LONGEST_S = 30.0
"""Pauses before replacing a worker that ended before it could serve.

The first pause doubles with each failure, up to the longest.
"""


class ServeError(FleetError):
    """The server cannot serve."""


@frozen(eq=False)
class _Bundle:
    """An exported model in the cache."""

    id: str
    program: CacheFile
    weights: CacheFile
    about: Fields


@dataclass(eq=False, slots=True)
class _Worker:
    """A running worker.

    `failed` counts consecutive workers before it, in its place, that ended before they could serve.
    `sequence` is the version that it serves, 0 before the first. `reads` is the smallest number of followed
    values that it may be reading, or None while it reads none.
    """

    process: asyncio.subprocess.Process
    commands: asyncio.StreamWriter
    answers: asyncio.StreamReader
    failed: int = 0
    bundle: _Bundle | None = None
    sequence: int = 0
    reads: int | None = None
    leaving: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def serve(self, version: ModelVersion) -> None:
        if self.reads is None and version.values is not None:
            self.reads = version.values.number
        self.commands.write(version.encode())

    @property
    def serving(self) -> bool:
        return self.sequence > 0 and not self.leaving and self.process.returncode is None

    def served(self, sequence: int, number: int) -> None:
        """Record that the worker serves this version, with these followed values."""
        self.sequence, self.reads = sequence, number or None
        self.changed.set()

    def leave(self) -> None:
        """Let the worker answer started requests, and end."""
        self.leaving = True
        with suppress(ProcessLookupError):
            self.process.terminate()

    async def ready(self, sequence: int) -> bool:
        """Wait until the worker serves this version. Return False if it ended instead."""
        while self.sequence < sequence and self.process.returncode is None:
            self.changed.clear()
            await self.changed.wait()
        return self.sequence >= sequence


class Server:
    """The server, from `run` to a signal."""

    def __init__(self, settings: ServeSettings) -> None:
        self._listening = _bound("--port", settings.host, settings.port)
        self._listening.listen(1024)
        self._grpc: socket.socket | None = None
        if settings.grpc_port is not None:
            self._grpc = _shared("--grpc_port", settings.host, settings.grpc_port)
            settings = replace(settings, grpc_port=self._grpc.getsockname()[1])
        self._settings = settings
        self._cache = Cache(settings.cache)
        self._metrics = self._cache.path / "metrics"
        self._metrics.mkdir()
        self._follower = Follower(settings.follow, self._cache) if settings.follow else None
        self._sequences = itertools.count(1)
        self._bundles = itertools.count(1)
        self._bundle: _Bundle | None = None
        self._values: Followed | None = None
        self._workers: list[_Worker] = []  # workers that take requests, or will
        self._running: set[_Worker] = set()  # including leaving workers
        self._tasks: set[asyncio.Task[None]] = set()
        self._not_ready: web.AppRunner | None = None
        self._answering = asyncio.Lock()
        self._served = asyncio.Event()  # by any worker so far
        self._end = asyncio.Event()
        self._error: FleetError | None = None
        self._reload = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal. Raises FleetError if the model is missing, or if workers cannot serve it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)
        try:
            await self._answer()
            self._workers += [await self._start() for _ in range(self._settings.workers)]
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
            bundle = await asyncio.to_thread(self._read_bundle)
            if self._follower is not None:
                self._values = await self._first_values(self._follower)
            await self._check(bundle)
        except FleetError as error:
            self._fail(error)
            return
        self._bundle = bundle
        version = self._announce(bundle, self._workers)
        for worker in list(self._workers):
            await worker.ready(version.sequence)
        await self._served.wait()  # `_ended` handles workers that have ended
        places = [f"http://{_address(self._listening)}"]
        places += [] if self._grpc is None else [f"grpc://{_address(self._grpc)}"]
        sys.stdout.write(f"{self._settings.name} {version.version} is served at {' and '.join(places)}\n")
        sys.stdout.flush()
        if self._follower is not None:
            self._spawn(self._follow(self._follower, bundle))
        while True:
            await self._reload.wait()
            self._reload.clear()
            await self._replace_workers(bundle)

    async def _first_values(self, follower: Follower) -> Followed:
        """Wait for the first values, because the job may not have published yet."""
        last_error = ""
        while True:
            try:
                values = await asyncio.to_thread(follower.look, 0)
            except (LoadError, OSError) as error:
                if str(error) != last_error:
                    last_error = str(error)
                    glog(f"waiting for a first version: {error}")
            else:
                assert values is not None
                return values
            await asyncio.sleep(self._settings.poll_s)

    async def _follow(self, follower: Follower, bundle: _Bundle) -> None:
        """Serve each version that appears. Unreadable versions are tried again while the last one is
        served.
        """
        last_error = ""
        while True:
            await asyncio.sleep(max(self._settings.poll_s, _RETRY_S) if last_error else self._settings.poll_s)
            reads = [worker.reads for worker in self._running if worker.reads is not None]
            try:
                values = await asyncio.to_thread(follower.look, min(reads, default=0))
                if values is not None:
                    await self._check(self._bundle or bundle, values)
            except (FleetError, OSError) as error:
                if str(error) != last_error:
                    last_error = str(error)
                    glog(f"The former version is still served: {error}")
                continue
            last_error = ""
            if values is None:
                continue
            self._values = values
            for worker in self._running:
                if worker.bundle is not None and not worker.leaving:
                    self._announce(worker.bundle, [worker])

    async def _replace_workers(self, former: _Bundle) -> None:
        """Replace the workers by workers with the current model. On failure, the old workers stay."""
        former = self._bundle or former
        bundle = None
        try:
            bundle = await asyncio.to_thread(self._read_bundle)
            await self._check(bundle)
        except (FleetError, OSError) as error:
            glog(f"Could not load the bundle again: {error}. The former bundle is still served.")
            self._remove(bundle)
            return
        fresh = [await self._start() for _ in range(self._settings.workers)]
        version = self._announce(bundle, fresh)
        if not all([await worker.ready(version.sequence) for worker in fresh]):
            if self._end.is_set():
                return
            glog(f"Workers cannot serve the bundle {bundle.id}. The former bundle is still served.")
            for worker in fresh:
                worker.leave()
            self._remove(bundle)
            return
        self._bundle = bundle
        leaving, self._workers = self._workers, fresh
        for worker in leaving:
            worker.leave()
        for worker in fresh:
            if worker.process.returncode is not None:  # `_watch` ran before this worker counted
                await self._ended(worker)
        glog(f"serving the bundle {bundle.id}")
        self._remove(former)

    def _read_bundle(self) -> _Bundle:
        """Read the model into the cache. Raises LoadError and UsageError."""
        number = next(self._bundles)
        made: dict[str, CacheFile] = {}

        def memory(part: str, size: int) -> torch.Tensor:
            if part in made:  # the model was saved again while it was read
                self._cache.remove(made[part])
            made[part] = self._cache.make(f"{part}-{number}.pt2", size)
            return torch.from_numpy(made[part].mapped())

        try:
            found = read_bundle(self._settings.bundle, KIND, ("program", "weights"), memory)
            checked_program(found)
            if found.about.get("tables") and self._follower is None:
                raise LoadError(
                    f"{found.where} was saved without rows of its tables (rows=False). Pass --follow with "
                    "the directory to which the job publishes the rows."
                )
        except LoadError:
            for file in made.values():
                self._cache.remove(file)
            raise
        return _Bundle(found.id, made["program"], made["weights"], found.about)

    async def _check(self, bundle: _Bundle, values: Followed | None = None) -> None:
        """Raise LoadError unless the values, by default the served ones, fit the model."""
        await asyncio.to_thread(check_values, self._version(bundle, values), self._settings.follow)

    def _remove(self, bundle: _Bundle | None) -> None:
        if bundle is not None:
            self._cache.remove(bundle.program)
            self._cache.remove(bundle.weights)

    def _version(self, bundle: _Bundle, values: Followed | None = None, *, sequence: int = 0) -> ModelVersion:
        values = values or self._values
        return ModelVersion(
            sequence=sequence,
            version=bundle.id if values is None else values.version,
            program=bundle.program,
            weights=bundle.weights,
            about=bundle.about,
            values=values,
        )

    def _announce(self, bundle: _Bundle, workers: Iterable[_Worker]) -> ModelVersion:
        """Send these workers a version with this model and the current values."""
        version = self._version(bundle, sequence=next(self._sequences))
        for worker in workers:
            worker.bundle = bundle
            worker.serve(version)
        return version

    async def _answer(self) -> None:
        """Answer "not ready" unless a worker accepts connections, and else leave the answers to workers."""
        async with self._answering:
            serving = any(worker.serving for worker in self._running)
            if self._not_ready is not None and (serving or self._end.is_set()):
                leaving, self._not_ready = self._not_ready, None
                for site in list(leaving.sites):
                    await site.stop()
                self._spawn(_closed(leaving))
            elif self._not_ready is None and not (serving or self._end.is_set()):
                answers = Answers(self._settings, Metrics(str(self._metrics)))
                answers.closing = True
                self._not_ready = await runner_of(answers, LAST_S)
                await web.SockSite(self._not_ready, self._listening.dup()).start()

    async def _start(self, failed: int = 0) -> _Worker:
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
        worker = _Worker(process, commands, answers, failed)
        self._running.add(worker)
        self._spawn(self._watch(worker))
        return worker

    async def _watch(self, worker: _Worker) -> None:
        """Watch a worker until it has ended."""
        with suppress(OSError):
            while line := await worker.answers.readline():
                worker.served(*map(int, line.split()))
                self._served.set()
                await self._answer()
        await worker.process.wait()
        self._running.discard(worker)
        await self._answer()
        worker.changed.set()
        worker.commands.close()
        multiprocess.mark_process_dead(worker.process.pid, str(self._metrics))  # type: ignore[no-untyped-call]
        await self._ended(worker)

    async def _ended(self, worker: _Worker) -> None:
        """Replace a worker that has ended."""
        if worker.leaving or self._end.is_set() or worker not in self._workers:
            return
        code = worker.process.returncode
        if not self._served.is_set():
            self._fail(ServeError(f"A worker exited with code {code} before it could serve"))
            return
        failed = 0 if worker.sequence else worker.failed + 1
        pause = min(_LONGEST_S, _RETRY_S * 2 ** min(failed - 1, 10)) if failed else 0.0
        when = f" in {pause:g} s" if pause else ""
        glog(f"Worker {worker.process.pid} exited with code {code}. A new worker starts{when}.")
        await asyncio.sleep(pause)
        if self._end.is_set() or worker not in self._workers:
            return  # the server stops, or other workers were started for another model
        self._workers[self._workers.index(worker)] = other = await self._start(failed)
        if self._bundle is not None:
            version = self._announce(self._bundle, [other])
            if await other.ready(version.sequence):
                glog(f"worker {other.process.pid} serves version {version.version}")

    def _fail(self, error: FleetError) -> None:
        self._error = error
        self._end.set()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """End the server after an unexpected error, because it would not serve new versions any more."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(ServeError(f"The server cannot continue: {error!r}"))

    async def _stop(self) -> None:
        """Stop workers by SIGTERM, a grace period and SIGKILL."""
        self._end.set()
        await self._answer()
        self._listening.close()  # otherwise connections would wait here without an answer
        if self._grpc is not None:
            self._grpc.close()
        running = list(self._running)
        for worker in running:
            worker.leave()
        waits = [asyncio.create_task(worker.process.wait()) for worker in running]
        if waits:
            await asyncio.wait(waits, timeout=self._settings.grace_s + 5)
        for worker in running:
            if worker.process.returncode is None:
                worker.process.kill()
                await worker.process.wait()
        for task in list(self._tasks):
            task.cancel()


async def _closed(runner: web.AppRunner) -> None:
    await last_requests(runner)
    await runner.cleanup()


def _bound(option: str, host: str, port: int, kind: int = socket.SO_REUSEADDR) -> socket.socket:
    """Return a bound socket. Raises ServeError."""
    try:
        family, stream, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, stream, protocol)
        bound.setsockopt(socket.SOL_SOCKET, kind, 1)
        bound.bind(address)
    except OSError as error:
        raise ServeError(
            f"Cannot serve at {host}:{port} ({option}): {error.strerror or error}. Port 0 takes a free port."
        ) from error
    return bound


def _shared(option: str, host: str, port: int) -> socket.socket:
    """Return a bound socket for workers to share, at a port without another server of this user.

    Raises ServeError.
    """
    _bound(option, host, port).close()  # fails if another server shares it with its workers
    return _bound(option, host, port, socket.SO_REUSEPORT)


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve(settings: ServeSettings) -> None:
    server = Server(settings)
    try:
        await server.run()
    finally:
        server.close()
