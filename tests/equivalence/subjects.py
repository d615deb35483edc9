"""The kinds of programs: how each is drawn, run by fleet, and run by torch alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.equivalence import collective, job, program, serving
from tests.equivalence.children import Job, Result, Way
from tests.equivalence.program import Program


@dataclass(frozen=True, slots=True)
class Subject:
    """`draw`: the program of a seed. `ways`: to run it by fleet. `job`: it runs, in one of these ways.
    `plain`: what torch alone finds, which depends on the number of trainers only. `warm_up`: before the first
    fork.
    """

    draw: Callable[[int], Program]
    ways: Callable[[Program], list[Way]]
    job: Callable[[Program, Way], AbstractContextManager[Job]]
    plain: Callable[[Program, Way], Result]
    warm_up: Callable[[], None]


SUBJECTS = {
    "ps": Subject(program.draw, job.ways, job.served, job.run_twin, job.warm_up),
    "collective": Subject(
        collective.draw, collective.ways, collective.job, collective.run_plain, collective.warm_up
    ),
    "serving": Subject(serving.draw, serving.ways, serving.job, serving.run_plain, serving.warm_up),
}
