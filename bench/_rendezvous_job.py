"""One meeting of many nodes, measured: a store, processes that play the nodes, and what they tell."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from _processes import cpu_seconds, peak_rss_mb

AGENTS = Path(__file__).with_name("_rendezvous_agents.py")
PLAYERS = 2
FEW = 16
"""So many nodes are played by one process."""

Figures = dict[str, float | None]
"""`met`, `known`: seconds; `messages`, `kilobytes`: of a node until it had met; `cpu`, `nodes_cpu`: seconds
until then of the store and of all nodes; `memory`: the store's peak, in MB."""


class StoreProcess(Protocol):
    """`url` as --master has it; `pid` of the process that keeps it."""

    kind: str
    url: str
    pid: int

    def messages(self) -> int | None:
        """Those that it has got and sent, as far as it counts them."""
        ...

    def close(self) -> None: ...


class BenchError(Exception):
    """This run gave no figure; the text says why."""


class Player:
    """A process that plays some of the nodes."""

    def __init__(self, store: StoreProcess, numbers: range, everybody: int, lease: float, nproc: int) -> None:
        words = [store.kind, store.url, numbers.start, len(numbers), everybody, lease, nproc]
        self._popen = subprocess.Popen(
            [sys.executable, str(AGENTS), *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._heard: dict[str, dict[str, Any]] = {}

    def say(self, word: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{word}\n".encode())
        self._popen.stdin.flush()

    def hear(self, what: str) -> dict[str, Any]:
        """What it told of this. Raises BenchError when it has ended, or a node was refused."""
        assert self._popen.stdout is not None
        while what not in self._heard:
            line = self._popen.stdout.readline()
            if not line:
                raise BenchError(f"A process of nodes ended without reporting {what}.")
            told = json.loads(line)
            self._heard[told["what"]] = told
            if "refused" in self._heard:
                raise BenchError(told["text"])
        return self._heard[what]

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()


def meet(make: Any, nodes: int, lease: float, nproc: int) -> Figures:
    """`make`: a StoreProcess for so long a lease. Raises BenchError."""
    with ExitStack() as stack:
        store = make(lease)
        stack.callback(store.close)
        players = []
        for numbers in _shares(nodes):
            players.append(Player(store, numbers, nodes, lease, nproc))
            stack.callback(players[-1].close)
        for player in players:
            player.hear("ready")
        figures = _join(store, players, nodes)
        return figures | _fail(players)


def _join(store: StoreProcess, players: list[Player], nodes: int) -> Figures:
    counted = store.messages()
    cpu, began = cpu_seconds(store.pid), time.monotonic()
    for player in players:
        player.say("join")
    told = [player.hear("started") for player in players]
    cpu_after, counted_after = cpu_seconds(store.pid), store.messages()
    messages = sum(each["sent_messages"] + each["received_messages"] for each in told)
    if counted is not None and counted_after is not None:
        messages = counted_after - counted
    return {
        "met": max(each["at"] for each in told) - began,
        "cpu": cpu_after - cpu,
        "nodes_cpu": sum(each["cpu"] for each in told),
        "memory": peak_rss_mb(store.pid),
        "messages": messages / nodes,
        "kilobytes": sum(each["sent_bytes"] + each["received_bytes"] for each in told) / nodes / 1e3,
    }


def _fail(players: list[Player]) -> Figures:
    players[0].say("fail")
    failed = players[0].hear("failed")["at"]
    return {"known": max(player.hear("stopped")["at"] for player in players) - failed}


def _shares(nodes: int) -> list[range]:
    players = 1 if nodes <= FEW else PLAYERS
    edges = [nodes * number // players for number in range(players + 1)]
    return [range(first, last) for first, last in pairwise(edges)]


def unpacking(nodes: int, nproc: int) -> float:
    """Seconds in which one node unpacks the topology of so many."""
    from _rendezvous_agents import node_of

    from fleetrun.elastic.rendezvous import records

    data = records.pack_topology([node_of(number, nproc) for number in range(nodes)])
    began = time.perf_counter()
    records.topology(data)
    return time.perf_counter() - began
