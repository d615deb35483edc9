"""Batch requests dynamically. Requests that arrive during a computation are computed together after it.

Requests do not wait for others to arrive. With one request at a time, each request is a batch.

Short batches are computed in the thread of the connections, because handing a small model to another thread
and back costs as much as the model. Longer ones are computed in a separate thread.
"""

from __future__ import annotations

import asyncio
import math
import resource
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from fleetrun.frozen import frozen
from trainers.inference_server.model import ModelVersion, Outputs, Result, ServedModel

Value = TypeVar("Value")

_SHORT_S = 0.005
"""Seconds of a short batch. Other connections wait that long.

They are predicted from the last batch without errors, and from how many rows and numbers both have.
"""


def used_s() -> float:
    """Return the CPU seconds of this thread, with the time of a short batch for each wait for a disk."""
    return time.thread_time() + _SHORT_S * resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class BusyError(Exception):
    """The limit of waiting requests is reached."""


@frozen(eq=False)
class _Waiting:
    inputs: tuple[torch.Tensor, ...]
    rows: int
    result: asyncio.Future[tuple[ModelVersion, Outputs, float]]

    @property
    def kind(self) -> tuple[object, ...]:
        """A value that is equal for requests that can be joined."""
        return tuple((tensor.shape[1:], tensor.shape[:1] == (self.rows,)) for tensor in self.inputs)


class Batcher:
    """Computes one batch after the other.

    `model` computes the next batch. `most_rows` limits a batch of several requests, and `most_waiting`
    limits the waiting requests.
    """

    def __init__(
        self, model: ServedModel, most_rows: int, most_waiting: int, count_rows: Callable[[int], None]
    ) -> None:
        self.model = model
        self._most_rows = most_rows
        self._most_waiting = most_waiting
        self._count_rows = count_rows
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "model")
        self._turn = asyncio.Lock()
        self._last_s, self._last_rows, self._last_size = math.inf, 1, 1
        self._task = asyncio.create_task(self._run())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def submit(self, inputs: tuple[torch.Tensor, ...]) -> tuple[ModelVersion, Outputs, float]:
        """Compute a request. The last result is the time at which its batch began.

        Raises BusyError, and errors of programs. A cancelled request leaves the queue.
        """
        if len(self._waiting) >= self._most_waiting:
            raise BusyError
        rows = self.model.program.rows(inputs)
        request = _Waiting(inputs, rows, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        return await request.result

    async def between_batches(self, call: Callable[[], Value], *, short: bool = False) -> Value:
        """Call `call` in the model's thread, or in this thread if it is short."""
        async with self._turn:
            if short:
                return call()
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def change(self, model: ServedModel) -> None:
        """Compute with this model from now on. No batch of the former model runs afterwards."""
        async with self._turn:
            self.model = model

    def close(self) -> None:
        self._task.cancel()
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await asyncio.sleep(0)  # requests that have arrived join this batch
            batch = self._next()
            if not batch:
                self._arrived.clear()
                continue
            rows = sum(request.rows for request in batch)
            self._count_rows(rows)
            inputs = [request.inputs for request in batch]
            size = sum(tensor.numel() for each in inputs for tensor in each)
            likely_s = self._last_s * max(1, rows / self._last_rows, size / self._last_size)
            began = time.perf_counter()
            try:
                version, results, took_s = await self.between_batches(
                    partial(self._compute, inputs), short=likely_s < _SHORT_S
                )
                if not any(isinstance(each, BaseException) for each in results):
                    self._last_s, self._last_rows, self._last_size = took_s, max(1, rows), max(1, size)
            except Exception as error:  # noqa: BLE001  (others must still be answered)
                version, results = self.model.version, [error] * len(batch)
            for request, result in zip(batch, results, strict=True):
                if request.result.done():  # its client has given up
                    continue
                if isinstance(result, BaseException):
                    request.result.set_exception(result)
                else:
                    request.result.set_result((version, result, began))

    def _compute(self, inputs: list[tuple[torch.Tensor, ...]]) -> tuple[ModelVersion, list[Result], float]:
        started = used_s()
        return *self.model.compute(inputs), used_s() - started

    def _next(self) -> list[_Waiting]:
        """Return the request that has waited longest, with all requests that can be joined with it."""
        batch: list[_Waiting] = []
        others: list[_Waiting] = []
        rows, most = 0, self._most_rows if self.model.program.joins else 0
        while self._waiting:
            request = self._waiting.popleft()
            if request.result.done():
                continue
            if batch and rows + request.rows > most:
                self._waiting.appendleft(request)
                break
            if batch and request.kind != batch[0].kind:
                others.append(request)
                continue
            batch.append(request)
            rows += request.rows
        self._waiting.extendleft(reversed(others))
        return batch
