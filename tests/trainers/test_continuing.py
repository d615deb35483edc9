"""Which of fleet's calls that make a training go on is for which kind of job. No process and no socket."""

from collections.abc import Callable

import pytest
import torch

from tests.trainers.test_fleet import server, trainer
from trainers.errors import UsageError
from trainers.fleet import Fleet

CALLS: list[Callable[[Fleet], object]] = [
    lambda fleet: fleet.save_checkpoint("saved", 1, torch.nn.Linear(1, 1)),
    lambda fleet: fleet.load_checkpoint("saved", torch.nn.Linear(1, 1)),
    lambda fleet: fleet.load_latest("saved", torch.nn.Linear(1, 1)),
    lambda fleet: fleet.wait_checkpoint(),
]


@pytest.mark.parametrize("call", CALLS)
def test_checkpoints_are_for_collective_jobs(call: Callable[[Fleet], object]) -> None:
    for fleet in (trainer(), server()):
        with pytest.raises(UsageError, match=r"is for collective training.*ps_configs durability"):
            call(fleet)


@pytest.mark.parametrize(
    "call", [*CALLS, lambda fleet: fleet.stop_requested(), lambda fleet: fleet.resume_step()]
)
def test_nothing_works_before_init(call: Callable[[Fleet], object]) -> None:
    with pytest.raises(UsageError, match=r"was called before fleet\.init\(\)"):
        call(Fleet())


def test_with_parameter_servers_the_step_is_theirs() -> None:
    with pytest.raises(UsageError, match=r"fleet\.init_worker\(\) has not been called"):
        trainer().resume_step()
    with pytest.raises(UsageError, match="on a server"):
        server().resume_step()
