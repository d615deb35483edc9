"""Text to hosts, ports and endpoints, and their rules. Resolves no name and opens no socket."""

from __future__ import annotations

import re

from fleetrun.envs.values import BadValue, unique, whole

port = whole(1, 65535)

_NAME = r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
_NUMBERS = r"[0-9.]+"
_ENDPOINT = "it must be host:port, such as 10.0.0.1:6170 or [::1]:6170"


def host(text: str) -> str:
    """A host name, an IPv4 or an IPv6 address (with or without brackets), without a port."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not (_is_ipv6(bare) if ":" in bare else _is_name(bare)):
        raise BadValue("it must be a host name or an IP address, without a port")
    return bare


def _is_name(text: str) -> bool:
    if re.fullmatch(_NUMBERS, text):
        octets = text.split(".")
        return len(octets) == 4 and all(octet.isdigit() and int(octet) <= 255 for octet in octets)
    return re.fullmatch(_NAME, text) is not None


def _is_ipv6(text: str) -> bool:
    from ipaddress import IPv6Address  # late: rare, and 2 ms

    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def endpoint(text: str) -> str:
    """`host:port`; an IPv6 address stands in brackets."""
    name, _, number = text.rpartition(":")
    bracketed = name.startswith("[") and name.endswith("]")
    if not number.isdecimal() or (":" in name) != bracketed:
        raise BadValue(_ENDPOINT)
    try:
        host(name)
    except BadValue:
        raise BadValue(_ENDPOINT) from None
    try:
        return f"{name}:{port(number)}"
    except BadValue:
        raise BadValue(f"the port of {text} must be from 1 to 65535") from None


def host_list(text: str) -> tuple[str, ...]:
    """Hosts joined by commas; each once."""
    try:
        return unique(tuple(host(part.strip()) for part in text.split(",")))
    except BadValue as error:
        raise _in_list(error, text) from None


def endpoint_list(text: str) -> tuple[str, ...]:
    """Endpoints joined by commas; each once. An empty text is an empty list, as in Paddle."""
    if not text:
        return ()
    try:
        return unique(tuple(endpoint(part.strip()) for part in text.split(",")))
    except BadValue as error:
        raise _in_list(error, text) from None


def trainer_list(text: str) -> tuple[str, ...]:
    """Endpoints, or hosts alone: Paddle gives those their ports (`with_ports`)."""
    parts = tuple(part.strip() for part in text.split(","))
    if not text or any(":" in part for part in parts):
        return endpoint_list(text)
    return tuple(host(part) for part in parts)


def with_ports(hosts: tuple[str, ...], first: int) -> tuple[str, ...]:
    """Endpoints of hosts that came without a port, numbered upwards from `first`; endpoints stay."""
    return tuple(
        text if ":" in text else f"{text}:{number}" for number, text in enumerate(hosts, start=first)
    )


def stage_endpoints(text: str) -> tuple[tuple[str, ...], ...]:
    """Stages joined by `;`, the endpoints of one stage by `,`."""
    if not text:
        return ()
    stages = tuple(endpoint_list(stage.strip()) for stage in text.split(";"))
    if not all(stages):
        raise BadValue("it has a stage without an endpoint")
    unique(tuple(address for stage in stages for address in stage))
    return stages


def _in_list(error: BadValue, text: str) -> BadValue:
    """The same requirement for each entry, when there are several."""
    message = str(error)
    return BadValue(message.replace("it must", "each entry must", 1) if "," in text else message)


def port_range(text: str) -> tuple[int, int]:
    """`LOW:HIGH`, both included."""
    low, _, high = text.partition(":")
    try:
        first, last = port(low.strip()), port(high.strip())
    except BadValue:
        raise BadValue("it must be LOW:HIGH with ports from 1 to 65535, such as 35100:64000") from None
    if first > last:
        raise BadValue(f"it must be LOW:HIGH, and {first} is above {last}")
    return first, last


_nodes = whole(1, 65535)


def node_range(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX` machines."""
    low, colon, high = text.partition(":")
    try:
        least = _nodes(low.strip())
        most = _nodes(high.strip()) if colon else least
    except BadValue:
        raise BadValue("it must be a number of machines, N or MIN:MAX, such as 2 or 2:4") from None
    if least > most:
        raise BadValue(f"it must be MIN:MAX, and {least} is above {most}")
    return least, most


def meeting_point(text: str) -> str:
    """`host:port`, `http://host:port` (the same), or `etcd://host:port[,host:port][?NAME=VALUE&...]`."""
    scheme, _, rest = text.rpartition("://")
    if scheme not in ("", "http", "etcd"):
        raise BadValue("it must be host:port or etcd://host:port")
    if scheme == "etcd":
        members, question, parameters = rest.partition("?")
        return f"etcd://{','.join(endpoint_list(members) or _missing())}{question}{parameters}"
    return endpoint(rest)


def _missing() -> tuple[str, ...]:
    raise BadValue(_ENDPOINT)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` -> host without brackets, port."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
