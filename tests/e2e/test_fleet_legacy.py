"""The first FleetAPI's program, started in each way that its document knows: the same costs,
whoever says who a process is. By hand: tests/trainers/examples/test_fleet_legacy.py.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.cluster import ROOT
from tests.support.command import Fleetrun
from tests.support.mpi import mpirun
from trainers.inference import load_inference_model
from trainers.ps import read_values

pytestmark = pytest.mark.slow

BOUND = 110.0
PROGRAM = str(ROOT / "trainers" / "examples" / "fleet_legacy.py")
SMALL = ("--rows", "72", "--passes", "2", "--steps", "5", "--seed", "3")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# numba has colorama write ESC[0m at the end of each process, also in front of another's line.
LINE = re.compile(
    r"^(?:\x1b\[0m)*Pass (\d), cost = (\d\.\d{6}), auc = (\d\.\d{6}), batch_auc = (\d\.\d{6})$", re.MULTILINE
)

Costs = list[float]


def costs(text: str) -> Costs:
    """Of each step that was printed; the AUCs next to it make sense."""
    found = LINE.findall(text)
    assert all(0 < float(auc) < 1 for _, _, *aucs in found for auc in aucs), text
    return [float(cost) for _, cost, *_ in found]


def alike(found: list[Costs], expected: list[Costs]) -> bool:
    """A step of all workers is the same whoever adds up, to float tolerance."""
    return [len(each) for each in found] == [len(each) for each in expected] and all(
        one == pytest.approx(other, abs=1e-4) for one, other in zip(found, expected, strict=True)
    )


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Costs]]]:
    """The folder of a job of fleetrun, and what each of its two workers printed."""
    with Fleetrun(tmp_path_factory.mktemp("launched")) as fleetrun:
        saving = ("--role_maker", "cloud", "--save_dir", "saved")
        launch = fleetrun.start("--server_num=1", "--worker_num=2", PROGRAM, *SMALL, *saving, env=ONE_THREAD)
        assert launch.wait(BOUND) == 0, launch
        assert LINE.search(launch.out), launch
        yield fleetrun.folder, [costs(fleetrun.log(f"trainer.{worker}")) for worker in range(2)]


def test_the_launcher_says_who_is_who(launched: tuple[Path, list[Costs]]):
    first, second = launched[1]
    assert len(first) == len(second) == 5
    assert not alike([first], [second]), "each worker has its own rows"


def test_what_it_saved_predicts_without_fleet(launched: tuple[Path, list[Costs]]):
    folder, _ = launched
    values = read_values(folder / "saved" / "persistables")
    assert {"wide.weight", "deep.0.weight"} <= values.dense.keys()
    (table,) = values.sparse.values()
    model = load_inference_model(folder / "saved" / "inference")
    ids = table.keys[:26].repeat(5, 1)
    logits = model(ids, torch.zeros(5, 13))
    assert logits.shape == (5,)
    assert bool(torch.isfinite(logits).all())
    assert not torch.equal(logits[:1], model(torch.zeros(1, 26, dtype=torch.int64), torch.zeros(1, 13)))


@pytest.mark.mpi
def test_under_mpirun_every_second_process_is_a_server(
    fleetrun: Fleetrun, launched: tuple[Path, list[Costs]]
):
    launch = fleetrun.start(
        *SMALL, prefix=mpirun("Open MPI", 4), command=(sys.executable, PROGRAM), env=ONE_THREAD
    )
    assert launch.wait(BOUND) == 0, launch
    assert alike([sorted(costs(launch.out))], [sorted([*launched[1][0], *launched[1][1]])]), launch
