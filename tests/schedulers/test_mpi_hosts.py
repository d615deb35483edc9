"""Open MPI over hosts of their own: mpirun's host is where the job meets."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.support.command import Fleetrun
from tests.support.hosts import hosts, needs_hosts
from tests.support.mpi import mpirun

pytestmark = [*needs_hosts, pytest.mark.mpi, pytest.mark.slow]


def test_the_ranks_of_two_hosts_meet_at_mpiruns(tmp_path: Path, fleetrun: Fleetrun):
    with hosts(2, tmp_path) as made:
        agent = tmp_path / "agent"
        cases = "".join(f'{host.name}) exec {shlex.join(host.enter)} sh -c "$*" ;;\n' for host in made)
        agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}esac\n")
        agent.chmod(0o755)
        script = fleetrun.script("tell('is', RANK, os.uname().nodename, os.environ['MASTER_ADDR'])")
        where = ("--host", "h1,h2", "--mca", "plm_rsh_agent", str(agent))
        launch = fleetrun.run(script, prefix=(*made[0].enter, *mpirun("Open MPI", 2), *where))
        assert launch.code == 0, launch
        assert sorted(launch.told("is")) == [
            f"trainer.0 is 0 h1 {made[0].address}",
            f"trainer.1 is 1 h2 {made[0].address}",
        ]
