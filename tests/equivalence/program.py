"""Random training programs as data: what a block is, which blocks there are, and how a seed draws a program.

A program is a list of blocks. Any of them may be left out and the rest is still a program: what is missing
has a plain default. So a failing program is shrunk by leaving blocks out. Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STEPS = 7
ROWS, DIM, BATCH, COLUMNS, NUMBERS = 14, 4, 5, 8, 3
"""Rows of each table, values of a row, examples of a batch in one trainer, ids and numbers of an example."""


@dataclass(frozen=True, slots=True)
class Block:
    """One building block of a program with its arguments."""

    name: str
    args: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return dict(self.args)[name]

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.args).get(name, default)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.args)})"


Draw = Callable[[random.Random], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the generator must know of a block.

    `family`: where it belongs. `weight`: how often it is drawn, beside the others of its family. `alone`: its
    result with two trainers is not the result of one process on the joined batch. `once`: a program has it at
    most once. `merged`: it keeps gradients independent of values, so it may be part of a program whose steps
    are merged. `refused`: fleet refuses it on purpose, so few programs have one.
    """

    name: str
    family: str
    about: str
    weight: float = 1.0
    draw: Draw = lambda rng: {}
    alone: bool = False
    once: bool = True
    merged: bool = False
    refused: bool = False


KINDS: dict[str, Kind] = {}


def define(family: str, name: str, about: str, draw: Draw | None = None, **rest: Any) -> Kind:
    """Register a kind of block."""
    assert name not in KINDS, name
    made = Kind(name=name, family=family, about=about, **({"draw": draw} if draw else {}), **rest)
    KINDS[name] = made
    return made


@dataclass(frozen=True, slots=True)
class Program:
    """Blocks in the order in which they were drawn. `kept`: their places in the program of the seed.
    `subject`: what it is about, as `subjects.SUBJECTS` names it.
    """

    seed: int
    blocks: tuple[Block, ...]
    kept: tuple[int, ...]
    subject: str = "ps"

    def all(self, name: str) -> list[Block]:
        return [each for each in self.blocks if each.name == name]

    def first(self, name: str) -> Block | None:
        return next(iter(self.all(name)), None)

    def has(self, name: str) -> bool:
        return self.first(name) is not None

    def family(self, family: str) -> list[Block]:
        return [each for each in self.blocks if KINDS[each.name].family == family]

    @property
    def alone(self) -> bool:
        """Whether it is defined for one trainer only."""
        return any(KINDS[each.name].alone for each in self.blocks)

    @property
    def merged(self) -> bool:
        return self.has("merged_steps")

    def only(self, kept: Iterable[int]) -> Program:
        """The program with the blocks of these places of the seed's program."""
        wanted = set(kept)
        pairs = [pair for pair in zip(self.kept, self.blocks, strict=True) if pair[0] in wanted]
        places = tuple(place for place, _ in pairs)
        return Program(self.seed, tuple(block for _, block in pairs), places, self.subject)

    def without(self, names: Iterable[str]) -> Program:
        """The program without the blocks of these names."""
        pairs = zip(self.kept, self.blocks, strict=True)
        return self.only([place for place, block in pairs if block.name not in set(names)])

    def lines(self) -> list[str]:
        """The program to read: a line for each block, with what it does."""
        found = [
            f"{family + ':':<10} {block!s:<58} # {KINDS[block.name].about}"
            for family in FAMILIES[self.subject]
            for block in self.family(family)
        ]
        return found or ["(no blocks: all that is missing has a plain default)"]


FAMILIES = {
    "ps": ("job", "table", "use", "layer", "optimizer", "rate", "source", "batch", "loop", "collected"),
    "collective": (
        *("world", "layer", "part", "strategy", "optimizer", "rate", "data"),
        *("style", "gradient", "event", "checkpoint"),
    ),
    "serving": ("input", "mix", "head", "request"),
}
"""Of the blocks of each kind of program."""
_ONLY_ON_SERVERS = ("sparse_adam_and_adam", "sgd_and_adagrad", "ftrl", "groups", "on_plateau")
"""Kinds of shared families that need tables, or the loss of one process."""


def some_steps(rng: random.Random, most: int = 3) -> tuple[int, ...]:
    """A few steps of the loop."""
    return tuple(sorted(rng.sample(range(1, STEPS - 1), rng.randint(1, most))))


def _pick(rng: random.Random, kinds: list[Kind]) -> Kind:
    return rng.choices(kinds, [each.weight for each in kinds])[0]


def _made(rng: random.Random, kind: Kind) -> Block:
    return Block(kind.name, tuple(kind.draw(rng).items()))


class Drawing:
    """The blocks that have been drawn so far, of `usable` kinds."""

    def __init__(self, rng: random.Random, usable: list[Kind]) -> None:
        self.rng = rng
        self.blocks: list[Block] = []
        self._usable = usable

    def add(self, family: str, count: int = 1) -> None:
        """Draw so many blocks of a family, or as many as there are."""
        for _ in range(count):
            drawn = {each.name for each in self.blocks}
            found = [
                each
                for each in self._usable
                if each.family == family and each.weight and not (each.once and each.name in drawn)
            ]
            if found:
                self.blocks.append(_made(self.rng, _pick(self.rng, found)))

    def program(self, seed: int, subject: str = "ps") -> Program:
        return Program(seed, tuple(self.blocks), tuple(range(len(self.blocks))), subject)


def kinds_of(subject: str) -> list[Kind]:
    """All kinds of blocks that its programs may have."""
    left_out = () if subject == "ps" else _ONLY_ON_SERVERS
    return [each for each in KINDS.values() if each.family in FAMILIES[subject] and each.name not in left_out]


def draw(seed: int) -> Program:
    """The program of a seed for parameter servers."""
    rng = random.Random(seed)
    merged = rng.random() < 0.08
    refused = rng.random() < 0.14
    alone = rng.random() < 0.5
    kinds = kinds_of("ps")
    drawing = Drawing(
        rng,
        [
            each
            for each in kinds
            if (not merged or each.merged) and (alone or not each.alone) and not each.refused
        ],
    )
    if merged:
        drawing.blocks.append(_made(rng, KINDS["merged_steps"]))
    drawing.add("job", rng.randint(0, 1))
    drawing.add("table", rng.randint(1, 3))
    drawing.add("use", rng.choice((0, 1, 1, 2)))
    drawing.add("layer", 0 if merged else rng.choice((0, 1, 1, 2)))
    drawing.add("optimizer")
    drawing.add("rate", rng.choice((0, 1, 1)))
    drawing.add("source", rng.choice((0, 1, 1, 1)))
    drawing.add("batch", rng.choice((0, 0, 1, 1, 2)))
    drawing.add("loop", rng.randint(1, 6))
    if refused:
        drawing.blocks.append(_made(rng, _pick(rng, [each for each in kinds if each.refused])))
    drawing.add("collected", rng.random() < 0.4)  # the last, so the other blocks of a seed stay as they were
    return drawing.program(seed)
