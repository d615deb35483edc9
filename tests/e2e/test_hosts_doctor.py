"""On three hosts: `fleetrun doctor` by a list of names; one of them lets nobody in."""

import json

import pytest

from tests.support import netns
from tests.support.hosts import needs_hosts
from tests.support.nodes import Nodes, codes

pytestmark = [*needs_hosts, pytest.mark.slow]


def test_by_a_list_of_names(three: Nodes) -> None:
    listed = ",".join(host.name for host in three.hosts)
    words = ("doctor", "--json", "--ips", listed, "--no_python", "true")
    launches = [command.start(*words) for command in three.commands]
    assert codes(launches) == [0, 0, 0], launches
    for launch in launches:
        found = json.loads(launch.out)
        assert {frozenset((link["from"], link["to"])) for link in found["links"]} == {
            frozenset(("h1", "h2")), frozenset(("h1", "h3")), frozenset(("h2", "h3")),
        }  # fmt: skip
        assert [link["error"] for link in found["links"]] == ["", "", ""]
        assert found["facts"]["network"]["own"][0].startswith("10.77.0.")


def test_one_that_cannot_be_reached_is_named_by_all(three: Nodes) -> None:
    """What is sent to its ports is refused there; the store it reaches."""
    closed = three.hosts[2]
    inside = closed.enter[:2]
    rules = "type filter hook input priority 0; tcp flags & (syn|ack) == syn reject with tcp reset;"
    netns.run(*inside, "nft", "-f", "-", text=f"table inet closed {{ chain input {{ {rules} }}\n}}")
    words = ("doctor", "--json", "--nnodes", "3", "--master", three.master, "--no_python", "true")
    launches = [command.start(*words) for command in three.commands]
    assert codes(launches) == [1, 1, 1], launches
    for launch in launches:
        checks = [each for section in json.loads(launch.out)["sections"] for each in section["checks"]]
        failed = [each["found"] for each in checks if each["verdict"] == "fail"]
        assert failed
        assert all("h3 (10.77.0.3): port" in text and "refused" in text for text in failed), failed
