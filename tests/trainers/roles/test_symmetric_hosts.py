"""Servers and workers over machines: which address each says that it has."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.support.command import Fleetrun
from tests.support.hosts import hosts, needs_hosts
from tests.support.mpi import mpirun

pytestmark = [*needs_hosts, pytest.mark.mpi, pytest.mark.slow]

SCRIPT = """
from trainers.roles.makers import MPISymmetricRoleMaker
me = MPISymmetricRoleMaker().identity()
hosts = [each.rpartition(":")[0] for each in (*me.servers, *me.trainers)]
print(os.uname().nodename, "server" if me.is_server else "worker", me.index, *hosts, flush=True)
"""


def test_each_machine_has_a_server_and_a_worker_at_its_own_address(tmp_path: Path):
    with hosts(2, tmp_path) as made, Fleetrun(tmp_path) as fleetrun:
        agent = tmp_path / "agent"
        cases = "".join(f'{host.name}) exec {shlex.join(host.enter)} sh -c "$*" ;;\n' for host in made)
        agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}esac\n")
        agent.chmod(0o755)
        where = ("--host", "h1:2,h2:2", "--mca", "plm_rsh_agent", str(agent))
        launch = fleetrun.run(
            fleetrun.script(SCRIPT),
            prefix=(*made[0].enter, *mpirun("Open MPI", 4), *where),
            command=(sys.executable,),
        )
        assert launch.code == 0, launch
        addresses = " ".join([host.address for host in made] * 2)
        roles = ("server", "worker")
        assert sorted(launch.out.splitlines()) == [
            f"h{1 + number} {role} {number} {addresses}" for number in range(2) for role in roles
        ]
