"""What a job wants of its nodes: how many, how patient, what to do about a loss. Knows no node."""

from __future__ import annotations

from dataclasses import dataclass

REFORM_QUIET = 2.0
"""How long a job that has run waits for more nodes, once there are enough; a loss seldom comes alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`fewest` to `most` nodes. `level` is --elastic_level: -1, 0 or 1. `lease` is how many seconds a node
    may be silent. `fixed_ranks` are the hosts of --ips, to name who is missing. `endpoint` is where they
    meet.
    """

    fewest: int
    most: int
    level: int = -1
    elastic_timeout: float = 30.0
    rdzv_timeout: float = 60.0
    lease: float = 10.0
    sort_ip: bool = False
    max_restart: int = 0
    fixed_ranks: tuple[str, ...] = ()
    endpoint: str = ""

    @property
    def elastic(self) -> bool:
        """Whether the job survives a node."""
        return self.fewest < self.most or self.level >= 0

    @property
    def reform_timeout(self) -> float:
        """How long a job that has run may be without enough nodes."""
        return max(1.0, self.elastic_timeout)

    @property
    def ghost(self) -> float:
        """How long a replacement of a dead node may have to wait for that one's lease to end."""
        return self.lease + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """While nodes meet: how many are there, who is missing (hosts, or `rank 3`; empty if nobody can tell),
    and the seconds left.
    """

    present: int
    fewest: int
    most: int
    missing: tuple[str, ...] = ()
    left: float = 0.0
