"""DistributeTranspilerConfig: each field does something, or says what does."""

from typing import Any

import pytest
import torch

from trainers.errors import NotSupportedError, UsageError
from trainers.fleet import Fleet
from trainers.ps.trainer.layout import Layout, LayoutOptions, plan_layout
from trainers.roles.makers import UserDefinedRoleMaker
from trainers.strategy import DistributedStrategy, DistributeTranspilerConfig, strategy_of


def config(**fields: Any) -> DistributeTranspilerConfig:
    made = DistributeTranspilerConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def layout(options: DistributeTranspilerConfig) -> Layout:
    model = torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.Linear(100, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plan_layout(model, [optimizer], 2, LayoutOptions(configs=strategy_of(options).ps()))


def homes(options: DistributeTranspilerConfig) -> list[list[int]]:
    return [[block.server for block in parameter.blocks] for parameter in layout(options).dense]


def test_paddles_defaults() -> None:
    strategy = strategy_of(DistributeTranspilerConfig())
    assert not strategy.a_sync
    assert (strategy.ps().split_method, strategy.ps().slice_var_up) == ("RoundRobin", True)


def test_sync_mode() -> None:
    assert strategy_of(config(sync_mode=False)).a_sync
    assert not strategy_of(config(sync_mode=True)).a_sync


def test_slice_var_up() -> None:
    """Only the first parameter has more than 8192 elements."""
    assert [len(servers) for servers in homes(config())] == [2, 1, 1, 1]
    assert [len(servers) for servers in homes(config(slice_var_up=False))] == [1, 1, 1, 1]


def test_split_method() -> None:
    assert homes(config()) == [[0, 1], [0], [1], [0]]
    hashed = homes(config(split_method="HashName"))
    assert hashed != homes(config())
    assert hashed == homes(config(split_method="HashName")), "a hash does not depend on the order"


def test_a_strategy_stays_what_it_is() -> None:
    strategy = DistributedStrategy()
    assert strategy_of(strategy) is strategy


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sync_mode", 1, "DistributeTranspilerConfig.sync_mode is 1; it must be True or False"),
        ("slice_var_up", None, "slice_var_up is None"),
        ("split_method", "Hash", "split_method is 'Hash'; it must be one of RoundRobin, HashName"),
        ("sync_mod", True, "has no field 'sync_mod'; did you mean 'sync_mode'"),
    ],
)
def test_wrong_values_and_names(name: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config(**{name: value})


def test_fields_that_do_nothing_here_say_what_does() -> None:
    with pytest.raises(NotSupportedError, match=r"^NotSupported: .*geo_sgd_mode; use .*a_sync_configs"):
        config(geo_sgd_mode=True)
    with pytest.raises(NotSupportedError, match="min_block_size; parameters over 8192"):
        config(min_block_size=1024)


@pytest.mark.parametrize("wrong", [DistributeTranspilerConfig, {"sync_mode": True}, True])
def test_what_is_no_strategy(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"Pass a fleet\.DistributedStrategy or a DistributeTranspilerConfig"
    ):
        strategy_of(wrong)


def worker(**given: Any) -> Fleet:
    fleet = Fleet()
    fleet.init(UserDefinedRoleMaker(worker_num=1, server_endpoints=["h:1"], environ={}), **given)
    return fleet


def strategy(fleet: Fleet) -> DistributedStrategy:
    return fleet._runtime_for("test").strategy


def test_fleet_takes_it_where_it_takes_a_strategy() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    fleet = worker(strategy=config(sync_mode=False))
    assert strategy(fleet).a_sync
    fleet.distributed_optimizer(optimizer, config(split_method="HashName"))
    assert (strategy(fleet).a_sync, strategy(fleet).ps().split_method) == (False, "HashName")
    with pytest.raises(UsageError, match="The strategy is 5"):
        worker(strategy=5)
