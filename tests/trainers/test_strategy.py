from pathlib import Path
from typing import Any

import pytest

from trainers import ps
from trainers.errors import NotSupportedError, UsageError
from trainers.fleet import Fleet
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
    with pytest.raises(NotSupportedError, match=r"NotSupported: strategy.a_sync_configs thread_pool_size"):
        strategy.a_sync_configs = {"thread_pool_size": 1}
    strategy.a_sync_configs = {"independent_recv": True}
    assert strategy.asynchronous().independent_recv_thread


def test_sync_training_does_not_go_back_to_snapshots() -> None:
    strategy = DistributedStrategy()
    strategy.ps_configs = {"durability": "snapshot"}
    with pytest.raises(NotSupportedError, match='Use "log" or "none"'):
        strategy.ps()
    strategy.a_sync = True
    assert strategy.ps().durability == "snapshot"


def test_batches_cannot_be_read_ahead_without_overlap() -> None:
    strategy = DistributedStrategy()
    strategy.ps_configs = {"read_ahead": True}
    strategy.a_sync_configs = {"overlap": False}
    assert strategy.ps().read_ahead, "sync training does not use a_sync_configs"
    strategy.a_sync = True
    with pytest.raises(NotSupportedError, match="Remove one of them"):
        strategy.ps()


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
        ("a_sync", 1, "a_sync is 1; it must be True or False"),
        ("a_sync_configs", {"k_step": 1}, "did you mean 'k_steps'"),
        ("a_sync_configs", 5, "must be a dict"),
        ("a_sync_configs", {"k_steps": "a"}, "must be a whole number"),
        ("a_sync_configs", {"send_queue_size": 0}, "send_queue_size is 0; it must be a whole number of at"),
        ("a_sync_configs", {"max_staleness": -1}, "max_staleness is -1"),
        ("a_sync_configs", {"max_staleness": 2, "max_merge_var_num": 4}, "to at least 3"),
        ("ps_configs", {"durability": "yes"}, "none, snapshot, log"),
        ("ps_configs", {"wire_dtype": "float64"}, "float32, float16, bfloat16"),
        ("sparse_table_configs", {"e": {"rul": 1}}, "did you mean 'rule'"),
        ("sparse_table_configs", {"e": {"rule": "adam"}}, "SGD, Adagrad, RowWiseAdagrad, SparseAdam"),
        ("sparse_table_configs", {"e": {"low": 2.0, "high": 1.0}}, "low"),
        ("dense", "here", "servers, allreduce"),
        ("ps_configs", {"split_method": "Random"}, "RoundRobin, HashName"),
        ("ps_configs", {"request_timeout": 1}, "did you mean 'request_timeout_s'"),
        ("ps_configs", {"request_timeout_s": 0}, "must be a number above 0"),
        ("ps_configs", {"slice_var_up": "yes"}, "slice_var_up"),
        ("ps_configs", {"read_ahead": 1}, "read_ahead is 1; it must be True or False"),
        ("fuse_grad_size_in_MB", -1, "must be a number above 0"),
        ("find_unused_parameters", "yes", "must be True or False"),
        ("gradient_merges", True, "did you mean 'gradient_merge'"),
        ("amp", 1, "amp is 1; it must be True or False"),
        ("amp_configs", {"dtype": "float64"}, "bfloat16, float16"),
        ("amp_configs", {"init_loss_scaling": 8.0}, '"dtype": "float16"'),
        ("amp_configs", {"dtype": "float16", "init_loss_scaling": 0}, "must be a number above 0"),
        ("amp_configs", {"dtype": "float16", "incr_ratio": 1.0}, "must be above 1"),
        ("amp_configs", {"dtype": "float16", "decr_ratio": 1.0}, "must be between 0 and 1"),
        ("amp_configs", {"dtype": "float16", "decr_every_n_nan_or_inf": 0}, "must be a whole number"),
        ("amp_configs", {"dtype": "float16", "use_dynamic_loss_scaling": 1}, "must be True or False"),
        ("amp_configs", {"dtyp": "float16"}, "did you mean 'dtype'"),
        ("gradient_merge_configs", {"k_steps": 0}, "must be a whole number of at least 1"),
        ("gradient_merge_configs", {"avg": None}, "must be True or False"),
        ("localsgd_configs", {"begin_step": 0}, "must be a whole number of at least 1"),
        ("gradient_scale_configs", {"scale_strategy": "mean"}, "avg, sum, customized"),
        ("sharding_configs", {"segment_broadcast_MB": 8}, "segment_broadcast_MB and .* need stage 2 or 3"),
        ("lars_configs", {"lars_coeff": 0}, "must be a number above 0"),
        ("lars_configs", {"lars_weight_decay": 1.5}, "must be a number from 0 to 1"),
        ("lamb_configs", {"exclude_from_weight_decay": "bias"}, "must be a list of parts of names"),
    ],
)
def test_a_wrong_wish_is_named(field: str, value: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        setattr(DistributedStrategy(), field, value)


def test_a_dict_cannot_be_changed_behind_the_checks() -> None:
    strategy = DistributedStrategy()
    with pytest.raises(TypeError):
        strategy.a_sync_configs["k_steps"] = 100  # type: ignore[index]


PADDLES = """
    a_sync a_sync_configs adam_d2sum adaptive_localsgd adaptive_localsgd_configs amp amp_configs asp auto
    auto_search build_strategy calc_comm_same_stream conv_workspace_size_limit
    cudnn_batchnorm_spatial_persistent cudnn_exhaustive_search dgc dgc_configs downpour_table_param elastic
    execution_strategy find_unused_parameters fp16_allreduce fs_client_param fuse_all_reduce_ops
    fuse_grad_merge fuse_grad_size_in_MB fuse_grad_size_in_TFLOPS fuse_grad_size_in_num
    gradient_merge gradient_merge_configs gradient_scale_configs heter_ccl_mode
    hierarchical_allreduce_inter_nranks hybrid_configs hybrid_parallel_order is_fl_ps_mode
    is_with_coordinator lamb lamb_configs lars lars_configs last_comm_group_size_MB localsgd
    localsgd_configs mode nccl_comm_num pipeline pipeline_configs qat qat_configs recompute
    recompute_configs semi_auto sharding sharding_configs sparse_table_configs split_data sync_batch_norm
    sync_nccl_allreduce tensor_parallel tensor_parallel_configs trainer_desc_configs
    use_hierarchical_allreduce with_coordinator without_graph_optimization
"""
"""The fields of Paddle 2.6's DistributedStrategy, and of its protocol buffer."""


class Something:
    """What no field takes."""


@pytest.mark.parametrize("field", PADDLES.split())
def test_no_field_of_paddles_is_ignored(field: str) -> None:
    with pytest.raises((UsageError, NotSupportedError), match=rf"strategy\.{field} ") as caught:
        setattr(DistributedStrategy(), field, Something())
    if isinstance(caught.value, NotSupportedError):
        assert str(caught.value).startswith("NotSupported: ")
        assert "; " in str(caught.value)  # and what to use


def test_what_is_not_supported_may_be_switched_off() -> None:
    strategy = DistributedStrategy()
    strategy.pipeline = False
    assert strategy.pipeline is False
    with pytest.raises(
        NotSupportedError, match=r"strategy\.pipeline = True; use torch\.distributed\.pipelining"
    ):
        strategy.pipeline = True
    with pytest.raises(
        NotSupportedError, match=r"NotSupported: strategy\.build_strategy; use strategy\.compile"
    ):
        strategy.build_strategy.enable_inplace = True
    with pytest.raises(NotSupportedError, match=r"nccl_comm_num = 1\.0"):
        strategy.nccl_comm_num = 1.0
    with pytest.raises(AttributeError, match="did you mean 'sharding'"):
        _ = strategy.shading


@pytest.mark.parametrize(
    ("key", "configs"),
    [
        ("custom_white_list", {"amp_configs": {"custom_white_list": ["softmax"]}}),
        ("use_pure_fp16", {"amp_configs": {"use_pure_fp16": True}}),
        ("scale_gradient", {"gradient_scale_configs": {"scale_gradient": True}}),
        ("epsilon", {"lars_configs": {"epsilon": 1e-9}}),
    ],
)
def test_no_key_of_paddles_is_ignored(key: str, configs: dict[str, Any]) -> None:
    with pytest.raises(NotSupportedError, match=f"NotSupported: strategy.* {key}"):
        with_fields(**configs)


def with_fields(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"localsgd": True, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
            "gradient_merge",
        ),
        ({"localsgd": True, "sharding": True}, "sharding"),
        ({"localsgd": True, "fp16_allreduce": True}, "fp16_allreduce"),
        ({"localsgd": True, "gradient_scale_configs": {"scale_strategy": "sum"}}, "gradient_scale_configs"),
        ({"lars": True, "lamb": True}, "lamb"),
        ({"lars": True, "sharding": True, "sharding_configs": {"stage": 2}}, "sharding stage 2"),
        ({"fp16_allreduce": True, "sharding": True, "sharding_configs": {"stage": 3}}, "sharding stage 3"),
        ({"fuse_grad_size_in_MB": 8, "sharding": True, "sharding_configs": {"stage": 3}}, "sharding stage 3"),
    ],
)
def test_wishes_that_do_not_go_together_are_both_named(fields: dict[str, Any], names: str) -> None:
    first = next(iter(fields))
    with pytest.raises(
        NotSupportedError, match=rf"NotSupported: strategy\.{first} together with strategy\.{names}"
    ):
        with_fields(**fields).collective()


