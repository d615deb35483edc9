"""What nodes need of a store to meet in: compare-and-set, leases, watches. Knows no transport and no meaning
of any key.

A store belongs to one job; keys are relative to it. A client *mirrors* the prefixes that it watches: whoever
uses it looks at the mirror whenever it has changed, decides anew and writes; a write that comes too late
fails and the change that was faster arrives. Nothing has to be remembered over a lost connection: after it
the mirror is whole again, and whoever uses it decides anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fleetrun.errors import LaunchError

ABSENT = 0
"""As an expected revision: the key must not exist."""


def forgiven(lease: float) -> float:
    """For how many seconds a store that sees a connection end waits for its client. Who broke it may also
    stand still: with a long lease that is no reason to give it up.
    """
    return min(max(1.0, lease / 10), 4.0, lease / 4)


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and its history: the store's revision (1, 2, ... over all keys) at which the key was made, and
    at which it was last written.
    """

    value: bytes
    created: int
    revision: int


class Listener(Protocol):
    """Who uses a store. Calls come from the loop and must return at once."""

    def changed(self) -> None:
        """The mirror is different: called once for all changes that arrived together."""
        ...

    def up(self, *, fresh: bool) -> None:
        """The store answers (again), and the mirror is whole. `fresh`: under a new lease; what was written
        under an earlier one is gone or will go, and has to be written again.
        """
        ...

    def down(self, why: str) -> None:
        """The store has not answered for a while, or refused the connection; `why` is for people, such as
        `h1:6768: Connection refused`. Called again when `why` changes. The client keeps trying.
        """
        ...

    def lost(self, error: LaunchError) -> None:
        """The store will never answer this client: its host is gone, or it refused this node (secret,
        version, job). The client has stopped.
        """
        ...


class Store(Protocol):
    """One node's client. It keeps its own lease alive from `open` to `close`."""

    @property
    def mirror(self) -> Mapping[str, Entry]:
        """What is known of all watched prefixes, by key."""
        ...

    def open(self, listener: Listener) -> None:
        """Begin to connect. Calls of the other methods before `up` are fine: they wait."""
        ...

    def watch(self, prefix: str) -> None:
        """Mirror the keys under `prefix` from now on; `changed` follows, even if there are none. What ends
        with `/`, or is empty, covers all keys that begin with it; anything else is one whole key.
        """
        ...

    def unwatch(self, prefix: str) -> None:
        """No longer; its keys leave the mirror."""
        ...

    def put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        leased: bool = False,
        then: Callable[[bool], None] | None = None,
    ) -> None:
        """Write. `expect`: only if the key's revision is this one (ABSENT: if there is no such key).

        `leased`: the key goes when this client's lease ends. `then` is told whether it was written; False
        also when the connection was lost on the way and nobody knows.
        """
        ...

    def delete(
        self, key: str, *, expect: int | None = None, then: Callable[[bool], None] | None = None
    ) -> None:
        """Like `put`. Deleting what does not exist is done at once."""
        ...

    def delete_prefix(self, prefix: str) -> None:
        """All keys that begin with `prefix`, of this job and no other; "" is everything of the job."""
        ...

    def read(self, key: str, then: Callable[[Entry | None], None]) -> None:
        """One look at one key, without watching. Repeated by the client until it is answered."""
        ...

    def close(self) -> None:
        """End the lease at once: what was written under it is gone for everybody. Waits for what was asked
        before to leave this process, but not long (0.5 s; 1 s for an etcd, which has to write it down).
        """
        ...
