"""The example of TorchRec's DLRM: on parameter servers, and as the script for TorchRec that it was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cluster import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is missing: see CONTRIBUTING.md"),
]
SCRIPT = ROOT / "examples" / "torchrec_dlrm.py"
WAS = re.compile(r"^( *)(?P<now>.*?)  # TorchRec:(?P<was>.*)$")


def lines() -> list[tuple[str, str | None]]:
    """Each line of the example, with what it was for TorchRec if it differs."""
    found = [(line, WAS.match(line)) for line in SCRIPT.read_text().splitlines()]
    return [(line, None if match is None else match[1] + match["was"].strip()) for line, match in found]


def for_torchrec() -> str:
    kept = [line if was is None else was for line, was in lines() if was is None or was.strip()]
    return "\n".join(kept) + "\n"


def run(folder: Path, *command: str, **env: str) -> float:
    """The last mean loss that it prints."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    return float(re.findall(r"step 200: mean loss ([\d.]+)", ended.stdout)[-1])


def test_six_places_differ_from_the_script_for_torchrec() -> None:
    changed = [line.strip() for line, was in lines() if was is not None]
    of_servers = ("fleet.init_server", "fleet.run_server", "return")
    assert len([line for line in changed if not line.startswith(of_servers)]) == 6
    assert "fleet" not in for_torchrec().split('"""')[2]


def test_it_learns_as_the_script_for_torchrec(tmp_path: Path) -> None:
    (tmp_path / "rival.py").write_text(for_torchrec())
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    wanted = run(tmp_path, sys.executable, "rival.py", "--batches=200", **alone)
    fleetrun = str(Path(sys.executable).with_name("fleetrun"))
    found = run(tmp_path, fleetrun, "--server_num=1", "--trainer_num=1", str(SCRIPT), "--batches=200")
    assert 0.4 < wanted < 0.65
    assert abs(found - wanted) < 0.04, "other batches of the same clicks"
