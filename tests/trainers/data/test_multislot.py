"""MultiSlot text: the parser against a slow, independent reading of the same lines."""

from __future__ import annotations

import io
import random
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout, Slot
from trainers.data.store import Columns
from trainers.errors import DataError

pytestmark = pytest.mark.slow

MIXED = Layout.of(
    [
        Slot("dense", "float32", 3),
        Slot("one"),
        Slot("many", length=None),
        Slot("pair", length=2),
        Slot("weights", "float32", None),
        Slot("last", length=None),
        Slot("label", torch.float32),
    ]
)


class Text:
    """A source that gives at most `step` bytes at a time, cut anywhere."""

    def __init__(self, text: bytes, step: int = 1 << 30, name: str = "part-0") -> None:
        self.name = name
        self._stream = io.BytesIO(text)
        self._step = step

    def readinto(self, buffer: memoryview) -> int:
        return self._stream.readinto(buffer[: self._step])


def parse(layout: Layout, *sources: Text, batch: int = 4, broken: BrokenLines | None = None) -> list[Columns]:
    parser = Parser(layout, batch, broken or BrokenLines())
    pieces = [piece for source in sources for piece in parser.read(source)]
    assert all(len(piece) % batch == 0 for piece in pieces)
    return [*pieces, parser.rest()]


def rows(pieces: list[Columns]) -> list[list[list[float]]]:
    """Examples as lists of lists, read through the tensors that a step would see."""
    found = []
    for piece in pieces:
        batch = piece.batch()
        bags = [batch.bag(name) if batch.layout.places[name].kind != 0 else None for name in batch.names]
        for i in range(len(batch)):
            example = []
            for name, bag in zip(batch.names, bags, strict=True):
                if bag is None:
                    example.append(batch.tensor(name)[i].tolist())
                else:
                    example.append(bag.values[bag.offsets[i] : bag.offsets[i + 1]].tolist())
            found.append(example)
    return found


def nearest_float32(text: str) -> float:
    """By exact arithmetic: of the two float32 values around it the nearer, the even one in the middle."""
    exact = Fraction(text)
    guess = np.float32(float(exact))
    with np.errstate(over="ignore"):
        options = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    finite = [option for option in options if np.isfinite(option)]
    return float(min(finite, key=lambda o: (abs(Fraction(float(o)) - exact), int(o.view(np.uint32)) & 1)))


def wrapped(text: str) -> int:
    value = int(text)
    return value - 2**64 if value >= 2**63 else value


def reference(line: str, layout: Layout) -> list[list[float]]:
    words = iter(line.split())
    example: list[list[float]] = []
    for slot in layout.slots:
        read = wrapped if str(slot.dtype).endswith("int64") else nearest_float32
        example.append([read(next(words)) for _ in range(int(next(words)))])
    assert next(words, None) is None
    return example


WHOLES = [
    "0",
    "-0",
    "+7",
    "007",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "00000000000000000000000012",
]
FLOATS = [
    "0",
    "-0.0",
    "1",
    ".5",
    "5.",
    "+1.25",
    "1e0",
    "1E+3",
    "-2.5e-3",
    "3.4028235e38",
    "1e-45",
    "1e-60",
    "0e999",
    "1.17549435e-38",
    "7e-46",
    "16777217",
    "16777217.0",
    "16777219",
    "1600000064.0",
    "0.1000000014901161193847656250000001",
    "9007199254740993",
    "123456789012345678901234567890",
    "0.000000000000000000000000000000000012345678",
    "1.00000005960464477539062500000",
    "1.00000005960464477539062500001",
    "1.000000059604644775390624999",
]


def random_line(generator: random.Random, layout: Layout) -> str:
    words = []
    for slot in layout.slots:
        count = generator.choice([0, 1, 2, 5]) if slot.length is None else slot.length
        words.append(str(count))
        for _ in range(count):
            if str(slot.dtype).endswith("int64"):
                words.append(generator.choice([*WHOLES, str(generator.randint(-(2**63), 2**64 - 1))]))
            else:
                value = generator.uniform(-1, 1) * 10 ** generator.randint(-44, 38)
                words.append(generator.choice([*FLOATS, f"{value:.6g}", f"{value:.25f}"[:40], repr(value)]))
    return generator.choice([" ", "  ", "\t"]).join(words) + generator.choice(["", " ", "\t "])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_random_lines_are_what_a_slow_reading_says(end: str) -> None:
    generator = random.Random(1)
    lines = [random_line(generator, MIXED) for _ in range(3000)]
    text = "".join(line + end for line in lines).encode()
    assert rows(parse(MIXED, Text(text), batch=7)) == [reference(line, MIXED) for line in lines]


def test_lines_may_be_cut_anywhere() -> None:
    generator = random.Random(2)
    lines = [random_line(generator, MIXED) for _ in range(6)]
    text = "\n".join(lines).encode()  # the last without its end
    wanted = [reference(line, MIXED) for line in lines]
    for cut in range(1, len(text)):
        assert rows(parse(MIXED, Text(text, cut))) == wanted


def test_every_float32_near_its_middles_is_read_exactly() -> None:
    generator = np.random.default_rng(3)
    bits = generator.integers(0, 0x7F7FFFFF, 4000, dtype=np.uint32)
    words = []
    for low in bits.view(np.float32):
        middle = (Fraction(float(low)) + Fraction(float(np.nextafter(low, np.float32(np.inf))))) / 2
        words += [f"{float(low):.9g}", f"{float(middle):.17g}", f"{float(middle):.60e}"]
    layout = Layout.of([Slot("x", "float32")])
    found = [row[0][0] for row in rows(parse(layout, Text("".join(f"1 {w}\n" for w in words).encode())))]
    assert found == [nearest_float32(word) for word in words]


