"""Readers as programs: what they write is what a data set reads."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainers.data.dataset import QueueDataset
from trainers.data.generator import MultiSlotDataGenerator, Sample
from trainers.data.slots import Slot
from trainers.examples import criteo_reader

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
READER = """
import sys
sys.path.insert(0, {root!r})
from trainers.data.generator import MultiSlotDataGenerator

class Reader(MultiSlotDataGenerator):
    def generate_sample(self, line):
        def samples():
            if line is None:
                yield [("words", [1, 2]), ("score", [0.5]), ("label", [1])]
                return
            label, *words = line.split()
            if label == "#":
                yield None
                return
            yield [("words", [int(w) for w in words]), ("score", [len(words) / 3]), ("label", [int(label)])]
        return samples

{more}
"""
PADDED = """
class Padded(Reader):
    def generate_batch(self, samples):
        def padded():
            longest = max(len(sample[0][1]) for sample in samples)
            for sample in samples:
                yield [("words", sample[0][1] + [0] * (longest - len(sample[0][1]))), *sample[1:]]
        return padded

reader = Padded()
reader.set_batch(2)
reader.run_from_stdin()
"""


def run(folder: Path, more: str, text: str) -> subprocess.CompletedProcess[str]:
    path = folder / "reader.py"
    path.write_text(READER.format(root=str(ROOT), more=more))
    return subprocess.run([sys.executable, path], input=text, capture_output=True, text=True, check=False)


def test_what_a_reader_writes_a_data_set_reads(tmp_path: Path) -> None:
    run(tmp_path, "", "")
    (tmp_path / "reader.py").write_text(READER.format(root=str(ROOT), more="Reader().run_from_stdin()"))
    (tmp_path / "part-0").write_text("1 5 -6 7\n# a comment\n0 8\n0")
    made = QueueDataset()
    slots = [Slot("words", length=None), Slot("score", "float32"), Slot("label")]
    made.init(use_var=slots, pipe_command=f"{sys.executable} {tmp_path}/reader.py", batch_size=8)
    made.set_filelist([tmp_path / "part-0"])
    (batch,) = made
    assert batch.bag("words").values.tolist() == [5, -6, 7, 8]
    assert batch.bag("words").offsets.tolist() == [0, 3, 4, 4]
    assert batch.tensor("score")[:, 0].tolist() == pytest.approx([1, 1 / 3, 0])
    assert batch.tensor("label")[:, 0].tolist() == [1, 0, 0]


def test_a_batch_of_examples_can_be_looked_at_together(tmp_path: Path) -> None:
    done = run(tmp_path, PADDED, "1 5 6 7\n0 8\n0 9\n")
    assert done.stdout.splitlines() == [
        "3 5 6 7 1 1.0 1 1",
        "3 8 0 0 1 0.3333333333333333 1 0",
        "1 9 1 0.3333333333333333 1 0",
    ]


def test_examples_may_come_from_nowhere(tmp_path: Path) -> None:
    assert run(tmp_path, "Reader().run_from_memory()", "").stdout == "2 1 2 1 0.5 1 1\n"


def test_an_error_names_the_line_of_the_input(tmp_path: Path) -> None:
    done = run(tmp_path, "Reader().run_from_stdin()", "1 5\n1 x\n")
    assert done.returncode == 1
    assert "invalid literal for int() with base 10: 'x'" in done.stderr
    assert done.stderr.rstrip().endswith("at line 2 of the input")


def test_a_reader_whose_text_nobody_wants_ends_quietly(tmp_path: Path) -> None:
    run(tmp_path, "Reader().run_from_stdin()", "")
    command = f"yes '1 5' | {sys.executable} {tmp_path}/reader.py | head -n 1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "1 5 1 0.3333333333333333 1 1\n"
    assert done.stderr == ""


def test_examples_must_have_the_same_slots() -> None:
    class Reader(MultiSlotDataGenerator):
        pass

    reader = Reader()
    same: Sample = [("a", [1]), ("b", [2, 3])]
    assert reader.text_of(same) == reader.text_of(same) == "1 1 2 2 3"
    with pytest.raises(ValueError, match=r"slots \['b', 'a'\], but the first sample had \['a', 'b'\]"):
        reader.text_of([("b", [1]), ("a", [1])])
    with pytest.raises(NotImplementedError, match="Reader must define generate_sample"):
        reader.generate_sample("")
    with pytest.raises(ValueError, match=r"set_batch was given 0"):
        reader.set_batch(0)


def test_a_reader_starts_without_what_is_slow() -> None:
    code = (
        "import sys, trainers.data.generator, trainers.examples.criteo_reader\n"
        "print(*sorted({'torch', 'numpy', 'numba', 'fsspec'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# ---- Criteo


def log_line(generator: random.Random) -> str:
    label = generator.choice("01")
    numbers = ["" if generator.random() < 0.2 else str(generator.randint(-3, 70_000)) for _ in range(13)]
    categories = [
        "" if generator.random() < 0.2 else f"{generator.getrandbits(generator.choice([6, 32])):08x}"
        for _ in range(26)
    ]
    return "\t".join([label, *numbers, *categories])


class LineByLine(MultiSlotDataGenerator):
    """The same, as a person would write it."""

    def generate_sample(self, line: str | None) -> Callable[[], Iterator[Sample]]:
        def samples() -> Iterator[Sample]:
            label, *fields = (line or "").rstrip("\r\n").split("\t")
            dense = [criteo_reader.normal(column, fields[column]) for column in range(13)]
            ids = [[criteo_reader.category_id(slot, fields[13 + slot])] for slot in range(26)]
            yield [("dense", dense), *(("id", each) for each in ids), ("label", [int(label)])]

        return samples


def criteo(text: str, *program: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(program or ("-m", criteo_reader.__name__))]
    folder = "/" if program else ROOT
    return subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("program", [(), (Path(criteo_reader.__file__),)], ids=["module", "path"])
def test_logs_of_criteo_become_the_text_of_a_generator(end: str, program: tuple[Path, ...]) -> None:
    generator, reader = random.Random(0), LineByLine()
    lines = [log_line(generator) for _ in range(2000)]
    done = criteo(end.join(lines), *program)
    assert done.returncode == 0, done.stderr
    expected = [reader.text_of(sample) for line in lines for sample in reader.generate_sample(line)()]
    assert done.stdout.splitlines() == expected


def test_a_line_of_criteo_becomes_these_values() -> None:
    numbers = ["10", "-3", "", "25", "64000", *[""] * 8]
    categories = ["68fd1e64", *[""] * 24, "68fd1e64"]
    (text,) = criteo_reader.texts(["\t".join(["1", *numbers, *categories]).encode()])
    words = text.split()
    assert words[:14] == b"13 0.5 0.0 0.0 0.5 1.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0 0.0".split()
    ids = [int(word) for word in words[15:-2:2]]
    assert words[14:-2:2] == [b"1"] * 26
    assert words[-2:] == [b"1", b"1"]
    assert ids[1:25] == [0] * 24
    assert ids[0] == 7611814336352908041 != ids[25], "the same in every process, and another in every slot"
    assert all(0 < identity < 2**63 for identity in (ids[0], ids[25]))


def test_tables_of_texts_do_not_grow_for_ever() -> None:
    table = criteo_reader._Texts(lambda field: field.decode())
    for number in range(table.MOST * 2 + 10):
        assert table[b"%d" % number] == b"%d" % number
    assert len(table) <= table.MOST


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        (0, "7", "the label is 7; it must be 0 or 1"),
        (0, "", "is not a whole number"),
        (3, "1_0", "is not a whole number of base 10"),
        (3, " 1", "is not a whole number of base 10"),
        (20, "0xf", "is not a whole number of base 16"),
    ],
)
def test_a_field_that_only_python_takes_for_a_number_is_an_error(field: int, text: str, said: str) -> None:
    fields = log_line(random.Random(1)).split("\t")
    fields[field] = text
    with pytest.raises(ValueError, match=said):
        list(criteo_reader.texts(["\t".join(fields).encode()]))


def test_a_line_with_other_fields_is_an_error() -> None:
    good = log_line(random.Random(1))
    done = criteo(f"{good}\n{good}\tx\n")
    assert done.returncode == 1
    assert "41 fields" in done.stderr
    assert "line 2" in done.stderr
