"""The processes of `fleetrun.elastic.etcd.member` by themselves."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from fleetrun.elastic.etcd import wire
from fleetrun.elastic.etcd.client import Access, Client, Rejected, Unreachable
from fleetrun.elastic.etcd.member import Member, Runner
from fleetrun.host.interpreter import helper_command, helper_environment
from fleetrun.pod.loop import Loop
from tests.support.nodes import needs_etcd
from tests.support.ports import free_port
from tests.support.traces import wait_until

pytestmark = [pytest.mark.slow, needs_etcd, pytest.mark.timeout(120)]


def spec(endpoints: list[str], own: str, folder: Path) -> dict[str, Any]:
    return {
        "endpoints": endpoints, "own": own, "job": "default", "lease": 5.0, "folder": str(folder),
        "certificate": [],
    }  # fmt: skip


@contextmanager
def member(endpoints: list[str], own: str, folder: Path) -> Iterator[IO[bytes]]:
    """What it says."""
    folder.mkdir(exist_ok=True)
    said = spec(endpoints, own, folder)
    process = subprocess.Popen(
        helper_command("fleetrun.elastic.etcd.member"),
        env=helper_environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(said).encode() + b"\n")
        process.stdin.flush()
        yield process.stdout
    finally:
        process.stdin.close()
        process.wait(200)
        process.stdout.close()


def client_of(endpoint: str) -> Client:
    return Client(Access(wire.EtcdAddress((endpoint,)), "", timeout=1.0), 0)


def complete(endpoint: str) -> bool:
    client = client_of(endpoint)
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


def test_a_machine_with_another_list_does_not_enter_the_cluster(tmp_path: Path) -> None:
    """A member that cannot start would take the others' majority."""
    first, second, third = (f"127.0.0.{number}:{free_port([f'127.0.0.{number}'])}" for number in (1, 2, 3))
    both = [first, second]
    with (
        member(both, first, tmp_path / "0"),
        member(both, second, tmp_path / "1"),
    ):
        wait_until(lambda: all(map(complete, both)), "both are in one cluster", 60)
        with member([first, third], third, tmp_path / "2") as said:
            line = said.readline().decode()
        assert f"--master is {first},{third} here" in line
        assert all(each in line for each in both)
        members = client_of(first).ask("/cluster/member/list", {})["members"]
        assert sorted(each["name"] for each in members) == sorted(f"default/{each}" for each in both)


def test_a_process_of_the_store_that_cannot_be_started_is_tried_until_it_can(tmp_path: Path) -> None:
    """Here no descriptors are left for it at first."""
    loop, companions, said = Loop(), set[int](), list[str]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def tell(text: str) -> None:
        said.append(text)
        if "starting the process again" in text:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        elif "cannot start this" in text:  # nor at the next attempts
            loop.after(1.2, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))

    endpoints = [f"127.0.0.{number}:{free_port([f'127.0.0.{number}'])}" for number in (1, 2)]
    part = Member(loop, companions, endpoints, endpoints[1], "default", 5.0, None, tell)
    try:
        (first,) = companions
        os.kill(first, signal.SIGKILL)

        def look() -> None:
            if companions - {first}:
                loop.stop()
            else:
                loop.after(0.05, look)

        look()
        limit = loop.after(200, loop.stop)
        loop.run()
        limit.cancel()
        assert len(companions - {first}) == 1
        assert [line for line in said if "cannot start this" in line] == said[1:]
        assert len(said) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        part.close()
        loop.close()


def test_a_member_is_asked_through_the_same_client_each_time(tmp_path: Path) -> None:
    """A new one costs 30 ms of processor time."""
    endpoints = [f"127.0.0.{number}:{free_port([f'127.0.0.{number}'])}" for number in (1, 2)]
    runner = Runner(spec(endpoints, endpoints[0], tmp_path))
    clients = [runner._client(each) for each in endpoints * 3]
    assert len(set(map(id, clients))) == 2
