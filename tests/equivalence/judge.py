"""Judges a program: equal to torch in every way, or refused by fleet. Finds the smallest one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from tests.equivalence.children import Result, Seen, Way
from tests.equivalence.program import Program
from tests.equivalence.subjects import SUBJECTS

TOLERANCE = 1e-5
_NOT_REFUSED = ("ServerError", "TrainerLostError", "TablesLostError", "ServerFullError")
"""FleetErrors that report a failure of the job, not a program that fleet declines."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a program run in one way. `kind`: equal, refused, raised (as torch), difference, error or hang."""

    way: str
    kind: str
    text: str = ""

    @property
    def bad(self) -> bool:
        return self.kind in ("difference", "error", "hang")


def furthest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to values above 1; infinity for other shapes, NaN and the like."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    off = (found - wanted).abs() / wanted.abs().clamp(min=1)
    off[(found == wanted) | (found.isnan() & wanted.isnan())] = 0.0
    return float(off.nan_to_num(nan=float("inf")).max())


def _differs(label: str, found: torch.Tensor, wanted: torch.Tensor) -> str:
    off = furthest(found, wanted)
    if off <= TOLERANCE:
        return ""
    shapes = "" if found.shape == wanted.shape else f", shape {tuple(found.shape)} not {tuple(wanted.shape)}"
    return f"{label} is off by {off:.2g}{shapes}"


def compare(results: Sequence[Result], plain: Result) -> str:
    """What differs first, or nothing. A run that ended with an error is compared as far as it came. Stages of
    a job are compared with one plain run, one after the other.
    """
    start = 0
    for stage in range(max(each.stage for each in results) + 1):
        mine = [each for each in results if each.stage == stage]
        last = all(each.stage <= stage for each in results)
        stop = len(plain.seen) if last else start + len(mine[0].seen)
        part = Result(plain.seen[start:stop], plain.final if last else {}, plain.error if last else None)
        if problem := _compare_stage(mine, part):
            return problem + (f" (after {stage} restarts)" if stage else "")
        start = stop
    return ""


def _compare_stage(results: Sequence[Result], plain: Result) -> str:
    ended = any(each.error is not None for each in (*results, plain))
    count = min(len(each.seen) for each in (*results, plain))
    for place in range(count):
        problem = _compare_seen([each.seen[place] for each in results], plain.seen[place])
        if problem:
            return problem
    if ended:
        return ""
    if any(len(each.seen) != count for each in (*results, plain)):
        return f"{[len(each.seen) for each in results]} values were seen, not {len(plain.seen)}"
    for rank, result in enumerate(results):
        if problem := _compare_finals(result, plain):
            return problem + (f" in trainer {rank}" if len(results) > 1 else "")
    return ""


def _compare_seen(found: Sequence[Seen], wanted: Seen) -> str:
    if any(each.label != wanted.label for each in found):
        return f"{found[0].label!r} was seen, not {wanted.label!r}"
    if wanted.shared:
        return _differs(wanted.label, torch.stack([each.value for each in found]).mean(0), wanted.value)
    problems = (_differs(wanted.label, each.value, wanted.value) for each in found if each.there)
    return next(filter(None, problems), "")


def _compare_finals(result: Result, plain: Result) -> str:
    if missing := plain.final.keys() ^ result.final.keys():
        return f"{sorted(missing)} are in one of the two states"
    problems = (
        _differs(f"{name} at the end", result.final[name], value) for name, value in plain.final.items()
    )
    return next(filter(None, problems), "")


def ways_of(program: Program) -> list[Way]:
    return SUBJECTS[program.subject].ways(program)


def judge(program: Program, ways: Sequence[Way]) -> list[Verdict]:
    """Run the program in these ways at once."""
    found, subject = [], SUBJECTS[program.subject]
    with ExitStack() as stack:
        jobs = [(way, stack.enter_context(subject.job(program, way))) for way in ways]
        plains = {
            way.trainers: subject.plain(program, way)
            for way in {each.trainers: each for each in ways}.values()
        }
        for way, job in jobs:
            results, problem = job.results()
            found.append(_verdict(way, results, problem, plains[way.trainers]))
    return found


def _verdict(way: Way, results: Sequence[Result | None], problem: str, plain: Result) -> Verdict:
    if problem:
        return Verdict(way.name, "hang" if problem.startswith("hang") else "error", problem)
    there = [each for each in results if each is not None]
    if len(there) == len(results) and (difference := compare(there, plain)):
        return Verdict(way.name, "difference", difference)
    errors = [each.error for each in there if each.error is not None]
    if not errors and plain.error is not None:
        return Verdict(way.name, "difference", f"only torch raised {plain.error[0]}: {plain.error[2]}")
    if not errors:
        return Verdict(way.name, "equal")
    for name, fleets, text in errors:
        if fleets and name not in _NOT_REFUSED:
            return Verdict(way.name, "refused", text)
        if plain.error is not None and plain.error[0] == name:
            return Verdict(way.name, "raised", text)
    return Verdict(way.name, "error", next(each.trace for each in there if each.error is not None))


_TRIES, _SHRINK_S = 150, 180.0


def shrink(program: Program, way: Way, kind: str, say: Callable[[str], None]) -> Program:
    """Leave blocks out as long as the program fails in this way with a verdict of this kind."""
    until, tries = time.monotonic() + _SHRINK_S, 0
    size = max(1, len(program.kept) // 2)
    while size:
        start, smaller = 0, False
        while start < len(program.kept):
            candidate = program.only(program.kept[:start] + program.kept[start + size :])
            tries += 1
            if tries > _TRIES or time.monotonic() > until:
                say("(shrinking was cut short)")
                return program
            if judge(candidate, [way])[0].kind == kind:
                program, smaller = candidate, True
            else:
                start += size
        size = size if smaller and size == 1 else size // 2
    return program
