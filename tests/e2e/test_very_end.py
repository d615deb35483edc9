"""What cannot be pushed or written when a script has ended: the job fails, whatever the script returns."""

from __future__ import annotations

import pytest

from tests.support.command import Fleetrun

ONE_AND_ONE = ("--server_num", "1", "--trainer_num", "1", "--max_restart", "0")
TRAINING = """
import resource, sys, torch
from pathlib import Path
from trainers import fleet
fleet.init()
torch.set_num_threads(1)
strategy = fleet.DistributedStrategy()
strategy.a_sync, strategy.a_sync_configs = True, {"k_steps": 1000}
strategy.ps_configs = {"durability": "log", "durability_dir": "kept", "snapshot_interval_s": 300.0}
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
if fleet.is_server():
    Path("server").write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
    sys.exit()
fleet.init_worker()
optimizer.minimize(model(torch.ones(8, 4)).sum())
"""
FULL = """
resource.prlimit(int(Path("server").read_text()), resource.RLIMIT_FSIZE, (1, 1))
"""


@pytest.mark.parametrize("ending", ["", "sys.exit(0)"])
def test_the_last_gradients_could_not_be_pushed(fleetrun: Fleetrun, ending: str) -> None:
    """Geo training pushes after the end of the script; by then the disk of the journal is full."""
    launch = fleetrun.run(*ONE_AND_ONE, fleetrun.script(TRAINING + FULL + ending))
    assert launch.code == 1, launch
    assert "First failure: trainer 0 exited with code 1" in launch.said
    assert "The last gradients of this trainer could not be pushed" in launch.said
    assert "journal-" in launch.said


def test_a_checkpoint_in_the_background_could_not_be_written(fleetrun: Fleetrun) -> None:
    script = fleetrun.script("""
import resource, torch
from trainers import fleet
fleet.init(is_collective=True)
model = torch.nn.Linear(2048, 2048)
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
fleet.save_checkpoint("kept", 1, model, async_save=True)
""")
    launch = fleetrun.run("--max_restart", "0", script)
    assert launch.code == 1, launch
    assert "First failure: trainer 0 exited with code 1" in launch.said
    assert "File too large" in launch.said, launch


LAST_STEP = """
import torch
from trainers import fleet
fleet.init()
torch.set_num_threads(1)
strategy = fleet.DistributedStrategy()
strategy.a_sync = sys.argv[1] == "async"
strategy.ps_configs = {"trainer_timeout_s": 2.0}
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()
fleet.init_worker()
for _ in range(3):
    optimizer.minimize(model(torch.ones(8, 4)).sum())
if RANK == 1:
    os._exit(0)
fleet.stop_worker()
tell("stopped")
"""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_trainer_that_leaves_after_its_last_step_is_no_failure_of_the_others(fleetrun: Fleetrun, mode: str):
    words = ("--server_num", "1", "--trainer_num", "2", "--max_restart", "0")
    launch = fleetrun.run(*words, fleetrun.script(LAST_STEP), mode)
    assert launch.code == 0, launch
    assert launch.told("stopped")


def test_a_server_that_is_stopped_while_it_removes_what_it_kept_removes_it_all(fleetrun: Fleetrun):
    """The launcher gives servers a second when all trainers have ended; a snapshot may hold them up."""
    asked = """
import signal
from trainers.ps.durable.durable import DurableFolder
discard = DurableFolder.discard
def stopped(folder):
    tell("discards")
    os.kill(os.getpid(), signal.SIGTERM)
    discard(folder)
DurableFolder.discard = stopped
"""
    steps = TRAINING.replace('{"k_steps": 1000}', '{"k_steps": 0}') + "fleet.stop_worker()\n"
    launch = fleetrun.run(*ONE_AND_ONE, fleetrun.script(asked + steps))
    assert launch.code == 0, launch
    assert launch.told("discards")
    assert not list((fleetrun.folder / "kept").iterdir())
