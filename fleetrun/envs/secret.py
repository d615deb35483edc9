"""The job's secret: its name, what is too short to be one, and the keys that come of it. Knows no socket and
no error of either package; who asks says it in its own words. Standard library only.
"""

from __future__ import annotations

TOKEN = "FLEETRUN_TOKEN"
"""The environment variable with the job's secret: any text of at least 16 characters."""

_SHORTEST = 16


def token_flaw(token: str, source: str = TOKEN) -> str | None:
    """What is wrong with a secret out of `source`, without showing it; None when nothing is."""
    if len(token) >= _SHORTEST:
        return None
    return (
        f"{source} has {len(token)} characters; a secret that can be guessed protects nothing: "
        f"use at least {_SHORTEST}, for example of `openssl rand -hex 16`"
    )


def derive_key(token: str, person: bytes) -> bytes:
    """32 bytes for one person (at most 8 bytes: `server`, `trainer`, ...) of the job. Another person's, or
    the secret, cannot be told from them.
    """
    from hashlib import blake2b  # late: it loads OpenSSL, which a job without a secret does without

    return blake2b(token.encode(), digest_size=32, person=b"fleetrun" + person).digest()
