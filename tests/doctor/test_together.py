"""What is to be typed on the other machines."""

import pytest

from fleetrun.doctor.node_group import _elsewhere
from fleetrun.doctor.requirements import Plan
from fleetrun.envs.settings import command_line
from fleetrun.envs.settings.resolve import resolve


@pytest.mark.parametrize(
    ("named", "line"),
    [(True, ("--nnodes=2", "train.py")), (False, ("--nnodes=2",))],
)
def test_a_script_is_named_only_where_a_person_named_it(named: bool, line: tuple[str, ...]) -> None:
    resolved = resolve(command_line.read(["--nnodes", "2", "--host", "10.0.0.1", "train.py"]), {})
    assert _elsewhere(resolved, Plan(names_script=named)) == line
