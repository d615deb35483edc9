from typing import Any

import pytest

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


def test_geo_is_refused_by_name() -> None:
    strategy = DistributedStrategy()
    with pytest.raises(NotSupportedError, match="k_steps 100: geo training is not in this version"):
        strategy.a_sync_configs = {"k_steps": 100}


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
