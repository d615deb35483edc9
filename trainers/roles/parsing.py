"""Parse environment variables and lists of endpoints, with errors that name the variable or the list."""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.aliases import Environ, Strings
from fleetrun.envs.contract import split_endpoint
from trainers.errors import UsageError

# ---- Typed look-ups in an environment, whose errors name the variable


class Variables:
    """Typed look-ups. They raise UsageError for a missing or malformed variable.

    `why` ends the sentence `X is not set, but ...`.
    """

    def __init__(self, environ: Environ, why: str) -> None:
        self.environ = environ
        self._why = why

    def text(self, name: str) -> str:
        value = self.environ.get(name, "")
        if not value:
            raise UsageError(f"{name} is not set, but {self._why}")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number from 0 on. With a default, the variable may be unset."""
        if default is not None and name not in self.environ:
            return default
        return whole(name, self.text(name))

    def listed(self, name: str) -> list[str]:
        """Return the parts between commas, or an empty list if the variable is unset."""
        return [each for each in self.environ.get(name, "").replace(" ", "").split(",") if each]

    def first(self, name: str) -> int | None:
        """Return the first of whole numbers between commas, or None if the variable is unset."""
        listed = self.listed(name)
        return whole(name, listed[0]) if listed else None


def whole(name: str, value: str) -> int:
    """Return the whole number from 0 on that the variable `name` has."""
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"{name} is {value!r}; it must be a whole number")
    return int(value)


# ---- Lists of endpoints written by hand, checked before any connection

MOST_PORTS = 65_535


def endpoints(name: str, given: Sequence[str] | None) -> Strings:
    """Return the endpoints as a tuple, empty for None.

    Raises UsageError, which names the list, unless it is a list of `host:port` (`[address]:port` for IPv6)
    without repetitions.
    """
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UsageError(f'{name} is {given!r}; it must be a list like ["10.0.0.1:6001", "10.0.0.2:6001"]')
    for endpoint in given:
        if not _well_formed(endpoint):
            raise UsageError(f'{name} has {endpoint!r}; an endpoint is "host:port", with a port up to 65535')
    twice = sorted({endpoint for endpoint in given if given.count(endpoint) > 1})
    if twice:
        raise UsageError(f"{name} has {twice[0]!r} twice; each process needs a different endpoint")
    return tuple(given)


def apart(servers: Sequence[str], workers: Sequence[str], names: tuple[str, str]) -> None:
    """Raise UsageError if an endpoint is in both lists."""
    both = sorted(set(servers) & set(workers))
    if both:
        raise UsageError(
            f"{both[0]!r} is in both {names[0]} and {names[1]}; each process needs a different endpoint"
        )


def position(own: str, among: Sequence[str]) -> int:
    """Return the number of the process on its node, the count of earlier endpoints on its host."""
    host = split_endpoint(own)[0]
    return [each for each in among if split_endpoint(each)[0] == host].index(own)


def _well_formed(endpoint: object) -> bool:
    if not isinstance(endpoint, str):
        return False
    host, _, port = endpoint.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= MOST_PORTS):
        return False
    bracketed = host.startswith("[") and host.endswith("]")
    return bool(host.strip("[]")) and bracketed == (":" in host) and not any(map(str.isspace, host))
