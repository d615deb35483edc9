"""The processes of `fleetrun.elastic.etcd.member` by themselves."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetrun.elastic.etcd import wire
from fleetrun.elastic.etcd.client import Access, Client, Rejected, Unreachable
from fleetrun.host.interpreter import helper_command, helper_environment
from tests.support.nodes import needs_etcd
from tests.support.ports import free_port
from tests.support.traces import wait_until

pytestmark = [pytest.mark.slow, needs_etcd, pytest.mark.timeout(120)]


@contextmanager
def member(endpoints: list[str], own: str, folder: Path) -> Iterator[None]:
    said = {
        "endpoints": endpoints, "own": own, "job": "default", "lease": 5.0, "folder": str(folder),
        "certificate": [],
    }  # fmt: skip
    process = subprocess.Popen(
        helper_command("fleetrun.elastic.etcd.member"),
        env=helper_environment(os.environ),
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(said).encode() + b"\n")
        process.stdin.flush()
        yield
    finally:
        process.stdin.close()
        process.wait(20)


def complete(endpoint: str) -> bool:
    client = Client(Access(wire.EtcdAddress((endpoint,)), "", timeout=1.0), 0)
    try:
        return wire.completed_for(client.ask("/kv/range", wire.COMPLETE)) is not None
    except (Unreachable, Rejected):
        return False


def test_a_machine_whose_etcd_could_not_enter_tries_again(tmp_path: Path) -> None:
    """Two that enter at once may be in each other's way. etcd ends then, but has made its folder, and with
    that it would begin another cluster.
    """
    folders = [tmp_path / "0", tmp_path / "1"]
    for each in folders:
        (each / "data" / "member" / "snap").mkdir(parents=True)
    endpoints = [f"127.0.0.{number}:{free_port([f'127.0.0.{number}'])}" for number in (1, 2)]
    with member(endpoints, endpoints[0], folders[0]), member(endpoints, endpoints[1], folders[1]):
        wait_until(lambda: all(map(complete, endpoints)), "both are in one cluster", 60)
