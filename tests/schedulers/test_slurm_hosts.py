"""A real Slurm over hosts of their own: network, address and name. `test_slurm_cluster.py` has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm as parts
from tests.support.command import Fleetrun
from tests.support.hosts import Host, hosts, needs_hosts

pytestmark = [*needs_hosts, pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def on_hosts(tmp_path: Path) -> Iterator[tuple[parts.Slurm, tuple[Host, ...]]]:
    if reason := parts.missing():
        pytest.skip(reason)
    with hosts(2, tmp_path) as made:
        nodes = {host.name: parts.Machine(host.name, host.address, host.enter) for host in made}
        with parts.slurm(nodes) as cluster:
            yield cluster, made


def test_the_nodes_meet_on_the_host_of_task_0(
    on_hosts: tuple[parts.Slurm, tuple[Host, ...]], fleetrun: Fleetrun
):
    cluster, (first, _) = on_hosts
    script = fleetrun.script("tell('is', RANK, os.uname().nodename, os.environ['MASTER_ADDR'])")
    launch = fleetrun.run(script, prefix=(*first.enter, "srun", "--nodes=2"), env=cluster.env)
    assert launch.code == 0, launch
    assert sorted(launch.told("is")) == [
        f"trainer.0 is 0 h1 {first.address}",
        f"trainer.1 is 1 h2 {first.address}",
    ]
    assert "master: h1:20" in launch.err


def test_a_host_that_vanishes_ends_the_job_with_an_error(
    on_hosts: tuple[parts.Slurm, tuple[Host, ...]], fleetrun: Fleetrun
):
    """Long before Slurm itself notices, and with another code than the 0 that srun would have."""
    cluster, (first, second) = on_hosts
    script = fleetrun.script("leave_on_term()\nstay()")
    launch = fleetrun.start(
        "--max_restart=0", "--heartbeat_timeout=6", script,
        prefix=(*first.enter, "srun", "--nodes=2"), env=cluster.env,
    )  # fmt: skip
    launch.until_ready(2)
    second.link_down()
    launch.until_told("trainer.0 got SIGTERM")
    launch.until_told("trainer.1 got SIGTERM")
    second.link_up()
    assert launch.wait() == 125, launch
