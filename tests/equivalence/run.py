"""Runs random programs: `python -m tests.equivalence.run --seeds 0:40`, or `--minutes 60`.

Prints each failing program, as small as it could be made, with the command that repeats it. At the end it
prints how many runs ended in which way, the refusals, and the share of runs that were compared.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import select
import signal
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from tests.equivalence.judge import judge, shrink, ways_of
from tests.equivalence.program import Program, kinds_of
from tests.equivalence.subjects import SUBJECTS


def warm_up(kinds: Sequence[str]) -> None:
    """Import and compile, before the first fork, what every member of a job needs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for kind in kinds:
        SUBJECTS[kind].warm_up()
    gc.collect()
    gc.freeze()


# ---- One program


def examine(program: Program, *, smallest: bool) -> dict[str, Any]:
    """Judge a program, and shrink it if it fails. The answer can be written as JSON."""
    began = time.monotonic()
    verdicts = judge(program, ways_of(program))
    bad = next((each for each in verdicts if each.bad), None)
    found: dict[str, Any] = {
        "seed": program.seed,
        "kind": program.subject,
        "verdicts": [(each.way, each.kind, each.text) for each in verdicts],
        "seconds": time.monotonic() - began,
        "blocks": [each.name for each in program.blocks],
        "find": "",
    }
    if bad is None:
        return found
    notes: list[str] = []
    if smallest:
        way = next(each for each in ways_of(program) if each.name == bad.way)
        program = shrink(program, way, bad.kind, notes.append)
        again = judge(program, [way])[0]
        bad = again if again.bad else bad
    kept = ",".join(map(str, program.kept))
    found["find"] = "\n".join(
        [
            f"==== {program.subject}, seed {program.seed}, {bad.way}: {bad.kind}: {bad.text}",
            *program.lines(),
            *notes,
            f"python -m tests.equivalence.run --kind {program.subject} --seeds {program.seed} "
            f"--keep {kept or 'none'}",
        ]
    )
    return found


# ---- Many programs, in a few processes


def _programs(
    number: int, seeds: Iterator[int], until: float, options: argparse.Namespace
) -> Iterator[Program]:
    for kind, seed, kept in options.repeat[number :: options.jobs]:
        yield SUBJECTS[kind].draw(seed).only(kept)
    for seed in seeds:
        for kind in options.kind:
            if time.monotonic() > until:
                return
            program = SUBJECTS[kind].draw(seed).without(options.without.split(","))
            if options.keep is not None:
                program = program.only(options.keep)
            if not options.block or any(each.name in options.block for each in program.blocks):
                yield program


def _lane(programs: Iterator[Program], options: argparse.Namespace, out: int) -> None:
    """Examine programs, and write a line of JSON for each."""
    for program in programs:
        try:
            found = examine(program, smallest=not options.no_shrink)
        except Exception:  # noqa: BLE001  # an error of the fuzzer itself is a find too
            found = {"seed": program.seed, "kind": program.subject, "verdicts": [], "blocks": []}
            found |= {"seconds": 0.0, "find": f"==== seed {program.seed}: {traceback.format_exc()}"}
        os.write(out, (json.dumps(found) + "\n").encode())


