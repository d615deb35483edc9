"""Ports: as asked for, told apart from taken ones, and never the same twice on one machine."""

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.command import Fleetrun
from tests.support.traces import port_names

TWO = ("--nproc_per_node", "2")
TELL = "tell('endpoints', os.environ['PADDLE_TRAINER_ENDPOINTS'], os.environ['PADDLE_CURRENT_ENDPOINT'])\n"


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_run(length: int) -> int:
    """The first of so many ports in a row that are free, below those that the kernel gives away."""
    while True:
        first = random.randrange(10_000, 30_000)
        sockets = []
        try:
            for port in range(first, first + length):
                sockets.append(socket.socket())
                sockets[-1].bind(("", port))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return first


def ports_of(text: str) -> list[int]:
    return [int(endpoint.rpartition(":")[2]) for endpoint in text.split(",")]


def test_a_taken_start_port_is_an_error_that_names_who_has_it(fleetrun: Fleetrun):
    with listening() as port:
        launch = fleetrun.run("--start_port", str(port), fleetrun.script("tell('here')"))
    assert launch.code == 125
    assert f"process {os.getpid()} (" in launch.err
    assert f"port {port}" in launch.err
    assert not launch.told("here")
    assert not fleetrun.logs()


def test_a_port_that_another_launch_has_reserved_is_taken_too(fleetrun: Fleetrun):
    first = fleetrun.start(fleetrun.script(f"leave_on_term()\n{TELL}\nstay()"))
    first.until_ready(1)
    (port,) = ports_of(first.told("endpoints")[0].split()[2])
    second = fleetrun.run("--start_port", str(port), fleetrun.script("tell('here')", "other.py"))
    assert second.code == 125
    assert f"port {port} " in second.err
    assert f"process {first.launcher}" in second.err
    first.send(15)
    first.wait()


@pytest.mark.parametrize("how", ["--start_port", "FLAGS_START_PORT", "PADDLE_START_PORT"])
def test_ports_follow_one_another_from_the_start_port(fleetrun: Fleetrun, how: str):
    port = free_run(6)
    words, env = (("--start_port", str(port)), {}) if how.startswith("-") else ((), {how: str(port)})
    launch = fleetrun.run(
        "--server_num", "2", "--trainer_num", "2", *words, "--dry_run", "--json", fleetrun.script(""), env=env
    )
    plan = json.loads(launch.out)
    assert [ports_of(each["endpoint"])[0] for each in plan["containers"]] == [
        port,
        port + 1,
        port + 2,
        port + 3,
    ]


def test_port_range_bounds_them_and_says_when_it_is_too_small(fleetrun: Fleetrun):
    port = free_run(8)
    script = fleetrun.script(TELL)
    launch = fleetrun.run(*TWO, script, env={"PORT_RANGE": f"{port}:{port + 7}"})
    assert launch.code == 0, launch
    found = ports_of(launch.told("endpoints")[0].split()[2])
    assert len(set(found)) == 2
    assert set(found) <= set(range(port, port + 8))
    launch = fleetrun.run(*TWO, script, env={"PORT_RANGE": f"{port}:{port + 1}"})
    assert launch.code == 125
    assert f"PORT_RANGE={port}:{port + 1}" in launch.err


def test_the_owner_can_bind_its_port_and_others_get_another(fleetrun: Fleetrun):
    script = fleetrun.script(f"""
{TELL}
import socket
host, port = os.environ["PADDLE_CURRENT_ENDPOINT"].split(":")
server = socket.create_server((host, int(port)))
tell("bound")
meet(2)
""")
    launch = fleetrun.run(*TWO, script)
    assert launch.code == 0, launch
    assert len(launch.told("bound")) == 2
    assert not port_names(launch.told("endpoints")[0].split()[2].split(","))


def test_a_listed_endpoint_that_is_taken(fleetrun: Fleetrun):
    with listening() as port:
        words = ("--servers", f"127.0.0.1:{port}", "--trainers", f"127.0.0.1:{free_run(1)}")
        launch = fleetrun.run(*words, fleetrun.script("tell('here')"))
    assert launch.code == 125
    assert f"port {port} " in launch.err
    assert not launch.told("here")


@pytest.mark.slow
def test_thirty_launches_at_the_same_time(fleetrun: Fleetrun):
    script = fleetrun.script(f"{TELL}\nwait_for_go()")
    began = time.monotonic()
    launches = [fleetrun.start("--log_dir", f"log{number}", *TWO, script) for number in range(30)]
    for launch in launches:
        launch.until_told("endpoints", 2)
    everyone = [launch.told("endpoints")[0].split()[2] for launch in launches]
    ports = [port for text in everyone for port in ports_of(text)]
    assert len(ports) == len(set(ports)) == 60, f"after {time.monotonic() - began:.1f} s"
    for launch in launches:
        launch.go()
    assert [launch.wait() for launch in launches] == [0] * 30


def test_a_launch_closes_what_it_opened(fleetrun: Fleetrun):
    """PYTHONDEVMODE shows what is left open, in the launcher, its helpers and other commands."""
    dev = {"PYTHONDEVMODE": "1"}
    script = fleetrun.script('tell("ready", os.getpid())\nwait_for_go()\n')
    launch = fleetrun.start(*TWO, "--hang_timeout", "1h", script, env=dev)
    launch.until_ready(2)
    said = [fleetrun.run(command, env=dev) for command in ("status", "stacks", "why", "logs")]
    launch.go()
    assert launch.wait() == 0, launch
    said += [launch, fleetrun.run("report", env=dev)]
    assert [each for each in said if "ResourceWarning" in each.out + each.err] == []
