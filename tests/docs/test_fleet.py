"""The script of docs/fleet.md runs; the table of docs/reference/strategies.md is complete."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.command import FLEETRUN, environment
from trainers.strategy import _DEFAULTS, _SERVERS

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "fleet.md").read_text()
STRATEGIES = (DOCS / "reference" / "strategies.md").read_text()


def test_every_field_of_collective_training_has_a_row():
    rows = [line.split("|")[1] for line in STRATEGIES.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    asked = {name for name in _DEFAULTS if name not in _SERVERS}
    assert told == {name for name in asked if name.removesuffix("_configs") not in asked - {name}}


@pytest.mark.slow
def test_the_script_runs(tmp_path: Path):
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (tmp_path / "script.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [*FLEETRUN, "--nproc_per_node", "2", "--max_restart", "0", "script.py"],
        cwd=tmp_path, env=environment({"OMP_NUM_THREADS": "1"}),
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    area, examples, shape = done.stdout.splitlines()
    assert float(area.rpartition(" ")[2]) > 0.9
    assert examples == "256 examples by trainer 0, trainer 1"
    assert shape == "torch.Size([3])"
