"""A job of 100,000 ranks on paper: what each process and each record holds stays within the limits of the
system and of etcd.
"""

import hashlib
import json
import random
import subprocess

import pytest

from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import Node
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.resolve import resolve
from fleetrun.plan.topology import Host, Offer, pod_spec
from trainers.roles.environment import identity_of

NODES, PROCESSES = 12_500, 8
ONE_STRING = 128 << 10
"""Of an environment, with its name and the zero at its end (MAX_ARG_STRLEN of Linux)."""
ETCD_REQUEST = 1536 << 10
"""--max-request-bytes by default."""


def node(number: int) -> Node:
    random.seed(number)
    host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    service, *ports = random.sample(range(32768, 60999), PROCESSES + 1)
    trainers = tuple(f"{host}:{port}" for port in ports)
    offer = Offer(trainers=trainers, service=f"{host}:{service}")
    return Node(
        id=hashlib.sha256(str(number).encode()).hexdigest()[:16],
        host=host,
        name=f"node-{number:05}.cluster.example",
        offer=offer,
    )


@pytest.fixture(scope="module")
def nodes() -> list[Node]:
    return [node(number) for number in range(NODES)]


@pytest.mark.slow
def test_the_environment_of_a_process(nodes: list[Node], tmp_path):
    settings = resolve(
        read(f"--nproc_per_node {PROCESSES} --log_dir {tmp_path} train.py".split()), {}
    ).settings
    here, offers = Host(address=nodes[-1].host, cores=8), [each.offer for each in nodes]
    spec = pod_spec(settings, here, offers, NODES - 1, pod="evjsyn", environ={"HOME": "/"})
    last = spec.containers[-1]
    assert last.env["RANK"] == str(NODES * PROCESSES - 1)
    assert last.env["WORLD_SIZE"] == str(NODES * PROCESSES)
    assert all(len(name) + len(value) + 2 <= ONE_STRING for name, value in last.env.items())
    assert subprocess.run(["/bin/true"], env=dict(last.env)).returncode == 0, "the kernel takes it"

    assert last.long_file is not None
    last.long_file.write_text(json.dumps(dict(last.long_values)))
    found = identity_of(last.environment(0))
    assert found.index == NODES * PROCESSES - 1
    assert found.trainers[-1] == nodes[-1].offer.trainers[-1]
    assert len(found.trainers) == NODES * PROCESSES


@pytest.mark.slow
def test_the_topology_in_the_store(nodes: list[Node]):
    data = records.pack_topology(nodes)
    assert len(data) <= ETCD_REQUEST
    assert [each.offer for each in records.read_topology(data)] == [each.offer for each in nodes]
