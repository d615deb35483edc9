"""Keys: from the job's secret to the CURVE keys of its servers and trainers. Knows who is who; leaves
the derivation to the contract, which the launcher shares, and sockets to `transport`.

Everybody with the secret can derive all four keys, so it alone decides who may take part: a server accepts
the trainers' one public key and no other, a trainer talks to the servers' one public key and no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from fleetrun.envs.contract import TOKEN, derive_key, token_flaw
from trainers.errors import UsageError

__all__ = ["TOKEN", "JobKeys", "KeyPair", "keys_of"]


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
    wrong = token_flaw(token)
    if wrong is not None:
        raise UsageError(wrong)
    return JobKeys(_pair(token, b"server"), _pair(token, b"trainer"))


def _pair(token: str, person: bytes) -> KeyPair:
    secret = z85.encode(derive_key(token, person))
    return KeyPair(zmq.curve_public(secret), secret)
