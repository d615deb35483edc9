"""The data parallel bench's table."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def ddp() -> Iterator[ModuleType]:
    """bench/ddp.py; the folder is no package."""
    sys.path.insert(0, str(BENCH))
    try:
        yield importlib.import_module("ddp")
    finally:
        sys.path.remove(str(BENCH))


def test_the_ratio_is_the_median_of_the_rounds(ddp: ModuleType) -> None:
    found = {
        "mlp": {"ours": [990.0, 500.0, 2000.0], "torch": [1000.0] * 3, "both": [0.995, 0.99, 0.5]},
        "resnet18": {"ours": [97.0, 97.0, 97.0], "torch": [100.0] * 3, "both": [0.97] * 3},
    }
    mlp, resnet = ddp.table(found, 3).splitlines()[-2:]
    assert "| 2 x 64 | 990 [500-2,000] | 1,000 [1,000-1,000] | 0.990 [0.500-2.000] |" in mlp
    assert mlp.endswith("| 0.990 [0.500-0.995] | yes, yes |")
    assert resnet.endswith("| 0.970 [0.970-0.970] | 0.970 [0.970-0.970] | no, no |")


def test_a_run_that_fails_is_told_with_what_it_printed(ddp: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"(?s)torch exited with code 2:.*unrecognized"):
        ddp.run([sys.executable, "-c", "import sys; print('unrecognized'); sys.exit(2)"], "torch", tmp_path)
