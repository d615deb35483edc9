"""What the pages on parameter servers say, held against the code: settings, commands, scripts and bytes."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import IntEnum
from itertools import product
from pathlib import Path

import pytest
import torch

from fleetrun.verbs import VERBS
from tests.support.blocks import files
from tests.support.cluster import PATH
from tests.support.command import FLEETRUN, environment
from trainers.ps.configs import AsyncConfigs, PsConfigs, TableConfigs
from trainers.ps.tables.rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AnyRule,
    RMSprop,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseAdam,
    state_widths,
)
from trainers.ps.tables.spec import RowType
from trainers.ps.tables.storage import Storage
from trainers.ps.wire import VERSION, Code, Field, Kind, Message, Part, decode, encode

ROOT = Path(__file__).resolve().parents[2]
GUIDE = sorted((ROOT / "docs").glob("parameter-server*.md"))
TEXT = "\n".join(page.read_text() for page in GUIDE)
BENCHMARKS = sorted((ROOT / "docs").glob("benchmarks*.md"))
PAGES = [*GUIDE, ROOT / "README.md", *BENCHMARKS]

SETTINGS = {
    "strategy.ps_configs": PsConfigs,
    "strategy.a_sync_configs": AsyncConfigs,
    "strategy.sparse_table_configs": TableConfigs,
}

# The message whose bytes the page shows.
SHOWN = Message(
    kind=Kind.PUSH,
    rank=1,
    incarnation=0x1122334455667788,
    sequence=9,
    number=4,
    parts=(
        Part(0, Field.KEYS, torch.tensor([7, -1])),
        Part(0, Field.ROWS, torch.tensor([[0.5], [-0.25]]), 0.01),
        Part(1, Field.WANT, torch.tensor([2])),
    ),
)


def section(title: str) -> str:
    """What stands between the heading `title` and the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, f"no section {title!r}"
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("title", SETTINGS)
def test_every_key_is_told_with_its_default(title: str):
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.+) \|$", section(title), re.MULTILINE)
    wanted = []
    for field in fields(SETTINGS[title]):
        assert field.default is not MISSING
        wanted.append((field.name, repr(field.default)))
    assert [(name, default) for name, default, _ in rows] == wanted


@pytest.mark.parametrize("enum", [Kind, Field, Code])
def test_every_number_of_the_wire_is_told(enum: type[IntEnum]):
    rows = re.findall(r"^\| ([A-Z_]+) (\d+) \|", section("The wire"), re.MULTILINE)
    told = {(name, int(number)) for name, number in rows}
    everything = {(member.name, int(member)) for each in (Kind, Field, Code) for member in each}
    assert {(member.name, int(member)) for member in enum} <= told
    assert told <= everything


def test_the_shown_message_is_what_the_code_makes():
    (dump,) = blocks(section("The wire"), "text")
    frames: list[bytes] = []
    lengths = []
    for line in dump.splitlines():
        row = re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ?){1,8})(?: |$)", line)
        if row is None:
            title = re.fullmatch(r"\w+ frame, (\d+) bytes", line)
            assert title, line
            lengths.append(int(title[1]))
            frames.append(b"")
            continue
        assert int(row[1], 16) == len(frames[-1])
        frames[-1] += bytes.fromhex(row[2])
    assert frames == [bytes(frame) for frame in encode(SHOWN)]
    assert lengths == [len(frame) for frame in frames]
    again = decode(frames)
    assert (again.kind, again.rank, again.sequence, again.number) == (Kind.PUSH, 1, 9, 4)
    assert f"Version {VERSION}." in section("The wire")


