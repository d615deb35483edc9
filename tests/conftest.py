"""For all tests: how they share a machine."""

import atexit
import gc
import os
import signal
from pathlib import Path

import pytest

from tests.support.cluster import PATH
from tests.support.costs import Costs, listed_as_thorough

# One thread of computing in each process: several processes run at once, and threads that wait for each other
# in turn wait for the processors too. Before torch is imported, and for what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests start begins sooner (tests/support/child/sitecustomize.py), and so do the workers.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (PATH, os.environ.get("PYTHONPATH"))))
# Under nohup, or in the background of a script, signals are ignored, also by whatever is started. Those that
# are caught are not, and tests send them.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN or f"FLEETTEST_CATCHES_{_number}" in os.environ:
        os.environ[f"FLEETTEST_CATCHES_{_number}"] = "yes"  # so do the workers
        signal.signal(_number, lambda *_: None)
# A third of the time of collection is the collector's.
gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs", choices=["imports", "check", "write"],
        help="compare the costs of the tests with tests/costs.json, or write them there",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs(config))


def pytest_collection_finish() -> None:
    gc.freeze()


_LONGEST = (
    "simulated_ps/test_mutants.py",
    "simulated_ps/test_simulated.py",
    "e2e/test_memory_checkpoints.py",
    "attack/test_attack.py",
    "e2e/test_hosts_store.py",
    "trainers/ps/test_training.py",
    "e2e/test_hosts_network.py",
    "trainers/ps/server/test_full_memory.py",
    "trainers/checkpoints/test_jobs.py",
    "e2e/test_soak.py",
    "e2e/test_very_end.py",
    "trainers/ps/kernels/test_compiled.py",
    "e2e/test_online.py",
    "e2e/test_verdicts.py",
    "elastic/test_random_faults.py",
    "e2e/test_resizing.py",
    "e2e/test_fenced.py",
    "e2e/test_fleet_legacy.py",
    "e2e/test_futile_restarts.py",
    "trainers/ps/test_recovery.py",
    "trainers/ps/test_resizing.py",
    "e2e/test_any_signal.py",
    "docs/test_commands.py",
    "elastic/test_embedded_failures.py",
    "elastic/test_membership.py",
    "schedulers/test_ssh.py",
    "schedulers/test_slurm_cluster.py",
    "trainers/roles/test_mpi.py",
    "elastic/test_etcd_outages.py",
    "plots/test_figure.py",
    "e2e/test_training.py",
    "e2e/test_static_style.py",
)
"""Of files that take longest, the longest first."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out. The longest files come first, then those with slow tests, so that at
    the end no worker waits for one of them.
    """
    here = Path(__file__).parent
    thorough = listed_as_thorough()
    left = set(thorough)
    for item in items:
        name = f"{item.path.relative_to(here)}::{item.name}"
        if found := {line for line in thorough if name.startswith(line)}:
            left -= found
            item.add_marker(pytest.mark.thorough)
    if left and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        raise pytest.UsageError(f"tests/thorough.txt has names of no test: {', '.join(sorted(left))}")
    first = {here / name: place for place, name in enumerate(_LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: first.get(item.path, len(first) + (item.path not in slow)))
