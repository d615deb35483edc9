"""What docs/progress.md says: its script runs, and the launcher hears of it."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.command import FLEETRUN, environment
from trainers import fleet, progress

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "progress.md").read_text()


@pytest.mark.slow
def test_the_script_runs_and_reports(tmp_path: Path):
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (tmp_path / "script.py").write_text(block)
    done = subprocess.run(
        [*FLEETRUN, "--max_restart", "0", "script.py"],
        cwd=tmp_path, env=environment({"OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path / "run")}),
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "log").glob("*.events.jsonl")
    events = [json.loads(line) for line in record.read_text().splitlines()]
    last = {each["container"]: each for each in events if each["event"] == "progress"}
    assert {name: (each["step"], each["samples"], each["values"]) for name, each in last.items()} == {
        "trainer.0": (20, 640, {"lr": 0.1})
    }


def test_the_calls_are_there():
    for name in re.findall(r"\| `fleet\.(\w+)\(", TEXT):
        assert getattr(fleet, name) is getattr(progress, name)
