"""Several hosts on one machine: each a network namespace with an address, a host name and a folder of its
own, on a switch that can lose what they say.

    with hosts(3, folder) as (a, b, c):
        server = a.start([sys.executable, "server.py"])
        a.drop_from(b)

Every set of hosts is a network of its own, which nothing else can reach; so the addresses can always be the
same. What runs on a host is a process of this machine: `kill` and `/proc` work from anywhere. Faults happen
in the switch, where neither side notices but by silence. Names of hosts are known to the hosts.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import netns
from tests.support.cluster import PATH
from tests.support.command import Launch

needs_hosts = [
    pytest.mark.hosts,
    pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable()),
]
"""For `pytestmark`."""

_PROXY = Path(__file__).parent / "scripts" / "delaying_proxy.py"
_NETWORK = "10.77.0"
_ENTER = 'echo "$0" > /proc/sys/kernel/hostname; mount --bind "$1" /etc/hosts; shift; exec "$@"'
_groups = itertools.count()


class Host:
    """One of them. `enter` is a command that runs another there; a process keeps its pid over it."""

    def __init__(self, switch: Switch, number: int, folder: Path) -> None:
        self.name = f"h{number}"
        self.address = f"{_NETWORK}.{number}"
        self.port = f"p{number}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.namespace = netns.name_of(switch.group, self.name)
        self.enter = (
            "nsenter", f"--net={netns.path_of(self.namespace)}",
            "unshare", "--uts", "--mount", "sh", "-c", _ENTER, self.name, str(switch.names),
        )  # fmt: skip
        self.names = switch.names
        """What all hosts have as /etc/hosts."""
        self._switch = switch
        self._launches: list[Launch] = []

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Launch:
        """A process there, in the host's folder; ended with the host."""
        path = {"PYTHONPATH": PATH, "PYTHONUNBUFFERED": "1"}
        launch = Launch([*self.enter, *argv], self.folder, {**path, **(env or {})}, **options)
        self._launches.append(launch)
        return launch

    def proxy(self, target: str, delay: float) -> str:
        """A way to `target` that takes `delay` seconds longer in each direction: its `host:port`."""
        proxy = self.start([sys.executable, str(_PROXY), self.address, target, str(delay)])
        proxy.until(lambda: "\n" in proxy.out, "the proxy's port")
        return f"{self.address}:{proxy.out.strip()}"

    def pids(self) -> list[int]:
        """Whatever runs there."""
        return netns.pids_in(self.namespace)

    def translate(self, outside: str, inside: str) -> None:
        """What it sends to the one address goes to the other."""
        chain = f"type nat hook output priority -100; ip daddr {outside} dnat to {inside}"
        table = f"table ip outside {{ chain output {{ {chain}; }}\n}}"
        netns.run(*self.enter[:2], "nft", "-f", "-", text=table)

    # ---- faults

    def link_down(self) -> None:
        """The cable is out. Addresses and connections stay."""
        self._switch.configure(f"link set {self.port} down")

    def link_up(self) -> None:
        self._switch.configure(f"link set {self.port} up")

    def drop_from(self, *others: Host) -> None:
        """Nothing that they send arrives here."""
        self._switch.cut((other, self) for other in others)

    def drop_to(self, *others: Host) -> None:
        self._switch.cut((self, other) for other in others)

    def partition_from(self, *others: Host) -> None:
        self.drop_from(*others)
        self.drop_to(*others)

    def lossy(self, percent: int) -> None:
        """So many of 100 packets, 99 at most, are lost, in each direction."""
        self._switch.lose(self, percent)

    def reset_connections(self) -> None:
        """Every TCP connection over the network breaks, on both sides."""
        netns.run(*self._inside, "ss", "-K", "-H", "-t", "src", self.address)

    def heal(self) -> None:
        """No fault of this host any more."""
        self._switch.heal(self)
        self.link_up()

    @property
    def _inside(self) -> tuple[str, ...]:
        return self.enter[:2]

    def set_up(self) -> None:
        netns.configure(
            f"link set lo up\naddress add {self.address}/24 dev eth0\nlink set eth0 up", self.namespace
        )

    def close(self) -> None:
        for launch in self._launches:
            launch.close()


class Switch:
    """Connects them, in a namespace of its own. Forgets packets as told."""

    def __init__(self, count: int, folder: Path) -> None:
        self.group = next(_groups)
        self.namespace = netns.name_of(self.group, "switch")
        self.names = folder / "etc-hosts"
        self.hosts = [Host(self, number, folder) for number in range(1, count + 1)]
        self._cut: set[tuple[str, str]] = set()
        self._lossy: dict[str, int] = {}

    def set_up(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        self.names.write_text("\n".join([*lines, ""]))
        namespaces = [self.namespace, *(host.namespace for host in self.hosts)]
        netns.configure("\n".join(f"netns add {name}" for name in namespaces))
        self.configure("link add name bridge type bridge\nlink set bridge up")
        for host in self.hosts:
            veth = f"link add {host.port} type veth peer name eth0 netns {host.namespace}"
            self.configure(f"{veth}\nlink set {host.port} master bridge up")
            host.set_up()

    def tear_down(self) -> None:
        for host in self.hosts:
            host.close()
            netns.delete(host.namespace)
        netns.delete(self.namespace)

    def configure(self, lines: str) -> None:
        netns.configure(lines, self.namespace)

    def cut(self, pairs: Iterator[tuple[Host, Host]]) -> None:
        self._cut |= {(sender.port, receiver.port) for sender, receiver in pairs}
        self._apply()

    def lose(self, host: Host, percent: int) -> None:
        self._lossy[host.port] = percent
        self._apply()

    def heal(self, host: Host) -> None:
        self._cut = {pair for pair in self._cut if host.port not in pair}
        self._lossy.pop(host.port, None)
        self._apply()

    def _apply(self) -> None:
        """All of it anew, in one transaction. ARP passes: on a routed network it does not get lost either."""
        rules = [f"iifname {sender} oifname {receiver} drop" for sender, receiver in sorted(self._cut)]
        for port, percent in self._lossy.items():
            loss = f"{port} numgen random mod 100 < {percent} drop"
            rules += [f"iifname {loss}", f"oifname {loss}"]
        chain = "\n".join(f"ether type ip {rule};" for rule in rules)
        hook = "type filter hook forward priority 0;"
        table = f"table bridge faults {{ chain forward {{ {hook}\n{chain}\n}}\n}}\n"
        inside = ("nsenter", f"--net={netns.path_of(self.namespace)}")
        text = f"table bridge faults\ndelete table bridge faults\n{table}"  # the first line: it may not exist
        netns.run(*inside, "nft", "-f", "-", text=text)


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[tuple[Host, ...]]:
    """So many, their folders below `folder`. At the end whatever runs on them is killed.

    What an earlier run of the tests could not clean away is cleaned away first.
    """
    netns.sweep()
    switch = Switch(count, folder)
    with ExitStack() as stack:
        stack.callback(switch.tear_down)
        switch.set_up()
        yield tuple(switch.hosts)
