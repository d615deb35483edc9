"""Where this machine stands: its address, its place in a list, where machines meet. Names and addresses are
those that every machine has (loopback) or none (RFC 5737)."""

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError
from fleetrun.host.network import addresses, source_address
from fleetrun.launch.prepare import locate

NOWHERE = "192.0.2.7"


def site(words):
    return locate(resolve(read([*words.split(), "x.py"]), {}).settings)


def refusal(words):
    with pytest.raises(UsageError) as caught:
        site(words)
    return f"{caught.value.message} {caught.value.hint}"


def test_one_machine():
    found = site("")
    assert found.alone
    assert (found.address, found.hosts, found.master) == ("127.0.0.1", None, None)


def test_endpoint_lists_of_this_machine_alone():
    found = site("--servers 127.0.0.1:1,localhost:2 --trainers 127.0.0.1:3")
    assert found.alone


def test_a_list_gives_rank_and_meeting_point():
    found = site(f"--ips {NOWHERE},192.0.2.8 --host 192.0.2.8")
    assert not found.alone
    assert (found.rank, found.nnodes, found.master) == (1, (2, 2), f"{NOWHERE}:6768")
    assert (found.address, found.hosts) == ("192.0.2.8", ("192.0.2.8",))


def test_a_list_with_a_meeting_point_of_its_own():
    assert site(f"--ips {NOWHERE},192.0.2.8 --host {NOWHERE} --master 192.0.2.9:7").master == "192.0.2.9:7"


def test_an_ipv6_list():
    found = site("--ips [2001:db8::1],[2001:db8::2] --host 2001:db8::2")
    assert (found.rank, found.master) == (1, "[2001:db8::1]:6768")


def test_endpoint_lists_of_several_machines():
    found = site(f"--servers {NOWHERE}:1,192.0.2.8:1 --trainers 192.0.2.8:2,{NOWHERE}:2 --host 192.0.2.8")
    assert (found.rank, found.nnodes, found.machines) == (1, (2, 2), (NOWHERE, "192.0.2.8"))


def test_hosts_match_exactly():
    """Paddle looked for the address within the text: 192.0.2.1 was found in 192.0.2.10."""
    said = refusal("--ips 192.0.2.10,192.0.2.11 --host 192.0.2.1")
    assert "192.0.2.1" in said
    assert "192.0.2.10, 192.0.2.11" in said


def test_a_machine_that_is_not_in_the_list_is_told_both():
    said = refusal(f"--ips {NOWHERE},192.0.2.8")
    assert "127.0.0.1" in said
    assert f"{NOWHERE}, 192.0.2.8" in said
    assert "--host" in said


def test_two_names_of_this_machine():
    assert "are both this machine" in refusal(f"--ips 127.0.0.1,localhost,{NOWHERE}")
    assert "are both this machine" in refusal("--ips 127.0.0.1,127.0.0.2")


def test_loopback_among_others():
    assert "127.0.0.1 in --ips means a different machine" in refusal(f"--ips 127.0.0.1,{NOWHERE}")


def test_a_rank_that_the_list_does_not_give():
    assert "--rank 0 does not agree" in refusal(f"--ips {NOWHERE},192.0.2.8 --host 192.0.2.8 --rank 0")


def test_the_address_is_the_one_towards_the_meeting_point():
    assert site("--nnodes 2 --master 127.0.0.1:7").address == "127.0.0.1"
    assert site("--nnodes 2 --master [::1]:7").address == "::1"
    assert site("--nnodes 2 --master etcd://127.0.0.1:7,127.0.0.2:7").address == "127.0.0.1"
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_a_network_interface():
    assert site("--nnodes 2 --master 192.0.2.9:7 --nic lo").address == "127.0.0.1"
    assert "there is no such network interface" in refusal("--nnodes 2 --master 192.0.2.9:7 --nic nonic")
    assert "127.0.0.1" in addresses()


def test_a_host_that_is_not_this_machine():
    said = refusal(f"--nnodes 2 --master 192.0.2.9:7 --host {NOWHERE}")
    assert f"{NOWHERE} is not an address of this machine" in said


def test_etcd_makes_even_one_machine_a_member():
    assert not site("--nnodes 1 --master etcd://127.0.0.1:7").alone
