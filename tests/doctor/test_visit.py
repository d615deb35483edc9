"""The table at several widths, and the document."""

import json

import pytest

from fleetrun.console.text import columns
from fleetrun.doctor import visit
from fleetrun.doctor.facts import failed, figure, passed, warned
from fleetrun.doctor.visit import Section
from fleetrun.envs.settings.parsing import byte_size

SECTIONS = [
    Section("h1 (10.0.0.1)", (passed("python", "3.11.7"), warned("/dev/shm", "64 MiB " * 12, "mend " * 20))),
    Section("All nodes", (failed("runtime folder", "主机" * 30, "Say\x1b[31m so"),)),
]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = visit.findings_table(SECTIONS, width, colour=False)
    assert [line for line in lines if columns(line) >= width] == []


def test_in_a_pipe_lines_are_whole() -> None:
    lines = visit.findings_table(SECTIONS, None, colour=False)
    assert lines[1] == "  pass  python         3.11.7"
    assert lines[-1] == "1 passed, 1 warning, 1 failed: a job with these options would not run"
    assert sum("mend mend" in line for line in lines) == 1


def test_nothing_does_anything_to_the_terminal() -> None:
    assert "\x1b" not in "".join(visit.findings_table(SECTIONS, 80, colour=False))
    painted = "".join(visit.findings_table(SECTIONS, 80, colour=True))
    assert "\x1b[31m so" not in painted
    assert "\x1b[1;31mFAIL\x1b[0m" in painted


def test_a_good_end() -> None:
    lines = visit.findings_table([Section("h1", (passed("python", "3.11.7"),))], 80, colour=False)
    assert lines[-1].startswith("1 passed, 0 warnings, 0 failed: no check found")


def test_the_document() -> None:
    found = json.loads(visit.findings_json(SECTIONS, {"facts": {"a": 1}}))
    assert (found["version"], found["ok"], found["facts"]) == (1, False, {"a": 1})
    assert found["sections"][0]["checks"][0] == {
        "check": "python", "verdict": "pass", "found": "3.11.7", "mend": "",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (64 << 20, "64 MiB"),
        (1023 << 20, "1023 MiB"),
        (3 << 41, "6 TiB"),
    ],
)
def test_sizes(amount: int, text: str) -> None:
    assert byte_size(amount) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(0.25, "0.25"), (17.34, "17.3"), (99.96, "100"), (1180.4, "1180"), (0, "0")]
)
def test_figures_have_no_exponent(amount: float, text: str) -> None:
    assert figure(amount) == text
