from typing import Any

import pytest

from trainers import ps
from trainers.errors import NotSupportedError, UsageError
from trainers.strategy import DistributedStrategy


def test_the_fields_of_the_seeds() -> None:
    strategy = DistributedStrategy()
    assert strategy.a_sync is False
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 0}
    strategy.ps_configs = {"split_method": "HashName", "request_timeout_s": 5}
    assert strategy.ps().split_method == "HashName"
    assert strategy.ps().request_timeout_s == 5
    assert strategy.ps().trainer_timeout_s == 10


def test_geo_wants_async_and_dense_servers() -> None:
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 100}
    with pytest.raises(UsageError, match="k_steps is 100 with a_sync False"):
        strategy.asynchronous()
    strategy.a_sync = True
    assert strategy.asynchronous().k_steps == 100
    strategy.dense = "allreduce"
    with pytest.raises(NotSupportedError, match=r'k_steps is 100 with strategy\.dense "allreduce"'):
        strategy.asynchronous()


def test_what_paddle_has_and_we_do_not_is_refused_with_the_reason() -> None:
    strategy = DistributedStrategy()
    with pytest.raises(NotSupportedError, match="thread_pool_size has no meaning here"):
        strategy.a_sync_configs = {"thread_pool_size": 1}
    strategy.a_sync_configs = {"independent_recv": True}
    assert strategy.asynchronous().independent_recv_thread


def test_sync_training_does_not_go_back_to_snapshots() -> None:
    strategy = DistributedStrategy()
    strategy.ps_configs = {"durability": "snapshot"}
    with pytest.raises(NotSupportedError, match='use "log" or "none"'):
        strategy.ps()
    strategy.a_sync = True
    assert strategy.ps().durability == "snapshot"


def test_tables_have_settings_of_their_own() -> None:
    strategy = DistributedStrategy()
    strategy.sparse_table_configs = {"emb.weight": {"rule": ps.FTRL(l1=0.1), "lr": 0.5, "low": -1.0}}
    (configs,) = strategy.tables().values()
    assert configs.rule == ps.FTRL(l1=0.1)
    assert (configs.lr, configs.low) == (0.5, -1.0)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("async", True, "did you mean 'a_sync'"),
        ("a_sync_config", {}, "did you mean 'a_sync_configs'"),
        ("sharding", True, "has no field 'sharding'"),
        ("a_sync", 1, "a_sync is 1; it must be True or False"),
        ("a_sync_configs", {"k_step": 1}, "did you mean 'k_steps'"),
        ("a_sync_configs", 5, "must be a dict"),
        ("a_sync_configs", {"k_steps": "a"}, "must be a whole number"),
        ("a_sync_configs", {"send_queue_size": 0}, "send_queue_size is 0; it must be a whole number of at"),
        ("a_sync_configs", {"max_staleness": -1}, "max_staleness is -1"),
        ("a_sync_configs", {"max_staleness": 2, "max_merge_var_num": 4}, "must be at least 3"),
        ("ps_configs", {"durability": "yes"}, "none, snapshot, log"),
        ("ps_configs", {"wire_dtype": "float64"}, "float32, float16, bfloat16"),
        ("sparse_table_configs", {"e": {"rul": 1}}, "did you mean 'rule'"),
        ("sparse_table_configs", {"e": {"rule": "adam"}}, "use SGD, Adagrad, SparseAdam or FTRL"),
        ("sparse_table_configs", {"e": {"low": 2.0, "high": 1.0}}, "the lower one comes first"),
        ("dense", "here", "servers, allreduce"),
        ("ps_configs", {"split_method": "Random"}, "RoundRobin, HashName"),
        ("ps_configs", {"request_timeout": 1}, "did you mean 'request_timeout_s'"),
        ("ps_configs", {"request_timeout_s": 0}, "must be a number above 0"),
        ("ps_configs", {"slice_var_up": "yes"}, "slice_var_up"),
        ("fuse_grad_size_in_MB", -1, "must be a number above 0"),
        ("find_unused_parameters", "yes", "must be True or False"),
    ],
)
def test_a_wrong_wish_is_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        setattr(DistributedStrategy(), field, value)


def test_a_dict_cannot_be_changed_behind_the_checks() -> None:
    strategy = DistributedStrategy()
    with pytest.raises(TypeError):
        strategy.a_sync_configs["k_steps"] = 100  # type: ignore[index]
