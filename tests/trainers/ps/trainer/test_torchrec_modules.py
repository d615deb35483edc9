"""Which modules and optimizers of TorchRec are served, and what is refused with the way out."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from trainers.errors import FleetError, NotSupportedError
from trainers.ps import Uniform
from trainers.ps.configs import TableConfigs
from trainers.ps.tables.rules import SGD, Adagrad, AnyRule, RowWiseAdagrad, RowWiseAdam, SparseAdam
from trainers.ps.tables.spec import Initializer, InitKind, RowType
from trainers.ps.trainer.layout import Layout, LayoutOptions, check_supported, plan_layout
from trainers.ps.trainer.modules import find_embeddings
from trainers.ps.trainer.torchrec import unwrapped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is missing: see CONTRIBUTING.md"),
    pytest.mark.filterwarnings("ignore"),  # those of torchrec's own imports
]


@pytest.fixture(scope="module")
def rec() -> Any:
    import torchrec
    import torchrec.modules.fused_embedding_modules
    import torchrec.modules.mc_embedding_modules
    import torchrec.modules.mc_modules
    import torchrec.optim.clipping
    import torchrec.optim.warmup
    import torchrec.quant.embedding_modules

    return torchrec


def config(rec: Any, name: str = "t", **options: Any) -> Any:
    return rec.EmbeddingBagConfig(
        **{"name": name, "num_embeddings": 100, "embedding_dim": 4, "feature_names": ["f"], **options}
    )


def collection(rec: Any, device: str = "meta", **options: Any) -> Any:
    return rec.EmbeddingBagCollection(tables=[config(rec, **options)], device=torch.device(device))


def layout(model: torch.nn.Module, tables: dict[str, TableConfigs] | None = None) -> Layout:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), *model.parameters()], lr=0.5)
    optimizer.param_groups[0]["params"].pop(0)
    return plan_layout(model, [optimizer], 2, LayoutOptions(tables=tables or {}))


def step_in_backward(kind: Any, model: torch.nn.Module, options: dict[str, Any]) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(kind, model.parameters(), options)


def test_tables_have_the_names_of_torchrecs_state(rec: Any) -> None:
    tables = [config(rec, "t1", embedding_dim=8), config(rec, "t2", feature_names=["g", "h"])]
    model = torch.nn.ModuleDict(
        {
            "bags": rec.EmbeddingBagCollection(tables=tables),
            "rows": rec.EmbeddingCollection(
                tables=[rec.EmbeddingConfig(name="t3", num_embeddings=10, embedding_dim=4)]
            ),
            "own": torch.nn.EmbeddingBag(10, 4),
        }
    )
    found = layout(model)
    assert {each.name for each in found.sparse} == model.state_dict().keys() - {"own.weight"}
    assert [each.name for each in found.dense] == ["own.weight"]
    assert found.collections == (model["bags"], model["rows"])


@pytest.mark.parametrize(
    ("options", "init"),
    [
        ({}, Initializer(InitKind.UNIFORM, -0.1, 0.1)),
        ({"weight_init_min": -2, "weight_init_max": 3}, Initializer(InitKind.UNIFORM, -2, 3)),
        ({"init_fn": torch.nn.init.normal_}, Initializer(InitKind.NORMAL, 0, 1)),
        ({"init_fn": partial(torch.nn.init.normal_, std=0.5)}, Initializer(InitKind.NORMAL, 0, 0.5)),
        ({"init_fn": partial(torch.nn.init.constant_, val=0.5)}, Initializer(InitKind.UNIFORM, 0.5, 0.5)),
        ({"init_fn": torch.nn.init.zeros_}, Initializer(InitKind.UNIFORM, 0, 0)),
    ],
)
def test_known_initializers_make_the_rows_of_meta_tables(
    rec: Any, options: dict[str, Any], init: Initializer
) -> None:
    (table,) = layout(collection(rec, **options)).sparse
    found = table.spec.rows.init
    assert (found.kind, found.a, found.b) == (init.kind, init.a, init.b)
    assert found.seed != 0
    assert table.limit == 100


def test_a_virtual_table_has_any_id(rec: Any) -> None:
    (table,) = layout(collection(rec, use_virtual_table=True, num_embeddings=1 << 50)).sparse
    assert table.limit is None


def test_an_unknown_initializer_is_refused_only_where_servers_would_need_it(rec: Any) -> None:
    unknown = torch.nn.init.xavier_uniform_
    assert layout(collection(rec, device="cpu", init_fn=unknown)).sparse[0].limit == 100
    meta = collection(rec, init_fn=unknown)
    with pytest.raises(
        NotSupportedError, match=r"init_fn .*sparse_table_configs = \{'embedding_bags.t.weight'"
    ):
        layout(meta)
    assert layout(meta, {"embedding_bags.t.weight": TableConfigs(init=Uniform())}).sparse
    with pytest.raises(NotSupportedError, match="init_fn"):
        layout(collection(rec, device="cpu", init_fn=unknown), {"*": TableConfigs(max_rows=50)})


@pytest.mark.parametrize(
    ("name", "dtype"), [("FP32", RowType.FLOAT32), ("FP16", RowType.FLOAT16), ("BF16", RowType.BFLOAT16)]
)
def test_rows_have_the_type_of_the_configuration(rec: Any, name: str, dtype: RowType) -> None:
    kind = rec.modules.embedding_configs.DataType[name]
    assert layout(collection(rec, data_type=kind)).sparse[0].spec.rows.dtype is dtype


# ---- Refusals.


def own_forward(rec: Any) -> torch.nn.Module:
    class Own(rec.EmbeddingBagCollection):  # type: ignore[misc]
        def forward(self, features: Any) -> Any:
            return super().forward(features)

    return Own(tables=[config(rec)])


def managed(rec: Any) -> torch.nn.Module:
    modules = rec.modules
    policy = modules.mc_modules.DistanceLFU_EvictionPolicy()
    remaps = modules.mc_modules.MCHManagedCollisionModule(
        zch_size=100, device=torch.device("cpu"), eviction_interval=2, eviction_policy=policy
    )
    configs = [config(rec)]
    return modules.mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(
        rec.EmbeddingBagCollection(tables=configs),
        modules.mc_modules.ManagedCollisionCollection({"t": remaps}, configs),
    )


def fused(rec: Any) -> torch.nn.Module:
    return rec.modules.fused_embedding_modules.FusedEmbeddingBagCollection(
        tables=[config(rec)], optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.1}
    )


def quantized(rec: Any) -> torch.nn.Module:
    return rec.quant.embedding_modules.EmbeddingBagCollection(
        tables=[config(rec)], is_weighted=False, device=torch.device("cpu")
    )


def weighted_mean(rec: Any) -> torch.nn.Module:
    return rec.EmbeddingBagCollection(tables=[config(rec, pooling=rec.PoolingType.MEAN)], is_weighted=True)


def int8(rec: Any) -> torch.nn.Module:
    return collection(rec, data_type=rec.modules.embedding_configs.DataType.INT8)


def evicting(rec: Any) -> torch.nn.Module:
    policy = rec.modules.embedding_configs.CountBasedEvictionPolicy()
    return collection(rec, use_virtual_table=True, virtual_table_eviction_policy=policy)


def tied(rec: Any) -> torch.nn.Module:
    model = torch.nn.ModuleList([collection(rec), collection(rec)])
    model[1].embedding_bags["t"].weight = model[0].embedding_bags["t"].weight
    return model


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (own_forward, "Own, which cannot .* Use torchrec.EmbeddingBagCollection"),
        (managed, "ManagedCollisionEmbeddingBagCollection, which cannot .* pass raw ids.* use_virtual_table"),
        (fused, "FusedEmbeddingBagCollection, which cannot .* Use torchrec"),
        (quantized, "quant.embedding_modules.EmbeddingBagCollection, which cannot .* Use torchrec"),
        (weighted_mean, "pooling MEAN, .* Use PoolingType.SUM"),
        (int8, "data_type INT8; servers support FP32, FP16 and BF16"),
        (evicting, "CountBasedEvictionPolicy. Remove it, and set max_rows"),
        (tied, "shares its weight"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_way_out(rec: Any, make: Any, word: str) -> None:
    with pytest.raises(NotSupportedError, match=word):
        find_embeddings(torch.nn.Sequential(make(rec)))


def test_a_sharded_model_is_refused(rec: Any) -> None:
    class Sharded(rec.distributed.types.ShardedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        create_context = input_dist = compute = output_dist = unsharded_module_type = None

    with pytest.raises(NotSupportedError, match="Pass the model as it was before it was sharded"):
        find_embeddings(torch.nn.Sequential(Sharded()))


# ---- Optimizers.


@pytest.mark.parametrize(
    ("name", "options", "rule", "lr"),
    [
        ("SGD", {"lr": 0.5}, SGD(), 0.5),
        ("SGD", {"learning_rate": 0.25}, SGD(), 0.25),
        ("Adagrad", {"lr": 0.5}, Adagrad(eps=1e-8), 0.5),
        ("Adam", {"lr": 0.5, "betas": (0.8, 0.9)}, SparseAdam(0.8, 0.9), 0.5),
        ("Adam", {"beta1": 0.5, "eps": 0.1}, SparseAdam(0.5, eps=0.1), 0.01),
        ("PartialRowWiseAdam", {"weight_decay": 0.5}, RowWiseAdam(weight_decay=0.5, decoupled=1), 0.01),
        ("RowWiseAdagrad", {"lr": 0.5, "eps": 0.1}, RowWiseAdagrad(eps=0.1), 0.5),
    ],
)
def test_torchrecs_optimizers_in_the_backward_pass_give_the_rule(
    rec: Any, name: str, options: dict[str, Any], rule: AnyRule, lr: float
) -> None:
    model = collection(rec)
    step_in_backward(getattr(rec.optim, name), model, options)
    (table,) = layout(model).sparse
    assert (table.rule, table.lr) == (rule, lr)


def test_tables_with_the_same_optimizer_in_the_backward_pass_are_one_group(rec: Any) -> None:
    model = rec.EmbeddingBagCollection(tables=[config(rec, f"t{number}") for number in range(5)])
    step_in_backward(torch.optim.SGD, model, {"lr": 0.1})
    assert len({each.alike for each in layout(model).sparse}) == 1


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("LAMB", {}, "LAMB of .* Use one of torchrec.optim: SGD, Adagrad, Adam"),
        ("LarsSGD", {}, "LarsSGD"),
        ("PartialRowWiseLAMB", {}, "PartialRowWiseLAMB"),
        ("SGD", {"momentum": 0.9}, "momentum=0.9, which servers do not support. Use lr"),
        ("Adam", {"weight_decay": 0.1}, "weight_decay=0.1"),
        ("RowWiseAdagrad", {"max_gradient": 1.0}, "max_gradient, which servers do not support"),
        ("RowWiseAdagrad", {"maximize": True}, "maximize"),
    ],
)
def test_other_optimizers_in_the_backward_pass_are_refused(
    rec: Any, name: str, options: dict[str, Any], word: str
) -> None:
    model = collection(rec)
    step_in_backward(getattr(rec.optim, name), model, options)
    with pytest.raises(NotSupportedError, match=word):
        layout(model)


def test_two_optimizers_in_the_backward_pass_are_refused(rec: Any) -> None:
    model = collection(rec)
    for _ in range(2):
        step_in_backward(torch.optim.SGD, model, {"lr": 0.1})
    with pytest.raises(FleetError, match="called 2 times"):
        layout(model)


def test_row_wise_adagrad_trains_only_tables(rec: Any) -> None:
    model = torch.nn.ModuleList([collection(rec, device="cpu"), torch.nn.Linear(2, 2)])
    optimizer = rec.optim.RowWiseAdagrad(list(model.parameters())[:2], lr=0.1)
    check_supported(optimizer)
    with pytest.raises(NotSupportedError, match=r"RowWiseAdagrad cannot train '1.weight', which is dense"):
        plan_layout(model, [optimizer], 2, LayoutOptions())


def test_wrappers_are_unwrapped_and_others_are_refused(rec: Any) -> None:
    keyed, weight = rec.optim.keyed, torch.nn.Parameter(torch.ones(1))
    one = keyed.KeyedOptimizerWrapper({"w": weight}, lambda some: torch.optim.SGD(some, lr=0.1))
    assert unwrapped(one) == [one._optimizer]
    assert unwrapped(keyed.CombinedOptimizer([("a", one)])) == [one._optimizer]
    for wrapper in (
        rec.optim.clipping.GradientClippingOptimizer(one),
        rec.optim.warmup.WarmupOptimizer(one, []),
    ):
        with pytest.raises(NotSupportedError, match=r"Pass the optimizer inside it. Use a scheduler"):
            unwrapped(wrapper)
