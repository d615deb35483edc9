"""The click example by real processes: on files, and on generated rows."""

import os
import re
from pathlib import Path

import pytest

from fleetrun.envs import contract
from tests.support.cluster import PATH, Job
from tests.support.forking import Forker
from trainers.examples import click_log

EXAMPLE = "trainers.examples.wide_and_deep"
SMALL = ["--hidden", "16", "--dim", "4", "--batch_size", "256"]


def aucs(running: Job) -> tuple[float, float]:
    """(reached, best possible), said by the first trainer and by no other."""
    first, *others = running.trainers
    found = re.findall(r"^test AUC: (\d\.\d{4}), best possible: (\d\.\d{4})$", first.output, re.MULTILINE)
    assert len(found) == 1, first.output
    assert not any("AUC" in other.output for other in others)
    assert all("Traceback" not in process.output for process in running.processes)
    return float(found[0][0]), float(found[0][1])


@pytest.mark.slow
def test_a_folder_without_data_is_named_before_anything_is_connected(forker: Forker, tmp_path: Path) -> None:
    environ = contract.without_contract(os.environ) | {"PYTHONPATH": PATH}
    log = tmp_path / "log"
    ended = forker.start(["-m", EXAMPLE, "--data", str(tmp_path)], environ, tmp_path, log)
    assert ended.wait(250) == 2
    assert log.read_text().endswith(
        f"{tmp_path} has no best.json. Write it with python -m trainers.examples.click_log {tmp_path}\n"
    )


@pytest.mark.slow
def test_rows_of_a_reader_in_step(forker: Forker, tmp_path: Path) -> None:
    """They are generated, and what the best of all models would reach is known."""
    small = ["--rows", "20000", "--batch_size", "256", "--steps", "120", "--hidden", "16", "--dim", "4"]
    with forker.job(tmp_path, trainers=2, servers=1) as running:
        running.start_all(["-m", EXAMPLE, "--mode", "sync", "--lr", "0.01", *small])
        running.expect_success()
        reached, best = aucs(running)
        assert 0.65 < reached < best
        found = re.findall(
            r"^TRAIN ---> pass: ([01]) loss: (0\.\d{6})$", running.trainers[0].output, re.MULTILINE
        )
        assert [each[0] for each in found] == ["0", "0", "0", "1", "1", "1"]
        losses = [float(each[1]) for each in found]
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_files_read_by_trainers_that_do_not_wait(
    forker: Forker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "clicks"
    click_log.main([str(data), "--rows", "20000", "--test_rows", "4000"])
    said = re.fullmatch(
        r"best possible on the test files: AUC (0\.\d{4}), log loss 0\.\d{4}\n", capsys.readouterr().out
    )
    assert said
    assert len(list((data / "train").iterdir())) == 4
    options = ["--data", str(data), "--epochs", "2", "--lr", "0.01", "--optimizer", "adagrad", *SMALL]
    with forker.job(tmp_path, trainers=2, servers=1) as running:
        running.start_all(["-m", EXAMPLE, *options])
        running.expect_success()
        reached, best = aucs(running)
        assert f"{best:.4f}" == said[1]
        assert 0.6 < reached < best
