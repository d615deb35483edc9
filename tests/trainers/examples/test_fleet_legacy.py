"""The first FleetAPI's program, started by hand: the same costs as when the environment says who a process
is. By fleetrun and by mpirun: tests/e2e/test_fleet_legacy.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetrun.envs import contract
from tests.e2e.test_fleet_legacy import SMALL, alike, costs
from tests.support.cluster import PATH, reserved_endpoints
from tests.support.forking import Forker

PROGRAM = ("-m", "trainers.examples.fleet_legacy")


@pytest.mark.slow
def test_by_hand_each_process_says_who_it_is(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=2, servers=1) as running:
        running.start_all([*PROGRAM, "--role_maker", "cloud", *SMALL])
        running.expect_success()
        expected = [costs(each.output) for each in running.trainers]
    assert [len(each) for each in expected] == [5, 5]
    environ = {**contract.without_contract(os.environ), "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}
    with reserved_endpoints(1) as (server,):
        logs, processes = [], []
        for role, number in (("server", 0), ("worker", 0), ("worker", 1)):
            logs.append(tmp_path / f"{role}.{number}")
            who = ("--role", role, "--current_id", str(number), "--server_endpoints", server)
            words = [*PROGRAM, "--role_maker", "user", "--worker_num", "2", *who, *SMALL]
            processes.append(forker.start(words, environ, tmp_path, logs[-1]))
        codes = [process.wait(100) for process in processes]
    printed = [log.read_text() for log in logs]
    assert codes == [0, 0, 0], printed
    assert alike([costs(text) for text in printed], [[], *expected])