class Totals:
    """What was found so far, with these kinds of blocks."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = names
        self.programs = 0
        self.kinds: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.finds: list[dict[str, Any]] = []

    def add(self, found: dict[str, Any]) -> None:
        self.programs += 1
        self.blocks.update(found["blocks"])
        for _, kind, text in found["verdicts"]:
            self.kinds[kind] += 1
            if kind in ("refused", "raised"):
                self.texts[f"{kind}: {textwrap.shorten(text, 110)}"] += 1
        if found["find"]:
            self.finds.append(found)

    @property
    def share(self) -> float:
        """Of all runs, those that came to a comparison at their end."""
        return (self.kinds["equal"] + self.kinds["difference"]) / max(sum(self.kinds.values()), 1)

    def line(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        return (
            f"{self.programs} programs, {sum(self.kinds.values())} runs: {counts or 'none'}; "
            f"{100 * self.share:.0f} % compared to the end, {len(self.finds)} finds"
        )

    def lines(self) -> list[str]:
        never = [name for name in self._names if not self.blocks[name]]
        return [
            self.line(),
            *(f"  {count} times {text}" for text, count in self.texts.most_common()),
            f"  {len(self._names)} kinds of blocks, {len(never)} not drawn: {', '.join(never) or '-'}",
        ]


def _forked_lane(number: int, until: float, options: argparse.Namespace) -> tuple[int, int]:
    """(pid, end of a pipe) of a process that examines its share of the seeds."""
    seeds: Iterator[int] = itertools.count(options.first + number, options.jobs)
    if options.seeds is not None:
        seeds = iter(options.seeds[number :: options.jobs])
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(read)
            _lane(_programs(number, seeds, until, options), options, write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    return pid, read


def _leave(number: int, frame: object) -> NoReturn:
    """End lanes and jobs on the way."""
    sys.exit(1)


def _end(pid: int, pipe: int) -> None:
    """End a lane. It is told again if it goes on: Python drops what a signal handler raises within a
    callback, such as those of a fork.
    """
    os.close(pipe)
    gone = os.pidfd_open(pid)  # not waited for yet, so its id is its own
    while True:
        signal.pidfd_send_signal(gone, signal.SIGTERM)
        if select.select([gone], [], [], 5.0)[0]:
            break
    os.waitpid(pid, 0)
    os.close(gone)


def _found(pipes: Sequence[int]) -> Iterator[dict[str, Any]]:
    rest = dict.fromkeys(pipes, b"")
    while rest:
        for pipe in select.select(list(rest), [], [])[0]:
            more = os.read(pipe, 1 << 16)
            if not more:
                del rest[pipe]
                continue
            *lines, rest[pipe] = (rest[pipe] + more).split(b"\n")
            yield from map(json.loads, lines)


def run(options: argparse.Namespace) -> Totals:
    """Examine what the options say, and print what is found."""
    warm_up(options.kind)
    signal.signal(signal.SIGTERM, _leave)
    names = dict.fromkeys(each.name for kind in options.kind for each in kinds_of(kind))
    totals, began = Totals(list(names)), time.monotonic()
    until = began + 60 * options.minutes if options.seeds is None else float("inf")
    lanes = [_forked_lane(number, until, options) for number in range(options.jobs)]
    told = began
    try:
        for found in _found([pipe for _, pipe in lanes]):
            totals.add(found)
            if options.each:
                kinds = ", ".join(f"{way}: {kind}" for way, kind, _ in found["verdicts"])
                print(f"{found['kind']} {found['seed']}: {kinds} ({found['seconds']:.1f} s)", flush=True)
            if found["find"]:
                print(found["find"], flush=True)
                if options.stop_at_first:
                    break
            if time.monotonic() - told > 60:
                told = time.monotonic()
                print(f"after {(told - began) / 60:.0f} min: {totals.line()}", flush=True)
    finally:
        for pid, pipe in lanes:
            _end(pid, pipe)
    print(*totals.lines(), f"  {time.monotonic() - began:.0f} s", sep="\n", flush=True)
    return totals


def _numbers(text: str) -> list[int]:
    if text == "none":
        return []
    if ":" in text:
        first, last = text.split(":")
        return list(range(int(first), int(last)))
    return [int(each) for each in text.split(",")]


def _find(text: str) -> tuple[str, int, list[int]]:
    kind, seed, kept = text.split(":")
    return kind, int(seed), _numbers(kept)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.equivalence.run", description=__doc__)
    parser.add_argument("--seeds", type=_numbers, help="these seeds: 0:40, or 3,17")
    parser.add_argument("--kind", action="append", choices=list(SUBJECTS), help="by default all, in turn")
    parser.add_argument("--minutes", type=float, default=2.0, help="without --seeds: one seed after another")
    parser.add_argument("--first", type=int, default=None, help="the first of them; by default a random one")
    parser.add_argument("--keep", type=_numbers, help="the blocks that remain, as a find prints them")
    parser.add_argument(
        "--repeat", action="append", type=_find, default=[], help="this find as well: KIND:SEED:KEEP"
    )
    parser.add_argument("--without", default="", help="blocks to leave out of all programs: a,b,c")
    parser.add_argument("--block", action="append", help="only programs with this block")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--no-shrink", action="store_true", help="print failing programs as they were drawn")
    parser.add_argument("--stop-at-first", action="store_true", help="end with the first find")
    parser.add_argument("--each", action="store_true", help="print a line for each program")
    options = parser.parse_args(arguments)
    options.kind = options.kind or list(SUBJECTS)
    if options.keep is not None and len(options.kind) > 1:
        parser.error("--keep needs --kind: the blocks are of one program")
    if options.seeds is not None:
        options.jobs = max(1, min(options.jobs, len(options.seeds)))
    if options.first is None:
        options.first = random.randrange(1 << 30)
    return int(bool(run(options).finds))


if __name__ == "__main__":
    sys.exit(main())
