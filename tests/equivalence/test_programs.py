"""Random programs of fixed seeds, and unit tests of the fuzzer itself."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys

import pytest
import torch

from tests.equivalence.children import Result, Seen
from tests.equivalence.judge import compare, furthest, ways_of
from tests.equivalence.program import KINDS, draw, kinds_of
from tests.equivalence.subjects import SUBJECTS
from tests.support.cluster import ROOT

_ENOUGH = 65
"""Percent of runs that must be compared to the end. A fuzzer whose programs are all refused finds nothing."""


FOUND = ["collective:1056061969:1,4,5", "ps:1056062534:13,17,18"]
"""Programs that were finds once: a kind, a seed and the blocks that remained."""


def run(*words: str) -> str:
    command = [sys.executable, "-m", "tests.equivalence.run", *words]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", ["0:2", "2:40"])
def test_programs_are_as_in_one_process_or_refused(seeds: str) -> None:
    """Of every kind. What was found does not come back: one process warms up for all of them."""
    finds = [f"--repeat={find}" for find in FOUND]
    said = run("--seeds", seeds, "--each", "--stop-at-first", *finds)
    share = re.search(r"(\d+) % compared to the end", said)
    assert share is not None, said
    assert int(share[1]) >= _ENOUGH, said
    assert all(" ".join(find.split(":")[:2]) in said for find in FOUND), said


def test_a_seed_is_a_program_and_any_part_of_it_too() -> None:
    for subject in SUBJECTS.values():
        for seed in range(20):
            program = subject.draw(seed)
            assert program == subject.draw(seed)
            half = program.only(program.kept[::2])
            assert half.only(program.kept) == half
            assert len(half.lines()) == max(1, len(half.blocks))


def test_every_kind_of_block_is_drawn() -> None:
    assert len(KINDS) >= 200
    for kind, subject in SUBJECTS.items():
        drawn = {block.name for seed in range(2000) for block in subject.draw(seed).blocks}
        assert drawn == {each.name for each in kinds_of(kind)}, kind


def test_programs_of_a_seed_stay_what_they_are() -> None:
    """Finds are repeated by their seed."""
    text = "\n".join(str(block) for seed in range(300) for block in draw(seed).blocks)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "05d0106edbe364cc"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torch_alone_gives_the_same_again() -> None:
    for subject in SUBJECTS.values():
        for seed in range(10):
            program = subject.draw(seed)
            way = ways_of(program)[-1]
            first, second = (subject.plain(program, way) for _ in range(2))
            assert first.error == second.error
            assert compare([first], second) == ""


def _result(loss: float, final: float, *, shared: bool = True) -> Result:
    return Result([Seen("loss", torch.tensor(loss), shared)], {"w": torch.tensor([final])})


def test_what_differs_is_named() -> None:
    plain = _result(1.0, 5.0)
    assert compare([plain], plain) == ""
    assert compare([_result(0.5, 5.0), _result(1.5, 5.0)], plain) == "", "losses are averaged over trainers"
    assert "loss is off by 0.5" in compare([_result(1.5, 5.0)], plain)
    assert "w at the end" in compare([plain, _result(1.0, 5.1)], plain)
    assert "loss" in compare([_result(0.5, 5.0, shared=False), plain], _result(1.0, 5.0, shared=False))
    early = Result(plain.seen, error=("UsageError", True, ""))
    assert compare([early], plain) == "", "a refused run is compared as far as it came"
    assert compare([Result([])], plain) != ""


def test_stages_of_a_job_are_compared_one_after_the_other() -> None:
    plain = Result([Seen("loss", torch.tensor(each), shared=True) for each in (1.0, 2.0)], {})
    halves = [Result([Seen("loss", torch.tensor(each), shared=True)]) for each in (0.5, 1.5)]
    last = Result([Seen("loss", torch.tensor(2.0), shared=True)], stage=1)
    assert compare([*halves, last], plain) == ""
    last.seen[0] = Seen("loss", torch.tensor(2.5), shared=True)
    assert "after 1 restarts" in compare([*halves, last], plain)
    apart = [Result([Seen("output", torch.tensor(each), there=each == 1.0)]) for each in (1.0, 7.0)]
    assert compare(apart, Result([Seen("output", torch.tensor(1.0))])) == ""


def test_differences_are_relative_to_large_values() -> None:
    assert furthest(torch.tensor([1e6 + 1]), torch.tensor([1e6])) == pytest.approx(1e-6)
    assert furthest(torch.tensor([float("nan")]), torch.tensor([1.0])) == float("inf")
    assert furthest(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == 0
    assert furthest(torch.ones(2), torch.ones(3)) == float("inf")
