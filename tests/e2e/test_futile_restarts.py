"""Failures of parameter servers that a restart cannot mend: one sentence, and the job ends."""

from __future__ import annotations

import pytest

from tests.support.command import Fleetrun

MODEL = """
import resource, signal, torch
from pathlib import Path
from trainers import fleet
from trainers.ps import SparseEmbedding
fleet.init()
torch.set_num_threads(1)
strategy = fleet.DistributedStrategy()
strategy.a_sync, strategy.ps_configs = True, {"request_timeout_s": 200.0, **CONFIGS}
model = fleet.distributed_model(SparseEmbedding(64))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
"""
SERVE = """
if fleet.is_server():
    Path(WHO).write_text(str(os.getpid()))
    fleet.init_server()
    fleet.run_server()
    sys.exit()
fleet.init_worker()
"""
STEP = """
optimizer.minimize(model(torch.arange(100)).sum())
fleet.barrier_worker()
"""
KEPT = 'CONFIGS = {{"durability": "log", "durability_dir": "kept", "snapshot_interval_s": {interval}}}\n'


def script(fleetrun: Fleetrun, body: str, configs: str = "CONFIGS = {}\n", serve: str = SERVE) -> str:
    return fleetrun.script("import sys\n" + configs + MODEL + serve + body)


WRITTEN = 'any(path.parent.name in manifest() for path in files.glob("snapshot-*/*/*.safetensors"))'
"""The first snapshot may precede the push. Then it has no rows, and no file of a table."""


@pytest.mark.parametrize(
    ("pattern", "interval", "ready"),
    [("journal-*", 300.0, "manifest()"), ("snapshot-*/*/*.safetensors", 0.2, WRITTEN)],
)
def test_a_damaged_file_of_a_server(fleetrun: Fleetrun, pattern: str, interval: float, ready: str) -> None:
    damage = f"""
import time
files, pid = Path("kept/server-0"), int(Path("ps.0").read_text())
def manifest():
    try:
        return "".join(path.read_text() for path in files.glob("snapshot-*/manifest.json"))
    except FileNotFoundError:  # a newer snapshot replaces this one
        return ""
while not {ready}:
    time.sleep(0.01)
os.kill(pid, signal.SIGSTOP)  # or another snapshot may replace the damaged one
for path in files.glob({pattern!r}):
    path.write_bytes(b"x" * path.stat().st_size)
os.kill(pid, signal.SIGKILL)
fleet.barrier_worker()
"""
    kept = KEPT.format(interval=interval)
    launch = fleetrun.run("--server_num=1", "--trainer_num=1", script(fleetrun, STEP + damage, kept))
    assert launch.code == 1, launch
    assert "First failure: server 0 exited with code 1" in launch.said
    assert "a restart will not help" in launch.said
    assert (
        f"{fleetrun.folder}/kept/server-0" in launch.err.replace("\n  ", "") or "kept/server-0" in launch.said
    )
    assert "Traceback" not in fleetrun.log("ps.0")
    assert fleetrun.log("ps.0").count("--- fleetrun: restart") == 1


def test_a_server_without_memory_for_rows(fleetrun: Fleetrun) -> None:
    body = """
pid = int(Path("ps.0").read_text())
room = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() + (64 << 20)
resource.prlimit(pid, resource.RLIMIT_AS, (room, room))
for step in range(200):
    optimizer.minimize(model(torch.arange(20_000) + 20_000 * step).sum())
"""
    unreserved = "    resource.setrlimit(resource.RLIMIT_AS, (1 << 42, 1 << 42))\n    fleet.init_server()"
    serve = SERVE.replace("    fleet.init_server()", unreserved)
    launch = fleetrun.run("--server_num=1", "--trainer_num=1", script(fleetrun, STEP + body, serve=serve))
    assert launch.code == 1, launch
    assert "not enough memory for" in launch.said
    assert "a restart will not help" in launch.said
    assert "BAD_MESSAGE" not in launch.said


def test_a_killed_server_leads_the_report_of_the_trainers_that_fail_by_it(fleetrun: Fleetrun) -> None:
    body = """
if os.environ["PADDLE_RESTART_COUNT"] == "0":
    os.kill(int(Path("ps.1").read_text()), signal.SIGKILL)
fleet.barrier_worker()
for _ in range(3):
    optimizer.minimize(model(torch.arange(100)).sum())
"""
    launch = fleetrun.run("--server_num=2", "--trainer_num=1", script(fleetrun, STEP + body))
    assert launch.code == 1, launch
    report = launch.said.partition("=====")[2]
    assert "Began with: server 1 was killed by SIGKILL at " in report
    assert report.index("Began with") < report.index("First failure: trainer 0")
    assert "after 2 restarts of server 1 and trainer 0 (a restart will not help)" in report
