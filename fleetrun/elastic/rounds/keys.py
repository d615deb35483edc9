"""What the keys of a job are called. Knows what none of them holds."""

from __future__ import annotations

NODES = "nodes/"
"""One leased entry for each node that wants to take part. Only the leader watches it."""

STATE = "state/"
LEADER = "state/leader"
ROUND = "state/round"
CENSUS = "state/census"

ASKS = "state/asks/"
"""Questions of one node to the others, which watch them already; see `inquiry.py`."""

ANSWERS = "answers/"
REPORTS = "reports/"
TOPOLOGY = "topology/"
EVERYTHING = ""


def node(id_: str) -> str:
    return f"{NODES}{id_}"


def verdict(id_: str) -> str:
    return f"verdicts/{id_}"


def reports(generation: int) -> str:
    """The folder of one generation's reports."""
    return f"{REPORTS}{generation}/"


def report(generation: int, id_: str) -> str:
    return f"{reports(generation)}{id_}"


def topology(name: str) -> str:
    """`name` is what a round calls its topology."""
    return f"{TOPOLOGY}{name}"


def ask(question: str) -> str:
    return f"{ASKS}{question}"


def answers(question: str) -> str:
    """The folder of the answers to one question. Only who asks watches it."""
    return f"{ANSWERS}{question}/"
