"""TorchRec's modules in real jobs: equal to one process with torch's optimizers, or refused with the way
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.forking import Forker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is missing: see CONTRIBUTING.md"),
]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    running = Forker("torchrec", "torchrec.distributed.train_pipeline")
    yield running
    running.close()


def run(forker: Forker, folder: Path, *words: str, trainers: int = 1) -> None:
    with forker.job(folder, trainers=trainers, servers=2) as job:
        job.start_all(["-m", "tests.support.scripts.ps_torchrec", *words])
        job.expect_success()


@pytest.mark.parametrize("tables", ["plain", "dims", "shared", "mean", "reversed"])
def test_a_collection_of_bags_trains_as_in_one_process(forker: Forker, tmp_path: Path, tables: str) -> None:
    run(forker, tmp_path, "pooled", tables)


def test_two_trainers_with_a_half_of_each_batch_train_as_one_process(forker: Forker, tmp_path: Path) -> None:
    run(forker, tmp_path, "in_two_trainers", trainers=2)


@pytest.mark.parametrize(
    "scenario",
    [
        "weighted",
        "positions",
        "int32_and_unused_keys",
        "sequences",
        "called_twice",
        "hooked hook",
        "hooked forward_hook",
        "hooked grad",
        "hooked inputs",
        "hooked unread",
        "hooked frozen",
        "other_weights",
        "on_meta",
        "in_backward sgd",
        "in_backward adagrad",
        "in_backward row_wise",
        "in_backward sgd changed",
        "combined",
        "skipped",
        "geo",
        "loaded",
        "wrong",
        "empty",
        "nothing",
        "half_rows",
    ],
)
def test_it_is_as_in_one_process(forker: Forker, tmp_path: Path, scenario: str) -> None:
    run(forker, tmp_path, *scenario.split())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("loop", ["pipelined base", "pipelined sparse", "looped loader", "looped prefetch"])
def test_a_step_is_one_message(forker: Forker, tmp_path: Path, loop: str, mode: str) -> None:
    run(forker, tmp_path, *loop.split(), mode)


def test_tables_are_saved_and_loaded_by_the_names_of_the_state(forker: Forker, tmp_path: Path) -> None:
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
        run(forker, tmp_path / part, "saved", str(tmp_path), part)


@pytest.mark.parametrize(
    ("rule", "tensors"),
    [("row_wise", "shards"), ("sgd", "dtensors"), ("adagrad", "shards"), ("row_wise", "on_meta")],
)
def test_a_checkpoint_of_distributed_model_parallel_is_read(
    forker: Forker, tmp_path: Path, rule: str, tensors: str
) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(["-m", "tests.support.scripts.ps_torchrec_dmp", rule, tensors, str(tmp_path)])
        job.expect_success()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_export_for_serving_needs_no_torchrec(forker: Forker, tmp_path: Path, device: str) -> None:
    run(forker, tmp_path, "exported", str(tmp_path), device)
