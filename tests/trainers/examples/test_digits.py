"""The examples of the README on real digits, by real processes, where tests/e2e has not seen them yet."""

import re
from pathlib import Path

import pytest

from tests.support.cluster import Process
from tests.support.forking import Forker

LINE = r"^time: \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\], batch: \[1\], loss\[1\]:\[\d\.\d{6}\]$"


def expect_learned(first: Process, others: list[Process]) -> None:
    accuracy = re.findall(r"^test accuracy: (0\.\d{4})$", first.output, re.MULTILINE)
    assert len(accuracy) == 1
    assert float(accuracy[0]) >= 0.95
    for trainer in (first, *others):
        assert re.search(LINE, trainer.output, re.MULTILINE)
        assert "Traceback" not in trainer.output
    assert not any("test accuracy" in trainer.output for trainer in others)


@pytest.mark.slow
def test_two_trainers_learn_digits_collectively_in_static_style(
    forker: Forker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with forker.job(tmp_path, trainers=2, servers=0) as running:
        running.start_all(["-m", "trainers.examples.collective_trainer_static"])
        running.expect_success()
        expect_learned(running.trainers[0], [])
        assert "accuracy" not in running.trainers[1].output


@pytest.mark.slow
def test_two_servers_and_two_trainers_learn_digits_in_static_style(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as running:
        running.start_all(["-m", "trainers.examples.parameter_server_trainer_static"])
        running.expect_success()
        output = running.trainers[0].output
        assert re.search(r"^loss: \d\.\d+, acc: [01]\.\d+$", output, re.MULTILINE)
        found = re.findall(r"^test accuracy: (\d\.\d{4})$", output, re.MULTILINE)
        # How far the trainers are apart, and so how well they learn, is up to the processors.
        assert [float(each) >= 0.9 for each in found] == [True], output


@pytest.mark.slow
def test_parameter_server_training_in_step_learns_digits(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as running:
        running.start_all(["-m", "trainers.examples.parameter_server_trainer", "--sync"])
        running.expect_success()
        expect_learned(running.trainers[0], running.trainers[1:])
        for server in running.servers:
            assert f"rank id: {server.member.rank}, endpoint: {server.member.endpoint}" in server.output
            assert "Traceback" not in server.output
