"""Parameter-server jobs whose number of trainers changes: their tables have every acknowledged push."""

from __future__ import annotations

import re
import signal

import pytest

from tests.e2e.test_together import Nodes
from tests.support.command import Fleetrun, Launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Every push adds 1 to each of four rows, until the test says that it is enough, or the launcher ends this.
COUNTING = """
import torch
from trainers import fleet
from trainers.ps import SparseEmbedding, Uniform

torch.set_num_threads(1)
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
strategy.a_sync_configs = {"overlap": False}
strategy.ps_configs = {"durability": "log"%s}
model = fleet.distributed_model(SparseEmbedding(1, init=Uniform(0.0, 0.0)))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()
fleet.init_worker()
notice = fleet.stop_requested()
tell("begins", SIZE, "trainers", fleet.resume_step(), "done")
keys, pushed = torch.arange(4), 0
while notice is None and not Path("enough").exists():
    optimizer.minimize(-model(keys).sum())
    pushed += 1
    if pushed in (5, 20):
        tell("reached", SIZE, pushed)
    time.sleep(0.005)
    notice = fleet.stop_requested()
tell("pushed", pushed, "of", SIZE)
if notice is None:
    fleet.barrier_worker()
with torch.no_grad():
    rows = model.eval()(keys)[:, 0].tolist() if notice is None else []
fleet.stop_worker()
tell("rows", *map(round, rows))
"""


def numbers(launches: list[Launch], pattern: str) -> list[int]:
    return [int(found[1]) for each in launches for line in each.news if (found := re.search(pattern, line))]


def test_a_job_grows_and_shrinks_and_its_tables_have_every_push(fleetrun: Fleetrun) -> None:
    patient = ("--elastic_timeout", "1", "--heartbeat_timeout", "60")
    nodes = Nodes(fleetrun, "--nnodes", "1:2", *patient, "--worker_num", "1")
    script = fleetrun.script(COUNTING % "")
    first = nodes.start("--server_num", "1", "--stop_timeout", "100", script)
    first.until_told("reached 1 5")
    second = nodes.start("--server_num", "0", "--stop_timeout", "100", script)
    both = [first, second]
    for each in both:
        each.until_told("reached 2 5")
    (alone,) = numbers([first], r"pushed (\d+) of 1")
    begun = numbers(both, r"begins 2 trainers (\d+) done")
    assert begun == [alone // 2] * 2
    second.send(signal.SIGTERM)
    assert second.wait() == 143, second
    first.until_told("reached 1 5", 2)
    together = numbers(both, r"pushed (\d+) of 2")
    assert len(together) == 2
    assert numbers([first], r"begins 1 trainers (\d+) done") == [0, sum(begun) + sum(together)]
    (fleetrun.folder / "enough").touch()
    assert first.wait() == 0, first
    (rows,) = [line.split()[2:] for line in first.told(" rows ") if line.split()[2:]]
    assert rows == [str(sum(numbers(both, r"pushed (\d+) of")))] * 4
    assert not list(fleetrun.folder.glob("log/*/ps.*/server-*")), "the job is over"


def test_a_job_that_is_stopped_goes_on_with_another_number_of_trainers(fleetrun: Fleetrun) -> None:
    kept = fleetrun.folder / "kept"
    script = fleetrun.script(COUNTING % f', "durability_dir": "{kept}"')
    launches: list[Launch] = []
    done = 0
    for trainers in (1, 2):
        words = ("--server_num", "1", "--trainer_num", str(trainers), "--stop_timeout", "100")
        launch = fleetrun.start(*words, script)
        launches.append(launch)
        launch.until_told(f"reached {trainers} 5", trainers)
        begun = done // trainers
        assert numbers([launch], r"begins \d trainers (\d+) done") == [begun] * trainers
        if len(launches) < 2:
            launch.send(signal.SIGINT)
            assert launch.wait() == 130, launch
            done = begun * trainers + sum(numbers([launch], r"pushed (\d+) of"))
            assert list(kept.iterdir()), "whoever was stopped has not finished"
    (fleetrun.folder / "enough").touch()
    assert launch.wait() == 0, launch
    done = sum(numbers(launches, r"pushed (\d+) of"))
    assert [line.split()[2:] for line in launch.told(" rows ")] == [[str(done)] * 4] * 2
    assert not list(kept.iterdir())
