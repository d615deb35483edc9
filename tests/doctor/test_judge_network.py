"""Names, interfaces and ports: tables of facts."""

from dataclasses import replace

import pytest

from fleetrun.doctor import judge_machine
from fleetrun.doctor.facts import Network, Nic, Verdict, Wanted

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL

LO = Nic(name="lo", addresses=("127.0.0.1", "::1"))
ETH = Nic(name="eth0", addresses=("10.0.0.1",), speed=10_000)
NET = Network(name="h1", resolved=("10.0.0.1",), own=("10.0.0.1",), nics=(LO, ETH))
ALONE = Wanted()
SEVERAL = Wanted(several=True, address="10.0.0.1")


def seen(facts: Network, wanted: Wanted) -> list[tuple[str, Verdict]]:
    return [(each.check, each.verdict) for each in judge_machine.network(facts, wanted)]


@pytest.mark.parametrize(
    ("facts", "wanted", "name", "interface"),
    [
        (NET, ALONE, PASS, PASS),
        (NET, SEVERAL, PASS, PASS),
        (replace(NET, resolved=()), ALONE, PASS, PASS),
        (replace(NET, resolved=()), SEVERAL, WARN, PASS),
        (replace(NET, resolved=("127.0.1.1",)), ALONE, PASS, PASS),
        (replace(NET, resolved=("127.0.1.1",)), SEVERAL, WARN, PASS),
        (replace(NET, resolved=("127.0.1.1", "10.0.0.1")), SEVERAL, PASS, PASS),
        (
            replace(NET, resolved=("127.0.1.1",), own=("127.0.0.1",)), replace(SEVERAL, address="127.0.0.1"),
            PASS, PASS,
        ),
        (replace(NET, own=("127.0.1.1",)), replace(SEVERAL, address="h1"), PASS, FAIL),
        (replace(NET, own=("127.0.1.1",)), replace(ALONE, address="h1"), PASS, PASS),
        (NET, replace(SEVERAL, address="h1"), PASS, PASS),
        (replace(NET, seconds=5.0), ALONE, WARN, PASS),
        (replace(NET, nics=(LO, replace(ETH, up=False))), SEVERAL, PASS, FAIL),
        (replace(NET, nics=(LO, replace(ETH, speed=100))), SEVERAL, PASS, WARN),
        (replace(NET, nics=(LO, replace(ETH, speed=None))), SEVERAL, PASS, PASS),
        (replace(NET, nics=(LO, replace(ETH, name="docker0"))), SEVERAL, PASS, WARN),
        (replace(NET, nics=(LO,)), SEVERAL, PASS, PASS),
    ],
)  # fmt: skip
def test_network(facts: Network, wanted: Wanted, name: Verdict, interface: Verdict) -> None:
    assert seen(facts, wanted) == [("host name", name), ("interface", interface)]


def test_the_mend_names_the_interface() -> None:
    first, _ = judge_machine.network(replace(NET, resolved=("127.0.1.1",)), SEVERAL)
    assert first.mend.startswith("export GLOO_SOCKET_IFNAME=eth0")


def test_who_told_gloo_is_not_told_again() -> None:
    told = replace(SEVERAL, socket_names=(("GLOO_SOCKET_IFNAME", "eth0"),))
    assert seen(replace(NET, resolved=("127.0.1.1",)), told)[0] == ("host name", PASS)


@pytest.mark.parametrize(
    ("variable", "value", "fine"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "eth0", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth", True),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "ib", False),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("TP_SOCKET_IFNAME", "bond0", False),
    ],
)
def test_variables_that_name_interfaces(variable: str, value: str, fine: bool) -> None:
    found = seen(NET, replace(SEVERAL, socket_names=((variable, value),)))
    assert found[2:] == ([] if fine else [("interface", FAIL)])


@pytest.mark.parametrize(
    ("fixed", "kept", "verdict"),
    [
        ((), frozenset(), PASS),
        ((8000, 8001), frozenset(), PASS),
        ((40000, 40001), frozenset(), WARN),
        ((40000, 40001), frozenset({40000, 40001}), PASS),
        ((40000, 40001), frozenset({40000}), WARN),
    ],
)
def test_ports(fixed: tuple[int, ...], kept: frozenset[int], verdict: Verdict) -> None:
    finding = judge_machine.ports(replace(NET, kept=kept), Wanted(fixed_ports=fixed, ports=2))
    assert finding.verdict is verdict


def test_ports_are_shown_as_ranges() -> None:
    finding = judge_machine.ports(NET, Wanted(fixed_ports=(8002, 8000, 8001, 9000)))
    assert finding.found == "8000-8002,9000 are free"
    assert judge_machine.ports(None, Wanted(fixed_ports=(40000,))).verdict is PASS
