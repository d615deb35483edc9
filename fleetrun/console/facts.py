"""How a job stands, as the footer shows it: out of what a launcher answers to `status`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Doing:
    """What takes long at the moment; `done` of `of` parts, None where nobody can tell."""

    what: str
    done: float | None = None
    of: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`elapsed` in seconds; `up` has role, how many processes of it run, and how many there are. `rate` is in
    samples a second, over all trainers of this machine. `phase` is a word for what is not the usual.
    """

    elapsed: float = 0.0
    up: tuple[tuple[str, int, int], ...] = ()
    step: int | None = None
    loss: float | None = None
    rate: float | None = None
    restarts: int = 0
    phase: str = ""
    doing: Doing | None = None


_PHASES = ("starting", "restarting", "leaving", "ending")
_NAMED = 2


def facts_of(status: Mapping[str, Any]) -> Facts:
    """Step and loss are those of the first trainer that reports."""
    containers = status["containers"]
    waiting = status["waiting"]
    trainers = [each for each in containers if each["role"] == "trainer"]
    reporting: Mapping[str, Any] = next(
        (each for each in trainers if each["step"] is not None or each["loss"] is not None), {}
    )
    rates = [each["rate"] for each in trainers if each["rate"] is not None]
    return Facts(
        elapsed=status["elapsed"],
        up=() if waiting else _up(containers),
        step=reporting.get("step"),
        loss=reporting.get("loss"),
        rate=sum(rates) if rates else None,
        restarts=status["restarts"],
        phase=status["state"] if status["state"] in _PHASES else "",
        doing=_meeting(waiting) if waiting else _doing([*trainers, *containers]),
    )


def _up(containers: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int, int], ...]:
    """By role, trainers first."""
    roles = sorted(dict.fromkeys(each["role"] for each in containers), key=lambda role: role != "trainer")
    groups = [(role, [each for each in containers if each["role"] == role]) for role in roles]
    return tuple((role, sum(each["pid"] is not None for each in group), len(group)) for role, group in groups)


def _doing(containers: Sequence[Mapping[str, Any]]) -> Doing | None:
    """The first that does something takes the place."""
    found = next((each["activity"] for each in containers if each["activity"]), None)
    return Doing(found["what"], found["done"], found["of"]) if found else None


def _meeting(waiting: Mapping[str, Any]) -> Doing:
    missing = waiting["missing"]
    names = ", ".join(missing[:_NAMED]) + (" ..." if len(missing) > _NAMED else "")
    return Doing(f"{waiting['present']} of {waiting['wanted']} nodes, waiting for {names or 'more'}")
