"""Names, interfaces and ports of this machine: from facts to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fleetrun.doctor.facts import Network, Nic, Wanted
from fleetrun.doctor.finding import Finding, failed, passed, warned

SLOW_NAMES = 1.0
SLOW_LINK = 1000
_BRIDGES = ("docker", "br-", "virbr", "cni", "veth", "podman")


def network(facts: Network, wanted: Wanted) -> Iterator[Finding]:
    yield _own_name(facts, wanted)
    yield _interface(facts, wanted)
    for variable, value in wanted.socket_names:
        yield from _named_interfaces(variable, value, facts.nics)


def _own_name(facts: Network, wanted: Wanted) -> Finding:
    """Gloo looks up the machine's own name and uses the interface of that address, unless told otherwise."""
    nic = _nic_of(facts)
    told = any(variable == "GLOO_SOCKET_IFNAME" for variable, _ in wanted.socket_names)
    mend = (
        f"export GLOO_SOCKET_IFNAME={nic.name if nic else 'INTERFACE'}, or put {wanted.address} {facts.name} "
    )
    mend += "into /etc/hosts."
    if not facts.resolved:
        found = f"{facts.name}: no address is known for this machine's own name"
        return warned("host name", found, mend) if wanted.several and not told else passed("host name", found)
    found = f"{facts.name} is {', '.join(facts.resolved)}"
    if facts.seconds > SLOW_NAMES:
        slow = f"{found}, which took {facts.seconds:.1f} s to find out"
        return warned("host name", slow, "Put the names of the machines into /etc/hosts.")
    local = all(_is_loopback(each) for each in facts.resolved)
    if local and wanted.several and not told and not all(map(_is_loopback, facts.own)):
        return warned("host name", f"{found}: Gloo would listen there, where no other machine comes", mend)
    return passed("host name", found)


def _interface(facts: Network, wanted: Wanted) -> Finding:
    nic = _nic_of(facts)
    named = wanted.address not in facts.own
    found = f"{wanted.address} is {', '.join(facts.own)}" if named and facts.own else wanted.address
    if named and wanted.several and facts.own and all(map(_is_loopback, facts.own)):
        mend = "Give --host the address by which others reach this machine, or correct /etc/hosts."
        return failed("interface", f"{found} here, where no other machine can come", mend)
    found += f" on {nic.name}" if nic else ""
    if nic is None:
        return passed("interface", found)
    if not nic.up:
        return failed("interface", f"{found}, which is down", "Choose another --nic or --host.")
    if nic.speed:
        found += f", {nic.speed} Mbit/s"
    if not wanted.several:
        return passed("interface", found)
    if nic.name.startswith(_BRIDGES):
        mend = "Choose the interface by which other machines reach this one: --nic or --host."
        return warned("interface", f"{found}, a bridge within this machine", mend)
    if nic.speed and nic.speed < SLOW_LINK:
        return warned("interface", found, "If there is a faster interface, choose it: --nic.")
    return passed("interface", found)


def _nic_of(facts: Network) -> Nic | None:
    """The interface of the address that the job uses."""
    return next((nic for nic in facts.nics if set(facts.own) & set(nic.addresses)), None)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _named_interfaces(variable: str, value: str, nics: tuple[Nic, ...]) -> Iterator[Finding]:
    """NCCL: prefixes, `=` before exact names, `^` before those to leave out. Gloo: exact names."""
    exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith(("=", "^="))
    names = [name for name in value.lstrip("^=").split(",") if name]
    there = [nic.name for nic in nics]
    if value.startswith("^") and variable == "NCCL_SOCKET_IFNAME":
        return
    if any(own == name or (own.startswith(name) and not exact) for own in there for name in names):
        return
    found = f"{variable} is {value}, and there is no such interface: there are {', '.join(there)}"
    yield failed("interface", found, f"Correct {variable}, or unset it.")


def ports(facts: Network | None, wanted: Wanted) -> Finding:
    """Those that were asked for could be reserved, or the plan had failed."""
    if not wanted.fixed_ports:
        return passed("ports", f"{wanted.ports} are free")
    fixed = sorted(wanted.fixed_ports)
    shown = _ranges(fixed)
    if facts is not None:
        low, high = facts.clients
        risky = [port for port in fixed if low <= port <= high and port not in facts.kept]
        if risky:
            found = f"{shown} are free now, but the kernel gives {low} to {high} to clients of any program"
            mend = f"Choose ports below {low}, or sysctl net.ipv4.ip_local_reserved_ports={_ranges(risky)}"
            return warned("ports", found, mend)
    return passed("ports", f"{shown} are free")


def _ranges(ports: list[int]) -> str:
    """`8000-8002,8010` of a sorted list."""
    parts: list[list[int]] = []
    for port in ports:
        if parts and port == parts[-1][-1] + 1:
            parts[-1].append(port)
        else:
            parts.append([port])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in parts)
