"""The address of an etcd: `etcd://a:2379,b:2379?cacert=ca.pem&cert=me.pem&key=me.key&user=me`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl

from fleetrun.envs.settings.parsing import BadValue, closest, endpoint, endpoint_list
from fleetrun.errors import UsageError

SCHEME = "etcd://"
PASSWORD_VARIABLE = "FLEETRUN_ETCD_PASSWORD"
DEFAULT_PORT = 2379

_FILES = ("cacert", "cert", "key")
_PARAMETERS = (*_FILES, "user")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Members of one cluster (`host:port`), and how to prove who is who. Files are paths of PEM files."""

    endpoints: tuple[str, ...]
    cacert: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""

    @property
    def secure(self) -> bool:
        """Whether to speak TLS: as soon as any file for it is named."""
        return bool(self.cacert or self.cert)


def parse(url: str) -> EtcdAddress:
    """Raises UsageError. A message never repeats what may be a password."""
    if not url.startswith(SCHEME):
        raise UsageError(f"the address of an etcd begins with {SCHEME}")
    where, _, query = url.removeprefix(SCHEME).partition("?")
    if "@" in where:
        raise UsageError(
            "the address of an etcd holds no password, and no user before its host",
            hint=f"name the user by '?user=NAME' and set {PASSWORD_VARIABLE}",
        )
    parameters = _parameters(query)
    if parameters.get("key") and not parameters.get("cert"):
        raise UsageError("the address of the etcd names a key without its cert")
    return EtcdAddress(_endpoints(where.removesuffix("/")), **parameters)


def _endpoints(text: str) -> tuple[str, ...]:
    parts = [part.strip() for part in text.split(",")]
    try:
        return endpoint_list(",".join(map(_with_port, parts)) or ",")
    except BadValue as error:
        raise UsageError(
            f"the address of the etcd names {text!r}; {error}", hint=f"such as {SCHEME}h1:2379,h2:2379"
        ) from None


def _with_port(text: str) -> str:
    try:
        return endpoint(f"{text}:{DEFAULT_PORT}")
    except BadValue:
        return text


def _parameters(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise UsageError("what follows '?' in the address of the etcd must be NAME=VALUE&...") from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in _PARAMETERS:
            meant = closest(name, _PARAMETERS)
            raise UsageError(
                f"the address of the etcd has a parameter {name!r}; known are {', '.join(_PARAMETERS)}",
                hint=f"did you mean {meant[0]}?" if meant else _password_hint(name),
            )
        if name in found or not value:
            raise UsageError(f"the address of the etcd must give {name} once, with a value")
        found[name] = value
    return found


def _password_hint(name: str) -> str | None:
    return f"the password belongs into {PASSWORD_VARIABLE}" if name.startswith("pass") else None


def password_for(address: EtcdAddress, environ: Mapping[str, str]) -> str:
    """Of the address's user; empty when it names none. Raises UsageError when it is not set."""
    if address.user and PASSWORD_VARIABLE not in environ:
        raise UsageError(
            f"the address of the etcd names the user {address.user}, but {PASSWORD_VARIABLE} is not set"
        )
    return environ[PASSWORD_VARIABLE] if address.user else ""
