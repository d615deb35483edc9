"""A parameter server's job on paper: from what one step costs here to where many hosts saturate. Pure.

Every cost of a trainer's step is taken as `base + servers * each`: keys and rows are spread over the servers
and cost the same in sum, while every server asked costs a request. Both come from least squares over measured
jobs of different numbers of servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

METRICS = ("trainer_cpu", "server_cpu", "messages", "bytes_in", "bytes_out")


@dataclass(frozen=True, slots=True)
class Line:
    """base + servers * each."""

    base: float
    each: float

    def at(self, servers: int) -> float:
        return self.base + servers * self.each


Costs = Mapping[str, Line]
"""The METRICS of a step of one trainer: CPU seconds of the trainer, and of all servers together; messages
both ways; bytes into and out of the servers.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """A job of `servers` x `trainers`. `messages` and `bytes`, both ways, of a step of all trainers.
    `limits`: what keeps them from more -> how many steps in a second it allows all trainers together.
    """

    servers: int
    trainers: int
    messages: float
    bytes: float
    limits: Mapping[str, float]

    @property
    def limit(self) -> str:
        """What saturates first."""
        return min(self.limits, key=lambda name: self.limits[name])

    @property
    def steps(self) -> float:
        """Steps a second of all trainers together, then."""
        return self.limits[self.limit]

    @property
    def server_messages(self) -> float:
        """Messages that each server takes and gives in a second, then."""
        return self.messages / self.trainers * self.steps / self.servers

    @property
    def server_bytes(self) -> float:
        """Bytes that each server takes and gives in a second, then."""
        return self.bytes / self.trainers * self.steps / self.servers


def fit(steps: Sequence[Mapping[str, float]]) -> Costs:
    """`steps`: for each measured job, the METRICS of one step of one trainer, and `servers`.

    Raises ValueError when all jobs had the same number of servers.
    """
    servers = np.array([each["servers"] for each in steps], np.float64)
    if len(set(servers)) < 2:
        raise ValueError("the paper model needs jobs of at least two numbers of servers")
    lines = {}
    for name in METRICS:
        values = np.array([each[name] for each in steps], np.float64)
        slope, base = np.polyfit(servers, values, 1)
        # Noise must not make more servers cheaper: then all of it is base.
        lines[name] = Line(float(base), float(slope)) if slope > 0 else Line(float(values.mean()), 0.0)
    return lines


def load(
    costs: Costs, servers: int, trainers: int, *, links: Mapping[str, float], server_cores: float = 1.0
) -> Load:
    """What limits such a job when every trainer has a core of its own, every server `server_cores` of them
    and a full-duplex link: `links` are the kinds to look at, in bytes a second each way.
    """
    into, out = costs["bytes_in"].at(servers), costs["bytes_out"].at(servers)
    limits = {
        "trainers' CPU": trainers / costs["trainer_cpu"].at(servers),
        "servers' CPU": server_cores * servers / costs["server_cpu"].at(servers),
    }
    limits |= {name: speed * servers / max(into, out) for name, speed in links.items()}
    return Load(
        servers=servers,
        trainers=trainers,
        messages=trainers * costs["messages"].at(servers),
        bytes=trainers * (into + out),
        limits=limits,
    )
