"""What happens to the others when a process of the job dies."""

import json
import signal
from pathlib import Path

import pytest

from fleetrun.envs.contract import Role
from tests.support.forking import Forker

SCRIPT = ["-m", "tests.support.scripts.ps_failures"]


@pytest.mark.slow
def test_a_trainer_killed_in_a_sync_step_ends_the_others_with_its_name(
    forker: Forker, tmp_path: Path
) -> None:
    """Also: trainers that are there before their server wait for it; SIGTERM ends a server without noise."""
    report = tmp_path / "error.json"
    with forker.job(tmp_path, trainers=2, servers=1) as running:
        survivor = running.start([*SCRIPT, "die_in_sync"], Role.TRAINER, 0, error_file=str(report))
        victim = running.start([*SCRIPT, "die_in_sync"], Role.TRAINER, 1)
        survivor.wait_for("joining")
        server = running.start([*SCRIPT, "die_in_sync"], Role.SERVER, 0)
        assert victim.wait() == -signal.SIGKILL
        assert survivor.wait() == 1
        assert "step 4" in survivor.output
        assert "step 5" not in survivor.output
        assert "TrainerLostError: trainer 1 is lost: it has been disconnected for over 2 s" in survivor.output
        written = json.loads(report.read_text(encoding="utf-8"))["message"]
        assert written["message"].startswith("TrainerLostError: trainer 1 is lost")
        assert server.popen.poll() is None
        server.popen.terminate()
        assert server.wait() == 0
        assert "Traceback" not in server.output
        assert "server ended" in server.output


@pytest.mark.slow
def test_uneven_steps_and_a_forgotten_stop_worker_end_well(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=2, servers=1) as running:
        running.start_all([*SCRIPT, "forget"])
        running.expect_success()
        assert "refused 3" in running.trainers[0].output
        assert "fleet.stop_worker() has been called" in running.trainers[0].output
        assert running.trainers[1].output == ""
        assert "server ended" in running.servers[0].output


@pytest.mark.slow
def test_a_restarted_trainer_rejoins_an_async_job(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=2, servers=2) as running:
        running.start_all([*SCRIPT, "come_back"])
        first_life = running.trainers[0]
        assert first_life.wait() == -signal.SIGKILL
        second_life = running.start([*SCRIPT, "come_back"], Role.TRAINER, 0, restart_count=1)
        running.processes.remove(first_life)
        running.expect_success()
        assert "found trained values" in second_life.output
        ends = {process.output.splitlines()[-1] for process in running.trainers}
        assert len(ends) == 1
        assert ends.pop().startswith("end ")
