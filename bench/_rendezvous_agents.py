"""Nodes of a job without training processes: memberships in one loop, with real connections to a store.

    python _rendezvous_agents.py embedded|etcd ENDPOINT FIRST COUNT ALL LEASE NPROC

Plays nodes FIRST to FIRST + COUNT of ALL, each with NPROC trainers, and obeys words on standard input:
`join`, `fail` (the first node's trainer does), `end`. What happens is told in JSON lines, stamped with
CLOCK_MONOTONIC: `ready`; `started` when the last of them has its topology; `failed`; `stopped` when the last
of them knows of the failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from typing import Any

from _wire import Wire

from fleetrun.elastic.membership import Membership
from fleetrun.elastic.rendezvous.actions import Policy
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, Node, Round
from fleetrun.elastic.store import Store
from fleetrun.errors import LaunchError
from fleetrun.plan.topology import Offer
from fleetrun.pod.loop import Loop

JOB = "bench"
MANY_SOCKETS = 100_000


class Agent:
    """Told by its membership what becomes of the job (membership.Events)."""

    def __init__(self, crowd: Crowd, store: Store, node: Node, policy: Policy) -> None:
        self._crowd = crowd
        self.node = node
        self.membership = Membership(store, crowd.loop, node, policy, self)

    def start(self, round: Round, members: tuple[Node, ...], rank: int) -> None:
        assert members[rank].id == self.node.id
        self._crowd.count("started")

    def stop(self, cause: Cause, restart: bool, *, at_once: bool = False) -> None:
        self._crowd.count("stopped")
        self._crowd.loop.after(0.0, self.membership.stopped)

    def finish(self) -> None:
        self._crowd.loop.after(0.0, self.membership.stopped)

    def failed(self, error: LaunchError) -> None:
        self._crowd.tell("refused", text=str(error))

    refused = failed

    def ended(self, code: int, cause: Cause | None) -> None: ...
    def publish(self, event: object) -> None: ...


class Crowd:
    """All that this process plays."""

    def __init__(self, kind: str, endpoint: str, numbers: range, policy: Policy, nproc: int) -> None:
        self.loop = Loop()
        self._wire = Wire([endpoint.removeprefix("etcd://")])
        self._seen: dict[str, int] = {}
        self._joined_cpu = 0.0
        open_store = _stores(kind, self.loop, endpoint, policy.lease)
        self._agents = [
            Agent(self, open_store(f"node {number}"), node_of(number, nproc), policy) for number in numbers
        ]
        self._words = b""
        self.loop.add(0, self._read)

    def run(self) -> None:
        self.tell("ready")
        self.loop.run()

    def tell(self, what: str, **more: Any) -> None:
        print(json.dumps({"what": what, "at": time.monotonic(), **more}), flush=True)

    def count(self, what: str) -> None:
        """Tells of it when the last agent has come so far."""
        self._seen[what] = self._seen.get(what, 0) + 1
        if self._seen[what] == len(self._agents):
            self.tell(what, cpu=time.process_time() - self._joined_cpu, **self._wire.since())

    def _read(self) -> None:
        data = os.read(0, 1 << 10)
        *words, self._words = (self._words + data).split(b"\n")
        for word in words:
            {"join": self._join, "fail": self._fail, "end": self.loop.stop}[word.decode()]()
        if not data:
            self.loop.stop()

    def _join(self) -> None:
        self._joined_cpu = time.process_time()
        for agent in self._agents:
            agent.membership.join()

    def _fail(self) -> None:
        self.tell("failed")
        agent = self._agents[0]
        cause = Cause(
            why=CauseKind.FAILED, node=agent.node.title, rank=0, code=7,
            headline="trainer 0 exited with code 7", lines=("a line of its log",) * 20,
        )  # fmt: skip
        agent.membership.failed(cause, False, 0.0)


def node_of(number: int, nproc: int) -> Node:
    """On a host of its own, with ports as the kernel gives them."""
    host = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    ports = [32768 + (number * 7919 + each * 104729) % 28000 for each in range(nproc + 1)]
    trainers = tuple(f"{host}:{port}" for port in ports[1:])
    offer = Offer(trainers=trainers, service=f"{host}:{ports[0]}")
    id_ = hashlib.sha256(str(number).encode()).hexdigest()[:16]  # as random as those of real nodes
    return Node(id=id_, host=host, name=f"node-{number:05}", offer=offer, version="1")


def _stores(kind: str, loop: Loop, endpoint: str, lease: float) -> Any:
    if kind == "etcd":
        from fleetrun.elastic.etcd.store import EtcdStore

        return lambda node: EtcdStore(loop, endpoint, job_id=JOB, node_id=node, lease=lease)
    import zmq

    from fleetrun.elastic.embedded.client import ZmqStore

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MANY_SOCKETS)
    return lambda node: ZmqStore(loop, endpoint, job_id=JOB, node_id=node, lease=lease, context=context)


def main() -> None:
    kind, endpoint, *numbers, lease, nproc = sys.argv[1:]
    first, count, everybody = map(int, numbers)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    policy = Policy(
        fewest=everybody, most=everybody, lease=float(lease), rdzv_timeout=300.0, endpoint=endpoint
    )
    Crowd(kind, endpoint, range(first, first + count), policy, int(nproc)).run()
    os._exit(0)  # thousands of connections need not be closed one by one


if __name__ == "__main__":
    main()
