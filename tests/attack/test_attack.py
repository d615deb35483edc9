"""Attacks on real jobs, each drawn by a seed: some of fixed seeds, or random ones for `--minutes`.

`make attack MINUTES=60`. Each strike prints one line; a find is printed with its seed and the folder of its
job, which is kept, and the attack continues. To repeat a strike: `make attack KIND=kills SEED=17 MINUTES=0`.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack import disks, ends, kills, peers, suspended, torn
from tests.attack.arena import Arena, Attack
from tests.support.cluster import ROOT
from tests.support.command import Fleetrun

KINDS: dict[str, tuple[float, tuple[Attack, ...]]] = {
    "kills": (2.0, kills.ATTACKS),
    "disks": (1.0, disks.ATTACKS),
    "torn": (1.0, torn.ATTACKS),
    "suspended": (1.0, suspended.ATTACKS),
    "peers": (1.0, peers.ATTACKS),
    "ends": (1.0, ends.ATTACKS),
}
"""By kind: its share of the time, and its attacks, which take turns."""


SEEDS: dict[str, tuple[int, ...]] = {
    "kills": (8,),
    "disks": (0, 1, 2, 3),
    "torn": (1, 2, 3, 5),
    "suspended": (1,),
    "peers": (10,),
    "ends": (0, 1, 2),
}
"""What an ordinary run of the tests strikes, always the same: a minute of the attacks."""


@pytest.mark.parametrize("kind", KINDS)
def test_attack(kind: str, tmp_path: Path, minutes: float | None) -> None:
    finds: list[str] = []
    skipped: set[str] = set()
    count = 0
    for seed in seeds(kind, minutes):
        strike = Strike(kind, seed, tmp_path)
        strike.run()
        print(strike.line, flush=True)
        if strike.skipped:
            skipped.add(strike.skipped)
        if strike.find:
            print(strike.find, flush=True)
            finds.append(strike.find)
        count += 1
    print(f"{kind}: {count} strikes, {len(finds)} finds; skipped: {'; '.join(sorted(skipped)) or 'none'}")
    assert not finds, "\n".join(finds)


def seeds(kind: str, minutes: float | None) -> Iterator[int]:
    """Those of ordinary runs; or from `ATTACK_SEED` or a random one on, at least one."""
    if minutes is None:
        yield from SEEDS[kind]
        return
    share = KINDS[kind][0] / sum(each for each, _ in KINDS.values())
    until = time.monotonic() + minutes * 60 * share
    first = int(os.environ.get("ATTACK_SEED") or random.randrange(1 << 32))
    for seed in itertools.count(first):
        yield seed
        if time.monotonic() >= until:
            return


class Strike:
    """One attack, and what it found."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        attacks = KINDS[kind][1]
        self.attack = attacks[seed % len(attacks)]
        self.folder = folder / f"{self.attack.__name__}-{seed}"
        self.skipped = self.find = self.line = ""
        self._name = f"{kind} {self.attack.__name__}, seed {seed}"
        self._again = f"make attack KIND={kind} SEED={seed} MINUTES=0"
        self._seed = seed

    def run(self) -> None:
        self.folder.mkdir()
        arena = Arena(random.Random(self._seed), self.folder, Fleetrun(self.folder, path=[ROOT]))
        found = Found()
        try:
            with found, arena.fleetrun:
                self.attack(arena)
        except pytest.skip.Exception as reason:
            self.skipped = f"{self.attack.__name__}: {reason}"
        seconds = time.monotonic() - arena.began
        if found.error is None:
            shutil.rmtree(self.folder)
        else:
            text = "".join(traceback.format_exception(found.error))[-12_000:]
            where = f"==== find: {self._name}, in {self.folder}"
            self.find = "\n".join([where, self._again, *arena.story, text])
        end = "FIND" if self.find else "skipped" if self.skipped else "held"
        done = "; ".join(line.split(maxsplit=1)[1] for line in arena.story)
        self.line = f"{self._name}: {end} in {seconds:.1f} s: {textwrap.shorten(done, 300)}"


class Found:
    """As a context, keeps the exception that ended it: the attacks go on after a find."""

    error: Exception | None = None

    def __enter__(self) -> Found:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None