def test_batches_go_across_blocks_and_sources() -> None:
    layout = Layout.of([Slot("id"), Slot("pad", "float32", 200)])
    pad = " 200" + " 0.25" * 200
    lines = [f"1 {i}{pad}" for i in range(10_000)]  # several blocks of a megabyte
    half = 4321
    sources = [Text("\n".join(part).encode()) for part in (lines[:half], lines[half:])]
    pieces = parse(layout, *sources, batch=512)
    assert [row[0][0] for row in rows(pieces)] == list(range(10_000))
    assert len(pieces[-1]) == 10_000 % 512


def test_a_line_longer_than_a_block_is_read() -> None:
    layout = Layout.of([Slot("many", length=None), Slot("label")])
    ids = list(range(10**9, 10**9 + 300_000))
    text = f"{len(ids)} {' '.join(map(str, ids))} 1 5\n1 3 1 6\n".encode()
    assert len(text) > 3 << 20
    assert rows(parse(layout, Text(text))) == [[ids, [5]], [[3], [6]]]


def test_what_was_handed_on_stays_as_it_was() -> None:
    layout = Layout.of([Slot("id"), Slot("many", length=None)])
    parser = Parser(layout, 2, BrokenLines())
    text = "".join(f"1 {i} 2 {i} {i + 1}\n" for i in range(500)).encode()
    pieces, copies = [], []
    for piece in parser.read(Text(text, 64)):
        pieces.append(piece)
        copies.append(rows([piece]))
    assert [rows([piece]) for piece in pieces] == copies
    assert len(pieces) > 50


AFTER = " 0 2 1 1 0 1 9 1 0.5"
GOOD = "3 1 2 3 1 5 0 2 1 1 0 1 9 1 0.5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "expected 7 slots, found an empty line"),
        ("3 1 2", "expected value 3 of 3 of slot 'dense', a number, found the end of the line"),
        ("3 1 2 x", "expected value 3 of 3 of slot 'dense', a finite number, found 'x'"),
        ("3 1 2 nan", "expected value 3 of 3 of slot 'dense', a finite number, found 'nan'"),
        ("3 1 2 inf", "a finite number, found 'inf'"),
        ("3 1 2 -inf", "a finite number, found '-inf'"),
        ("3 1 2 0x10", "a finite number, found '0x10'"),
        ("3 1 2 1e", "a finite number, found '1e'"),
        ("3 1 2 .", "a finite number, found '.'"),
        ("3 1 2 1.2.3", "a finite number, found '1.2.3'"),
        ("3 1 2 3.5e38", "within float32's range, found '3.5e38'"),
        ("3 1 2 1e400", "within float32's range, found '1e400'"),
        ("2 1 2 1 5", "expected 3 as the number of values of slot 'dense', found '2'"),
        ("3 1 2 3 1 5.0", "expected value 1 of 1 of slot 'one', a whole number, found '5.0'"),
        (f"3 1 2 3 1 {2**64}{AFTER}", "a whole number of 64 bits, found '18446744073709551616'"),
        (f"3 1 2 3 1 {-(2**63) - 1}{AFTER}", "a whole number of 64 bits, found '-9223372036854775809'"),
        (f"3 1 2 3 1 {'9' * 5000}{AFTER}", "a whole number of 64 bits, found '9999999999"),
        ("3 1 2 3 1 5 -1", "expected the number of values of slot 'many', found '-1'"),
        (
            "3 1 2 3 1 5 99999999999 1",
            "expected value 2 of 99999999999 of slot 'many', a whole number, found the end of the line",
        ),
        (f"3 1 2 3 1 5 {2**64 - 1} 1", "expected the number of values of slot 'many', found '1844"),
        ("3 1 2 3 1 5 1", "value 1 of 1 of slot 'many', a whole number, found the end of the line"),
        ("3 1 2 3", "expected the number of values of slot 'one', found the end of the line"),
        (f"{GOOD} 1", "expected the end of the line after slot 'label', found '1'"),
        (f"{GOOD}\x00", "a finite number, found '0.5\\x00'"),
        ("3 1,2 3", "a finite number, found '1,2'"),
        ("3 1 2 \xff", "a finite number, found"),
    ],
)
def test_a_broken_line_is_an_error_that_says_where_and_what(line: str, message: str) -> None:
    text = f"{GOOD}\n{GOOD}\n{line}\n{GOOD}\n".encode("latin-1")
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        parse(MIXED, Text(text, name="data/part-7"))
    assert str(caught.value).startswith("data/part-7:3: expected")
    assert "max_bad_lines" in str(caught.value)


def test_broken_lines_are_skipped_and_counted_up_to_the_limit() -> None:
    layout = Layout.of([Slot("id")])
    text = b"1 1\nx\n1 2\n\n1 3\n1 4"
    broken = BrokenLines(limit=2)
    assert rows(parse(layout, Text(text), broken=broken)) == [[[1]], [[2]], [[3]], [[4]]]
    assert broken.count == 2
    assert broken.first == "part-0:2: expected the number of values of slot 'id', found 'x'"
    with pytest.raises(
        DataError, match=r"3 lines are broken, but max_bad_lines is 2\. First: part-0:2: .*Last: b:1"
    ):
        parse(layout, Text(b"y\n", name="b"), broken=broken)


def test_binary_data_is_told_from_text_before_it_fills_the_memory() -> None:
    with pytest.raises(DataError, match="part-0:1: the line is longer than 64 MiB"):
        parse(MIXED, Text(b"\0" * (65 << 20)))
