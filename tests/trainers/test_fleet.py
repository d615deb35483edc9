"""The order of calls, and who may make them. No process and no socket."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainers import fleet
from trainers.errors import NotSupportedError, UsageError
from trainers.fleet import Fleet
from trainers.roles.identity import Identity
from trainers.storage.errors import LoadError
from trainers.strategy import DistributedStrategy

PS = {
    "worker_num": 2,
    "trainers": ("h:1", "h:2"),
    "servers": ("h:3", "h:4"),
    "launched_as_ps": True,
    "master": "h:5",
}


class Me:
    """A role maker that was told."""

    def __init__(self, **fields: Any) -> None:
        self._identity = Identity(**fields)

    def identity(self) -> Identity:
        return self._identity


def trainer(index: int = 0) -> Fleet:
    fleet = Fleet()
    fleet.init(role_maker=Me(**PS, index=index))
    return fleet


def server() -> Fleet:
    fleet = Fleet()
    fleet.init(role_maker=Me(**PS, index=1, is_server=True))
    return fleet


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_cannot_be_trained_is_said() -> None:
    fleet = trainer()
    _, sgd = model_and_optimizer()
    with pytest.raises(UsageError, match=r"distributed_model needs a torch\.nn\.Module, not <class"):
        fleet.distributed_model(torch.nn.Linear)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Pass torch's optimizer, once"):
        fleet.distributed_optimizer(fleet.distributed_optimizer(sgd))


def test_a_strategy_that_was_refused_counts_for_nothing() -> None:
    fleet = trainer()
    model, sgd = model_and_optimizer()
    wrong = DistributedStrategy()
    wrong.lars = True
    with pytest.raises(UsageError, match="lars"):
        fleet.distributed_optimizer(sgd, wrong)
    fleet.distributed_model(model)
    fleet.distributed_optimizer(sgd)


def test_who_am_i() -> None:
    me = trainer(1)
    assert (me.is_worker(), me.is_server(), me.is_first_worker()) == (True, False, False)
    assert (me.worker_index(), me.worker_num(), me.server_num()) == (1, 2, 2)
    assert me.worker_endpoints() == ["h:1", "h:2"]
    assert me.worker_endpoints(to_string=True) == "h:1,h:2"
    assert me.server_endpoints(to_string=True) == "h:3,h:4"
    assert trainer(0).is_first_worker()
    other = server()
    assert (other.is_server(), other.is_worker(), other.is_first_worker()) == (True, False, False)
    assert other.server_index() == 1


@pytest.mark.parametrize("call", ["is_server", "worker_num", "init_worker", "barrier_worker", "run_server"])
def test_nothing_works_before_init(call: str) -> None:
    with pytest.raises(UsageError, match=rf"fleet\.{call}\(\) was called before fleet\.init\(\)"):
        getattr(Fleet(), call)()


def test_init_twice_is_an_error() -> None:
    with pytest.raises(UsageError, match="called before"):
        trainer().init()


def test_the_kind_of_training_must_fit_the_launch() -> None:
    with pytest.raises(UsageError, match="a process on its own has none"):
        Fleet().init(role_maker=Me())
    with pytest.raises(UsageError, match="torchrun has none"):
        Fleet().init(role_maker=Me(master="h:1", source="torchrun"))
    with pytest.raises(UsageError, match="started with parameter servers"):
        Fleet().init(is_collective=True, role_maker=Me(**PS))
    with pytest.raises(UsageError, match=r"Write fleet\.init\(is_collective=True\)"):
        Fleet().init(True)  # type: ignore[arg-type]


def _step(fleet: Fleet) -> None:
    _, optimizer = model_and_optimizer()
    fleet.distributed_optimizer(optimizer).step()


def _two_models(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.distributed_model(torch.nn.Linear(1, 1))


def _only_model(fleet: Fleet) -> None:
    fleet.distributed_model(torch.nn.Linear(1, 1))
    fleet.init_worker()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda fleet: fleet.init_worker(), r"before fleet\.distributed_model\(model\)"),
        (_only_model, r"before fleet\.distributed_optimizer\(optimizer\)"),
        (lambda fleet: fleet.stop_worker(), r"fleet\.init_worker\(\) has not been called"),
        (lambda fleet: fleet.barrier_worker(), r"fleet\.init_worker\(\) has not been called"),
        (_step, r"step\(\) was called .* between fleet\.init_worker\(\) and fleet\.stop_worker\(\)"),
        (_two_models, "called twice"),
        (lambda fleet: fleet.run_server(), r"run_server\(\) was called on a trainer"),
        (lambda fleet: fleet.init_server(), r"init_server\(\) was called on a trainer"),
        (lambda fleet: fleet.server_index(), r"server_index\(\) was called on a trainer"),
    ],
)
def test_calls_out_of_order_on_a_trainer(call: Callable[[Fleet], None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(trainer())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda fleet: fleet.run_server(), r"run_server\(\) was called before fleet\.init_server\(\)"),
        (lambda fleet: fleet.init_worker(), r"init_worker\(\) was called on a server"),
        (lambda fleet: fleet.stop_worker(), r"stop_worker\(\) was called on a server"),
        (_step, "on a server"),
    ],
)
def test_calls_out_of_order_on_a_server(call: Callable[[Fleet], None], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(server())


def test_what_cannot_be_done_says_so() -> None:
    with pytest.raises(LoadError, match="model_dir"):
        server().init_server("model_dir")
    with pytest.raises(NotSupportedError, match="Rprop"):
        trainer().distributed_optimizer(torch.optim.Rprop([torch.nn.Parameter(torch.ones(1))]))
    with pytest.raises(UsageError, match=r"torch\.optim optimizer, not 5"):
        trainer().distributed_optimizer(5)  # type: ignore[arg-type]


def test_a_strategy_for_the_other_kind_of_job_is_refused_where_it_is_given() -> None:
    collective, served = DistributedStrategy(), DistributedStrategy()
    collective.sync_batch_norm, served.a_sync = True, True
    with pytest.raises(UsageError, match=r"strategy\.sync_batch_norm is True, which is for collective"):
        Fleet().init(role_maker=Me(**PS), strategy=collective)
    with pytest.raises(UsageError, match=r"strategy\.a_sync is True, which is for parameter servers"):
        Fleet().init(role_maker=Me(), is_collective=True, strategy=served)
    collective.lars = collective.lamb = True
    with pytest.raises(NotSupportedError, match=r"strategy\.lars together with strategy\.lamb"):
        Fleet().init(role_maker=Me(), is_collective=True, strategy=collective)
    model, optimizer = model_and_optimizer()
    with pytest.raises(UsageError, match=r"strategy\.lars is True, which is for collective jobs"):
        trainer().distributed_optimizer(optimizer, collective)
    fleet = Fleet()
    strategy = DistributedStrategy()
    fleet.init(role_maker=Me(**PS), strategy=strategy)
    strategy.localsgd = True  # later than init
    with pytest.raises(UsageError, match=r"strategy\.localsgd is True"):
        fleet.distributed_model(model)


def test_minimize_and_scalers_of_a_job_with_servers() -> None:
    fleet = trainer()
    with pytest.raises(UsageError, match=r"minimize\(\) was called before fleet\.distributed_optimizer"):
        fleet.minimize(torch.zeros(()))
    with pytest.raises(UsageError, match=r"distributed_scaler needs a torch\.amp\.GradScaler"):
        fleet.distributed_scaler(torch.nn.Identity())  # type: ignore[arg-type]


def test_an_optimizer_shares_its_groups_with_the_one_it_wraps() -> None:
    model, inner = model_and_optimizer()
    strategy = DistributedStrategy()
    strategy.a_sync = True
    fleet = trainer()
    optimizer = fleet.distributed_optimizer(inner, strategy)
    assert fleet.distributed_model(model) is model
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert inner.param_groups[0]["lr"] == 0.05
    assert optimizer.state_dict() == inner.state_dict()
    del schedule


@pytest.mark.parametrize("name", ["main_program", "startup_program"])
def test_names_of_paddles_static_graph_say_what_to_do(name: str):
    with pytest.raises(NotSupportedError, match=f"NotSupported: fleet.{name}; "):
        getattr(fleet, name)
