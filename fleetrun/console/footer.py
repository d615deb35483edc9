"""The line at the foot of the terminal: facts into one row that fits. Pure.

`0:12:31 | trainers 2/2 | servers 1/1 | step 1,234 | loss 0.0231 | 12.3k samples/s | 1 restart`
"""

from __future__ import annotations

import math

from fleetrun.console.facts import Doing, Facts
from fleetrun.console.figures import clock, count, loss, short
from fleetrun.console.tail import printable
from fleetrun.console.wrapping import columns

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
