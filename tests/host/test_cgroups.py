"""Which cores a process has: what the affinity and the control groups leave."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import fleetrun
from fleetrun.host.cgroups import Groups


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", len(os.sched_getaffinity(0))),
        ("100000 100000", 1),
        ("190000 100000", 1),
        ("50000 100000", 1),
        ("900000000 100000", len(os.sched_getaffinity(0))),
    ],
)
def test_a_quota_counts_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    (tmp_path / "membership").write_text("0::/\n")
    monkeypatch.setattr("fleetrun.host.cgroups.ROOT", tmp_path)
    monkeypatch.setattr("fleetrun.host.cgroups.MEMBERSHIP", tmp_path / "membership")
    assert Groups().cores() == cores


def test_the_quota_counts_wherever_cores_are_counted() -> None:
    """The doctor shows the cores of the machine and the quota side by side."""
    package = Path(fleetrun.__file__).parent
    counting = re.compile(r"cpu_count\(|len\(os\.sched_getaffinity")
    found = {
        str(each.relative_to(package)) for each in package.rglob("*.py") if counting.search(each.read_text())
    }
    assert found == {"host/cgroups.py", "doctor/measure.py"}
