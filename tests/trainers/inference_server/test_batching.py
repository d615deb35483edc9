"""In which thread batches are computed: a change of threads costs as much as a small model."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainers.inference_server.batching import _SHORT_S, Batcher, used_s

HERE, AWAY = "MainThread", "model_0"


class Burning:
    """A model that uses 20 ms of CPU if the first number of a request is 1."""

    def __init__(self) -> None:
        self.program = SimpleNamespace(rows=lambda inputs: len(inputs[0]), joins=True)
        self.version = "1"
        self.threads: list[str] = []

    def compute(self, requests: list[tuple[torch.Tensor, ...]]) -> tuple[str, list[Any]]:
        self.threads.append(threading.current_thread().name)
        until = time.thread_time() + 0.02 * float(requests[0][0][0])
        while time.thread_time() < until:
            pass
        return self.version, [{} for _ in requests]


def test_only_a_batch_that_will_be_short_holds_up_connections() -> None:
    model: Any = Burning()

    async def ask() -> None:
        batcher = Batcher(model, 100, 100, lambda rows: None)
        for size, cost in ((1, 0), (1, 0), (1 << 24, 0), (1, 0), (1, 1), (1, 1), (1, 0), (1, 0)):
            await batcher.submit((torch.full((size,), float(cost)),))
        batcher.close()

    asyncio.run(ask())
    assert model.threads == [AWAY, HERE, AWAY, HERE, HERE, AWAY, AWAY, HERE]


def test_neither_a_large_row_for_all_rows_nor_an_error_hides_how_long_the_next_batch_takes() -> None:
    model: Any = Burning()
    model.program.rows = lambda inputs: len(inputs[1])
    compute = model.compute
    model.compute = lambda requests: (
        compute(requests)[0],
        [{} if requests[0][0][0] == 0 else IndexError() for _ in requests],
    )

    async def ask() -> None:
        batcher = Batcher(model, 100, 100, lambda rows: None)
        for rows, wrong in ((10, 0), (10, 0), (1 << 30, 0), (10, 0), (1 << 30, 1e-9), (1 << 30, 0)):
            inputs = torch.full((1,), float(wrong)).expand(1 << 50), torch.zeros(1).expand(rows)
            await asyncio.gather(batcher.submit(inputs), return_exceptions=True)
        batcher.close()

    asyncio.run(ask())
    assert model.threads == [AWAY, HERE, AWAY, HERE, AWAY, AWAY]


def test_a_wait_for_a_disk_counts_as_a_long_batch(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.write(bytes(1 << 22))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as weights:
        faults, started = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt, used_s()
        assert weights[1 << 21] == 0
        took = used_s() - started
        if resource.getrusage(resource.RUSAGE_THREAD).ru_majflt == faults:
            pytest.skip(f"{tmp_path} is not on a disk")
    assert took >= _SHORT_S


def test_a_change_of_models_waits_for_the_batch_of_the_former_one() -> None:
    """Its rows may be overwritten as soon as a worker has reported the new version."""
    begun, go_on = threading.Event(), threading.Event()
    model: Any = Burning()
    other: Any = Burning()

    def compute(requests: list[Any]) -> tuple[str, list[Any]]:
        begun.set()
        assert go_on.wait(60)
        return "1", [{}]

    model.compute = compute

    async def ask() -> None:
        batcher = Batcher(model, 100, 100, lambda rows: None)
        answer = asyncio.create_task(batcher.submit((torch.zeros(1),)))
        await asyncio.to_thread(begun.wait, 60)
        change = asyncio.create_task(batcher.change(other))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not change.done()
        go_on.set()
        await change
        assert (await answer)[0] == "1"
        await batcher.submit((torch.zeros(1),))
        batcher.close()

    asyncio.run(ask())
    assert len(other.threads) == 1


def test_requests_with_one_row_of_an_input_are_joined_with_their_kind_only() -> None:
    model: Any = Burning()
    model.program.rows = lambda inputs: max(map(len, inputs))
    counted: list[int] = []

    async def ask() -> None:
        batcher = Batcher(model, 100, 100, counted.append)
        sizes = ((2, 1), (3, 3), (4, 1), (1, 5), (6, 6), (1, 1))
        await asyncio.gather(*(batcher.submit(tuple(torch.zeros(size) for size in each)) for each in sizes))
        batcher.close()

    asyncio.run(ask())
    assert counted == [2 + 4, 3 + 6 + 1, 5]
