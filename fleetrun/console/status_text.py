"""The text of the status line: the state of a job, from the launcher's answer to `status`, as one row that
fits the terminal. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleetrun.console.text import clock, columns, count, loss, printable, short

# ---- How a job stands, as the footer shows it: out of what a launcher answers to `status`. Pure.


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


# ---- The line at the foot of the terminal: facts into one row that fits. Pure.
#
# `0:12:31 | trainers 2/2 | servers 1/1 | step 1,234 | loss 0.0231 | 12.3k samples/s | 1 restart`

_JOINT = " | "
_BAR = 10
_LONGEST_WHAT = 60
_ROLES = {"ps": "servers", "trainer": "trainers", "heter": "heter trainers", "coordinator": "coordinators",
          "evaluator": "evaluators"}  # fmt: skip


def footer(facts: Facts, width: int) -> str:
    """At most `width` columns. Where there is less room, what matters least is left out, then the end."""
    fields = _fields(facts)
    while len(fields) > 1 and columns(_row(fields)) > width:
        fields.remove(max(fields))
    return cut(_row(fields), width)


def cut(text: str, width: int) -> str:
    """As much of the beginning as fits."""
    if text.isascii():
        return text[: max(0, width)]
    used = 0
    for position, char in enumerate(text):
        used += columns(char)
        if used > width:
            return text[:position]
    return text


def _row(fields: list[tuple[int, int, str]]) -> str:
    return _JOINT.join(text for _, _, text in fields)


def _fields(facts: Facts) -> list[tuple[int, int, str]]:
    """In the order of the row, each as (how little it matters, its place, text)."""
    texts = [(0, clock(facts.elapsed))]
    if facts.phase:
        texts.append((1, facts.phase))
    texts += [(6, f"{_ROLES.get(role, role)} {up}/{total}") for role, up, total in facts.up if total]
    if facts.step is not None:
        texts.append((3, f"step {count(facts.step)}"))
    if facts.loss is not None:
        texts.append((5, f"loss {loss(facts.loss)}"))
    if facts.rate is not None:
        texts.append((7, f"{short(facts.rate)} samples/s"))
    if facts.restarts:
        texts.append((4, f"{facts.restarts} restart{'s' if facts.restarts > 1 else ''}"))
    if facts.doing is not None:
        texts.append((2, doing(facts.doing)))
    return [(little, place, text) for place, (little, text) in enumerate(texts)]


def doing(what: Doing) -> str:
    """`loading tables [####......] 4/10`"""
    name = printable(what.what)
    if columns(name) > _LONGEST_WHAT:
        name = cut(name, _LONGEST_WHAT - 3) + "..."
    if what.done is None or not math.isfinite(what.done):
        return name
    if what.of is None or not math.isfinite(what.of) or what.of <= 0:
        return f"{name} {short(what.done)}"
    full = int(_BAR * min(1.0, max(0.0, what.done / what.of)))
    return f"{name} [{'#' * full}{'.' * (_BAR - full)}] {short(what.done)}/{short(what.of)}"
