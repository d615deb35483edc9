"""Answer requests of every protocol in a worker, with the model, its batches, and the limits."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

from trainers.inference_server.batching import Batcher, BusyError, Value
from trainers.inference_server.metrics import Metrics
from trainers.inference_server.model import ModelVersion, ServedModel
from trainers.inference_server.protocol import (
    InferAnswer,
    InferRequest,
    RefusedError,
    RequestError,
    decode_request,
)
from trainers.inference_server.settings import ServeSettings
from trainers.process.log import glog

_LARGE = 1 << 16
"""Bytes or numbers that take milliseconds to read from JSON or to write."""
_BODIES = 16
"""Limit for the bytes of all waiting bodies in one worker, as a multiple of the largest body."""
_KEPT, _KEPT_BYTES = 16, 1 << 20
"""Requests that are kept for the next version, and the largest one in bytes."""
_REPLAY_S = 1.0


class Answers:
    """The answers of a worker. Without a model, requests are refused.

    `closing` is True if connections refuse further requests. The process is then not ready.
    """

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self._model: ServedModel | None = None
        self._batcher: Batcher | None = None
        self._bytes = 0
        self._kept = Path(metrics.folder)
        self._slow, self._next_slow, self._next_kept = 0, 0.0, 0.0
        self._aside = ThreadPoolExecutor(1, "json")
        self.closing = False

    @property
    def ready(self) -> bool:
        return self._model is not None and not self.closing

    async def serve(self, version: ModelVersion) -> None:
        """Serve this version from the next batch on."""
        if self._batcher is None or self._model is None:
            model = await asyncio.to_thread(ServedModel, version)
            limits = self.settings.max_batch_rows, self.settings.max_waiting
            self._batcher = Batcher(model, *limits, self.metrics.batch)
            await self._batcher.between_batches(model.warm_up)
            gc.freeze()  # a collection would look at all objects of torch, while requests wait
        else:
            model = await self._batcher.between_batches(partial(self._model.successor, version))
        await self._replay(self._batcher, model)
        await self._batcher.change(model)
        self._model = model
        self.metrics.serves(version)

    async def _replay(self, batcher: Batcher, model: ServedModel) -> None:
        """Compute kept requests for about a second, so that the first answers are as fast as later ones."""
        kept, failed, until = list(self._kept.glob("request-*")), [], time.perf_counter() + _REPLAY_S
        for path in kept:
            if time.perf_counter() > until:
                break
            try:
                size, _, body = path.read_bytes().partition(b"\n")
                asked = await self.aside(
                    len(body), partial(self._decoded, model, body, size.decode() or None)
                )
                _, (result,) = await batcher.between_batches(partial(model.compute, [asked.inputs]))
                if isinstance(result, BaseException):
                    raise result
            except Exception as error:  # noqa: BLE001  (a program may raise anything)
                failed.append(f"{path.name}: {first_line(error)}")
        if failed:
            glog(
                f"{len(failed)} of {len(kept)} kept requests fail with version {model.version.version}, "
                f"which is served now: {failed[0]}"
            )

    def _keep(self, kind: str, body: bytearray, json_size: str | None) -> str:
        """Write a request to the cache, over one that is _KEPT seconds old. Return where it is, in words."""
        if len(body) > _KEPT_BYTES:
            return "too large to be kept"
        path = self._kept / f"{kind}-{int(time.time()) % _KEPT}"
        part = path.with_name(f"part-{os.getpid()}")
        try:
            part.write_bytes(f"{json_size or ''}\n".encode(errors="replace") + body)
            part.replace(path)
        except OSError as error:
            glog(f"a request could not be kept: {error}")
            return "not kept"
        return f"kept in {path}"

    def _note(self, marks: list[float], body: bytearray, json_size: str | None, *, answered: bool) -> None:
        """Keep one request a second, for the next version. Log a slow one, with the times of its stages."""
        now = time.perf_counter()
        slow = now - marks[0] >= self.settings.slow_s
        self._slow += slow
        if slow and now >= self._next_slow:
            stages = zip(("read", "decode", "wait", "compute"), pairwise([*marks, now]), strict=False)
            times = ", ".join(f"{stage} {end - start:.3f}" for stage, (start, end) in stages)
            kept = self._keep("slow", body, json_size)
            glog(
                f"slow request: {now - marks[0]:.3f} s ({times}), {len(body)} bytes, {kept}; {self._slow} "
                "since the last one logged"
            )
            self._slow, self._next_slow = 0, now + 1
        if answered and now >= self._next_kept:
            self._keep("request", body, json_size)
            self._next_kept = now + 1

    def close(self) -> None:
        self._aside.shutdown(wait=False)
        if self._batcher is not None:
            self._batcher.close()

    def served(self, name: str, version: str | None) -> ServedModel:
        """Return the served model. Raises RefusedError for another model or version, or while the
        model loads.
        """
        if name != self.settings.name:
            raise RefusedError(404, f"model {name!r} does not exist; the model is {self.settings.name!r}")
        if self._model is None:
            raise RefusedError(503, "the model is being loaded; try again")
        served = self._model.version.version
        if version not in (None, served):
            raise RefusedError(404, f"version {version!r} is not served; the version is {served!r}")
        return self._model

    async def infer(
        self, name: str, version: str | None, pieces: AsyncIterable[bytes], json_size: str | None
    ) -> InferAnswer:
        """Compute the answer to a request. Raises RefusedError.

        `pieces` is the body in pieces, as in HTTP. `json_size` works as in `decode_request`.
        """
        marks = [time.perf_counter()]
        model = self.served(name, version)
        body, answer = bytearray(), None
        try:
            answer = await self._computed(model, pieces, body, json_size, marks)
        except BusyError:
            raise RefusedError(
                503, f"{self.settings.max_waiting} requests are already waiting (--max_waiting); try again"
            ) from None
        except (RefusedError, ConnectionError):
            raise
        except IndexError as error:  # an id without a row in the program
            raise RefusedError(400, f"inputs: {first_line(error)}") from None
        except Exception as error:  # noqa: BLE001  (a program may raise anything)
            glog(f"a request failed: {error}")
            raise RefusedError(500, f"the program failed: {first_line(error)}") from None
        finally:
            self._bytes -= len(body)
            self._note(marks, body, json_size, answered=answer is not None)
        if version not in (None, answer.version):
            raise RefusedError(404, f"version {version!r} is no longer served")
        self.metrics.answered(model.program.rows(answer.request.inputs), time.perf_counter() - marks[0])
        return answer

    async def aside(self, size: int, call: Callable[[], Value]) -> Value:
        """Call `call`, in a thread if it has much to do, so that other requests are answered meanwhile."""
        if size < _LARGE:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._aside, call)

    async def _read(self, pieces: AsyncIterable[bytes], body: bytearray) -> None:
        most = self.settings.max_body
        async for piece in pieces:
            body += piece
            self._bytes += len(piece)
            if len(body) > most:
                raise self._too_large("the body has")
            if self._bytes > _BODIES * most:
                raise RefusedError(503, f"requests of {self._bytes} bytes are already waiting; try again")

    def _too_large(self, what: str) -> RefusedError:
        hint = "send fewer rows, or start the server with a larger --max_body"
        return RefusedError(413, f"{what} more than {self.settings.max_body} bytes; {hint}")

    async def _computed(
        self,
        model: ServedModel,
        pieces: AsyncIterable[bytes],
        body: bytearray,
        json_size: str | None,
        marks: list[float],
    ) -> InferAnswer:
        """Compute the answer. Append the end of each stage but the last one to `marks`."""
        limit = f"{self.settings.timeout_s:g} s (--timeout)"
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                await self._read(pieces, body)
                marks.append(time.perf_counter())
                asked = await self.aside(len(body), lambda: self._decoded(model, bytes(body), json_size))
                marks.append(time.perf_counter())
                assert self._batcher is not None
                version, outputs, began = await self._batcher.submit(asked.inputs)
                marks.append(began)
                return InferAnswer(asked, version.version, outputs)
        except TimeoutError:
            if len(marks) == 1:
                raise RefusedError(408, f"the request did not arrive within {limit}; send it again") from None
            raise RefusedError(
                504, f"no answer within {limit}; try again later, or with fewer rows"
            ) from None

    def _decoded(self, model: ServedModel, body: bytes, json_size: str | None) -> InferRequest:
        program = model.program
        # otherwise the numbers of rows of inputs may differ
        most = {"most": self.settings.max_rows} if program.joins else {}
        names = [spec.name for spec in program.outputs]
        asked = decode_request(body, json_size, program.inputs, names, **most)
        rows = program.rows(asked.inputs)
        if not 0 < rows <= self.settings.max_rows:
            raise RequestError(
                f"the request has {rows} rows; a request may have 1 to {self.settings.max_rows}"
            )
        if program.joins:
            for spec, tensor in zip(program.inputs, asked.inputs, strict=True):
                if (other := len(tensor)) not in (1, rows):
                    raise RequestError(
                        f"{spec.name}.shape has {other} rows, but another input has {rows}; send {rows} "
                        "rows, or 1 row for all of them"
                    )
            if sum(rows * each.nbytes for each in asked.inputs if len(each) < rows) > self.settings.max_body:
                raise self._too_large(f"the inputs with 1 row, repeated for {rows} rows, have")
        return asked


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
