"""Attacks on real jobs, drawn by a seed, until their time is over: two minutes for all kinds, or `--minutes`.

`make attack MINUTES=60`. A find is printed with its seed and the folder of its job, which is kept, and the
attack continues. To repeat a find: `ATTACK_SEED=17 pytest tests/attack -k kills --minutes 0`.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import traceback
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


@pytest.mark.parametrize("kind", KINDS)
def test_attack(kind: str, tmp_path: Path, minutes: float) -> None:
    """At least one attack of each kind; with the seed that is given first."""
    share, attacks = KINDS[kind]
    until = time.monotonic() + minutes * 60 * share / sum(each for each, _ in KINDS.values())
    seed = int(os.environ.get("ATTACK_SEED") or random.randrange(1 << 32))
    finds: list[str] = []
    skipped: set[str] = set()
    count = 0
    while count == 0 or time.monotonic() < until:
        attack = attacks[seed % len(attacks)]
        try:
            find = strike(kind, attack, seed, tmp_path)
        except pytest.skip.Exception as reason:
            find = ""
            skipped.add(f"{attack.__name__}: {reason}")
        if find:
            print(find, flush=True)
            finds.append(find)
        seed, count = seed + 1, count + 1
    print(f"{kind}: {count} attacks up to seed {seed - 1}, {len(finds)} finds; skipped: {skipped or 'none'}")
    if len(skipped) == count:
        pytest.skip("; ".join(sorted(skipped)))
    assert not finds, "\n".join(finds)


def strike(kind: str, attack: Attack, seed: int, tmp_path: Path) -> str:
    """What one attack found, with how to repeat it; empty for nothing."""
    folder = tmp_path / f"{attack.__name__}-{seed}"
    folder.mkdir()
    arena = Arena(random.Random(seed), folder, Fleetrun(folder, path=[ROOT]))
    found = Found()
    with found, arena.fleetrun:
        attack(arena)
    if found.error is None:
        shutil.rmtree(folder)
        return ""
    story = "\n".join(arena.story)
    text = "".join(traceback.format_exception(found.error))[-12_000:]
    again = f"ATTACK_SEED={seed} pytest tests/attack -k {kind} --minutes 0"
    return f"==== find: {kind} {attack.__name__}, seed {seed}, in {folder}\n{again}\n{story}\n{text}"


class Found:
    """As a context, keeps the exception that ended it: the attacks go on after a find."""

    error: Exception | None = None

    def __enter__(self) -> Found:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None