def test_a_field_for_the_other_kind_of_job_is_refused() -> None:
    for name in ("localsgd", "sharding", "find_unused_parameters"):
        with_fields(**{name: True}).fits(True)
        with pytest.raises(UsageError, match=f"{name} is True, which is for collective jobs"):
            with_fields(**{name: True}).fits(False)
    served: dict[str, Any] = {"a_sync": True, "ps_configs": {"wire_dtype": "float16"}, "dense": "allreduce"}
    for name, value in served.items():
        with_fields(**{name: value}).fits(False)
        with pytest.raises(UsageError, match=f"{name} is .* which is for parameter servers"):
            with_fields(**{name: value}).fits(True)


def test_configs_say_how_and_flags_whether() -> None:
    fields: dict[str, Any] = {"gradient_merge_configs": {"k_steps": 4}, "amp_configs": {"dtype": "float16"}}
    off = with_fields(gradient_merge=False, amp=False, **fields).collective()
    assert (off.merged_steps, off.float16, off.paced) == (1, False, False)
    on = with_fields(gradient_merge=True, amp=True, **fields).collective()
    assert (on.merged_steps, on.float16, on.paced) == (4, True, True)
    assert (on.divisor(3), off.divisor(3)) == (12, 3)


CONFIGS: dict[str, dict[str, Any]] = {
    "a_sync": {"send_queue_size": 4},
    "amp": {"dtype": "float16"},
    "gradient_merge": {"k_steps": 4},
    "localsgd": {"k_steps": 4},
    "lars": {"lars_coeff": 0.1},
    "lamb": {"lamb_weight_decay": 0.1},
    "sharding": {"stage": 3},
    "recompute": {"checkpoints": ["layer"]},
    "compile": {"backend": "eager"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_without_their_switch_are_refused(name: str) -> None:
    configs, collective = {f"{name}_configs": CONFIGS[name]}, name != "a_sync"
    with pytest.raises(UsageError, match=rf"strategy\.{name}_configs is set, .* Set strategy\.{name} = True"):
        with_fields(**configs).fits(collective)
    for switch in (True, False):  # a script may have an option that switches it
        with_fields(**configs, **{name: switch}).fits(collective)
    with_fields(**{f"{name}_configs": {}}).fits(collective)


def test_every_field_of_configs_has_a_switch_or_needs_none() -> None:
    strategy = DistributedStrategy()
    named = {name for name in DistributedStrategy.__annotations__ if name.endswith("_configs")}
    alone = {"ps_configs", "sparse_table_configs", "gradient_scale_configs"}
    assert named - alone == {f"{name}_configs" for name in CONFIGS}
    strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    strategy.fits(True)


def test_the_switch_is_asked_for_when_training_begins() -> None:
    fleet = Fleet()
    with pytest.raises(UsageError, match=r"gradient_merge_configs is set"):
        fleet.init(is_collective=True, strategy=with_fields(gradient_merge_configs={"k_steps": 4}))


def test_a_strategy_shows_what_it_asks_for() -> None:
    strategy = with_fields(amp=True, ps_configs={"wire_dtype": "float16"})
    assert repr(strategy) == "DistributedStrategy(ps_configs={'wire_dtype': 'float16'}, amp=True)"


def test_a_strategy_as_yaml_and_back(tmp_path: Path) -> None:
    tables = {
        "emb.weight": {"rule": ps.FTRL(l1=0.1), "init": ps.Uniform(-0.1, 0.1), "low": -1.0},
        "other.weight": {"entry": ps.CountFilterEntry(3)},
    }
    strategy = with_fields(
        amp=True,
        amp_configs={"dtype": "float16", "init_loss_scaling": 1024.0},
        lars_configs={"exclude_from_weight_decay": ("bias", "bn")},
        sparse_table_configs=tables,
        fuse_grad_size_in_MB=8,
    )
    strategy.save_to_prototxt(tmp_path / "strategy.prototxt")
    back = with_fields(localsgd=True)
    back.load_from_prototxt(str(tmp_path / "strategy.prototxt"))
    assert back.localsgd is False  # all fields are in the file
    assert back.to_yaml() == strategy.to_yaml()
    assert back.collective() == strategy.collective()
    assert back.tables() == strategy.tables()
    assert DistributedStrategy.from_yaml("").to_yaml() == DistributedStrategy().to_yaml()
    assert DistributedStrategy.from_yaml("amp: true\npipeline: false\n").amp is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("amp: true\nampp: true\n", "did you mean 'amp'"),
        ("amp: true\npipeline: true\n", "NotSupported: strategy.pipeline = True"),
        ("amp: true\nlocalsgd: 2\n", "localsgd is 2"),
        ("amp: [", "is not YAML"),
        ("- amp\n", "is list; it must be a mapping"),
        ("sparse_table_configs: {e: {rule: {'!Popen': {args: ls}}}}", "it must be one of"),
        ("sparse_table_configs: {e: {rule: {'!SGD': {args: 1}}}}", "its fields are"),
        ("sparse_table_configs: {e: {entry: {'!Entry': {kind: X, a: 1}}}}", "ALL, PROBABILITY"),
    ],
)
def test_a_file_with_mistakes_changes_nothing(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "file").write_text(text)
    strategy = DistributedStrategy()
    with pytest.raises((UsageError, NotSupportedError), match=words):
        strategy.load_from_prototxt(tmp_path / "file")
    assert strategy.to_yaml() == DistributedStrategy().to_yaml()