def test_the_formula_of_a_row_is_that_of_the_table():
    rules: list[AnyRule] = [SGD(), Adagrad(), SparseAdam(), Adam(), RMSprop(), FTRL()]
    for rule, states in zip(rules, (0, 1, 2, 2, 1, 2), strict=True):
        assert rule.states == states
        assert f"{type(rule).__name__} {states}" in section("Sizing")
    assert f"{RowWiseAdagrad.__name__} one number a row, {RowWiseAdam.__name__} 1 and one" in section(
        "Sizing"
    )
    for rule in (*rules, RowWiseAdagrad(), RowWiseAdam()):
        for dim, statistics, dtype in product((1, 9, 16), (0, 3), RowType):
            widths = state_widths(rule, dim)
            storage = Storage(dim, sum(widths), statistics, dtype=dtype)
            value = 2 if dtype else 4
            assert 4 * storage.stride == 8 + 4 * (-(-dim * value // 4) + sum(widths) + statistics)


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each command in the page's bash blocks, without variables in front."""
    for block in blocks(path.read_text(), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("-")}


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """A launch of one of our examples: what is fleetrun's, and what begins with the example."""
    for at, word in enumerate(words):
        if word.startswith(("trainers/", "trainers.")):
            return words[:at], words[at:]
    return words, []


def source_of(module: str) -> str:
    """With that of what it has from other examples."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    assert path.is_file(), f"there is no module {module}"
    text = path.read_text()
    others = re.findall(r"^from (trainers\.examples\.\w+) import", text, re.MULTILINE)
    return "".join([text, *map(source_of, others)])


@functools.cache
def help_of(verb: str) -> str:
    """Of a launch, or of another command; doctor, up and again take the options of a launch too."""
    words = [[verb, "--help"]] if verb else []
    if verb in ("", "doctor", "up", "again"):
        words.append(["--help"])
    done = [subprocess.run([*FLEETRUN, *each], capture_output=True, text=True, check=True) for each in words]
    return "".join(each.stdout for each in done)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_options_of_commands_exist(page: Path):
    for words in commands(page):
        if words[0] == "fleetrun":
            verb = words[1] if words[1] in VERBS else ""
            known = help_of(verb)
            own, rest = split(words[2:] if verb else words[1:])
            if rest:
                script = source_of(rest[0].removesuffix(".py").replace("/", "."))
                assert all(f'"{option}"' in script for option in options(rest)), words
            assert all(re.search(rf"(?<!\S){option}\b", known) for option in options(own)), words
        elif words[0] == "python" and words[1].startswith("bench/"):
            script = (ROOT / words[1]).read_text()
            assert all(f'"{option}"' in script for option in options(words[2:])), words


def test_every_bench_has_a_place_for_its_table():
    text = "\n".join(page.read_text() for page in BENCHMARKS)
    for bench in sorted((ROOT / "bench").glob("[a-z]*.py")):
        if "put_between_marks" in bench.read_text():
            marks = [f"<!-- bench/{bench.name} --write: {word} -->" for word in ("begin", "end")]
            assert [text.count(mark) for mark in marks] == [1, 1], bench.name


def test_links_lead_to_headings():
    titles = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors


STREAM = ROOT / "docs" / "parameter-server-streams.md"


def scripts() -> list[str]:
    """Whole programs that need nothing beside them; the stream has a writer, and a test of its own."""
    found = [block for block in blocks(TEXT, "python") if "fleet.run_server()" in block]
    return [script for script in found if script not in STREAM.read_text()]


def run(folder: Path, words: tuple[str, ...] = ()) -> str:
    """What `train.py` in it prints."""
    command = [*FLEETRUN, "--server_num=1", "--trainer_num=2", "--max_restart=0", *words, "train.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment({"PYTHONPATH": PATH}),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_is_a_whole_program():
    assert len(scripts()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("script", scripts())
def test_whole_programs_run_and_learn(script: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(script)
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run(tmp_path))]
    assert len(losses) == 3
    assert losses[-1] < 0.3 < torch.log(torch.tensor(2.0))


@pytest.mark.slow
def test_the_stream_trains_while_its_files_grow_and_ends_with_their_writer(tmp_path: Path):
    scripts = {file.name: file.text for file in files(STREAM)}
    assert set(scripts) == {"train.py", "write_clicks.py"}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    with subprocess.Popen([sys.executable, "write_clicks.py"], cwd=tmp_path) as writer:
        printed = run(tmp_path, ("--follow", "all"))
        assert writer.wait(60) == 0
    losses = [float(loss) for loss in re.findall(r"batch \d+: loss ([\d.]+)", printed)]
    assert len(losses) >= 3
    assert losses[-1] < losses[0] < 1
    assert not list((tmp_path / "tables").iterdir()), "the positions end with the job"
