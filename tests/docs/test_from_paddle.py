"""The names of docs/reference/paddle-names.md, held against Paddle's documents and against the code."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fleetrun.envs import contract
from tests.docs.seed_names import listed
from tests.envs.test_contract import MEMBERS
from tests.support.command import FLEETRUN

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "paddle-names.md").read_text()
NAMES = (ROOT / "tests" / "docs" / "seed_names.txt").read_text().split()
"""What `python -m tests.docs.seed_names` lists of the quick starts of Paddle Fleet."""

DOCUMENT = """
    from paddle.distributed import fleet
    import paddle.static as static  # as they say
    import model as paddle_like

    def made():
        optimizer = paddle.optimizer.Momentum(0.1)
        return optimizer

    strategy = fleet.DistributedStrategy()
    strategy.a_sync = True
    exe = static.Executor(place)
    optimizer = made()
    optimizer.step()
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    for data in loader(): exe.run(paddle_like.program, feed=data)

    .. csv-table:: FleetAPI 接口说明
       "stop_worker", "..."

    python3 -m paddle.distributed.launch --gpus=0,1 train.py --lr 1
    LAUNCH INFO 2022-05-18 11:27:17,761 -----------  Configuration  ----------------------
    LAUNCH INFO 2022-05-18 11:27:17,761 servers:
    LAUNCH INFO 2022-05-18 11:27:17,761 ---------------------------------------
    |                     PADDLE_TRAINERS_NUM                        2                      |
"""


def rows(page: str) -> Iterator[tuple[list[str], list[str]]]:
    """What stands between backticks in the first two cells of each row of each table."""
    for line in page.splitlines():
        cells = line.split("|")
        if line.startswith("|") and len(cells) >= 4:
            yield re.findall(r"`([^`]+)`", cells[1]), re.findall(r"`([^`]+)`", cells[2])


def ours() -> set[str]:
    """Names of ours in second cells: `fleet.init(...)` is fleet.init."""
    spans = [span for _, cell in rows(PAGE) for span in cell]
    found = (re.match(r"(?:fleet|static|trainers|torch)(?:\.[A-Za-z_]\w*)+", span) for span in spans)
    return {match[0] for match in found if match}


@cache
def resolved(name: str) -> Any:
    """The object of that name. Raises AttributeError, ModuleNotFoundError."""
    parts = {"fleet": "trainers.fleet", "static": "trainers.static"}
    root, *rest = name.split(".")
    found: Any = importlib.import_module(parts.get(root, root))
    path = found.__name__
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part) and part in getattr(found, "__annotations__", {}):
            return None  # a field that an object gets when it is made
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(path)
    return found


def test_the_list_finds_names_options_and_variables():
    fleet = "paddle.distributed.fleet"
    assert listed([DOCUMENT]) == sorted([
        "--gpus", "--servers", "PADDLE_TRAINERS_NUM", fleet, f"{fleet}.DistributedStrategy",
        f"{fleet}.DistributedStrategy.a_sync", f"{fleet}.distributed_optimizer", f"{fleet}.stop_worker",
        "paddle.distributed.launch", "paddle.optimizer.Momentum", "paddle.optimizer.Momentum.step",
        "paddle.static", "paddle.static.Executor", "paddle.static.Executor.run",
    ])  # fmt: skip


def test_every_name_in_the_quick_starts_has_a_row():
    told = {span for cell, _ in rows(PAGE) for span in cell}
    assert not [name for name in NAMES if name not in told]


def test_no_row_is_about_a_name_that_nobody_uses():
    """Rows of what the quick starts do not use are in other tables, under names without `paddle.`."""
    told = {span for cell, _ in rows(PAGE) for span in cell if span.startswith("paddle.")}
    assert not told - set(NAMES)


def test_there_are_names_to_look_at():
    assert len(NAMES) > 100
    assert len(ours()) > 50


@pytest.mark.parametrize("name", sorted(ours()))
def test_our_names_exist(name: str):
    resolved(name)


def test_a_name_that_does_not_exist_is_seen():
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolved("fleet.distributed_modle")


def test_the_launcher_takes_every_option():
    sections = ("", "#older-spellings", "#options-that-only-paddles-programs-need")
    words = (["--help"], *(["help", f"paddle{section}"] for section in sections))
    told = [subprocess.run([*FLEETRUN, *each], capture_output=True, text=True, check=True) for each in words]
    text = "".join(done.stdout for done in told)
    missing = [name for name in NAMES if name.startswith("--") and not re.search(rf"{name}\b", text)]
    assert not missing


def test_the_launcher_sets_every_variable():
    told = {name for member in MEMBERS.values() for name in contract.write(member)}
    variables = [name for name in NAMES if not name.startswith(("--", "paddle"))]
    assert variables
    assert not [name for name in variables if name not in told]
