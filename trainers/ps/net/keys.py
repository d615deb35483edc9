"""Keys: from the job's secret to the CURVE keys of its servers and trainers. Knows the derivation; leaves
sockets to `transport`.

Everybody with the secret can derive all four keys, so it alone decides who may take part: a server accepts
the trainers' one public key and no other, a trainer talks to the servers' one public key and no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from trainers.errors import UsageError

TOKEN = "FLEETRUN_TOKEN"
"""The environment variable with the job's secret: any text of at least 16 characters."""

_SHORTEST = 16


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85-encoded, as libzmq wants them."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class JobKeys:
    """CURVE keys of a job (rfc.zeromq.org/spec/26)."""

    server: KeyPair
    trainer: KeyPair


def keys_of(environ: Mapping[str, str]) -> JobKeys | None:
    """The keys of this job; None when it has no secret. Raises UsageError for a secret that is too short."""
    token = environ.get(TOKEN, "")
    if not token:
        return None
    if len(token) < _SHORTEST:
        raise UsageError(
            f"{TOKEN} has {len(token)} characters; a secret that can be guessed protects nothing: "
            f"use at least {_SHORTEST}, for example of `openssl rand -hex 16`"
        )
    return JobKeys(_pair(token, b"server"), _pair(token, b"trainer"))


def _pair(token: str, person: bytes) -> KeyPair:
    secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=b"fleetrun" + person).digest())
    return KeyPair(zmq.curve_public(secret), secret)
