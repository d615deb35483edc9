"""From the job's secret to the CURVE keys of its store and its nodes. Knows the derivation; leaves sockets to
others.

Everybody with the secret can derive all of them, so it alone decides who may take part: the store accepts the
nodes' one public key and no other, a node talks to the store's one public key and no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils import z85

from fleetrun.envs.contract import derive_key, token_flaw
from fleetrun.errors import UsageError


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85-encoded, as libzmq wants them."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """CURVE keys of a job's store (rfc.zeromq.org/spec/26)."""

    store: KeyPair
    node: KeyPair


def store_keys(token: str) -> StoreKeys | None:
    """None without a secret. Raises UsageError for one that is too short."""
    if not token:
        return None
    wrong = token_flaw(token)
    if wrong is not None:
        raise UsageError(wrong)
    return StoreKeys(_pair(token, b"store"), _pair(token, b"node"))


def _pair(token: str, person: bytes) -> KeyPair:
    secret = z85.encode(derive_key(token, person))
    return KeyPair(zmq.curve_public(secret), secret)
