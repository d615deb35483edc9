import numpy as np
import pytest
import torch

from tests.support.training import TwoTables
from trainers.errors import NotSupportedError, UsageError
from trainers.ps import CountFilterEntry, ShowClickEntry, SparseEmbedding
from trainers.ps.configs import PsConfigs, TableConfigs
from trainers.ps.tables.rules import SGD, Adagrad, Fixed, RowWiseAdagrad
from trainers.ps.tables.spec import Bound, EvictionPolicy, RowType, TableKind, holders, place_blocks
from trainers.ps.trainer.layout import LayoutOptions, plan_layout


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_a_model_becomes_numbered_tables_with_their_rules() -> None:
    model = TwoTables()
    layout = plan_layout(model, [sgd(model)], 2, LayoutOptions())
    for server in (0, 1):
        assert [number for number, _ in layout.specs_on(server)] == list(range(len(layout.specs_on(server))))
    by_name = {spec.name: spec for server in (0, 1) for _, spec in layout.specs_on(server)}
    assert by_name["words.weight"].kind is TableKind.SPARSE
    assert by_name["scale[0:1]"].rule == Fixed()
    assert by_name["wide.weight[0:8400]"].rule == SGD()
    homes = {block.server for dense in layout.dense if dense.name == "wide.weight" for block in dense.blocks}
    assert homes == {0, 1}
    for server in (0, 1):  # every server holds a share of every sparse table, under the same number
        assert [spec.name for _, spec in layout.specs_on(server)][:2] == ["words.weight", "bags.weight"]


def bounded(
    *, geo: bool = False, table: TableConfigs | None = None, **job: object
) -> dict[str, Bound | None]:
    """The bounds of two tables on each of two servers; the first has one of its own if `table` says so."""
    options = LayoutOptions(
        configs=PsConfigs(**job),  # type: ignore[arg-type]
        tables={"words.weight": table} if table else {},
        geo=geo,
    )
    model = TwoTables()
    sparse = plan_layout(model, [sgd(model)], 2, options).sparse
    return {each.name: each.spec.rows.bound for each in sparse}


def test_a_bound_is_shared_by_the_servers_and_that_of_the_job_by_tables_without_one() -> None:
    assert bounded(max_rows=101, evict="lfu") == dict.fromkeys(
        ("words.weight", "bags.weight"), Bound(rows=51, policy=EvictionPolicy.LFU, shared=True)
    )
    for servers, rows in ((2, 4), (1, 7)):
        table = TableConfigs(max_rows=7, ttl_s=60, servers=servers)
        assert bounded(max_bytes=1000, table=table) == {
            "words.weight": Bound(rows=rows, ttl_s=60.0),
            "bags.weight": Bound(bytes=500, shared=True),
        }


@pytest.mark.parametrize(
    "options",
    [
        {"max_rows": 0},
        {"max_rows": 5, "max_bytes": 5},
        {"evict": "lfu"},
        {"max_rows": 5, "evict": "oldest"},
        {"ttl_s": -1.0},
        {"ttl_s": 5.0, "evict": "lfu"},
    ],
)
def test_bounds_that_cannot_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        TableConfigs(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        SparseEmbedding(4, **options)  # type: ignore[arg-type]


def test_bounds_that_do_not_fit_the_job_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="geo"):
        bounded(geo=True, max_rows=5)
    with pytest.raises(UsageError, match="statistics"):
        bounded(max_rows=5, evict="score")
    with pytest.raises(UsageError, match="ttl_s"):
        bounded(max_rows=5, table=TableConfigs(ttl_s=60))
    with pytest.raises(UsageError, match=r"'words.weight' has statistics, and the job has disk_dir"):
        bounded(max_rows=5, disk_dir="/", table=TableConfigs(statistics=True))
    with pytest.raises(UsageError, match=r"has ttl_s, and the job has disk_dir"):
        bounded(disk_dir="/", table=TableConfigs(ttl_s=60))
    with pytest.raises(UsageError, match="no table has a bound"):
        bounded(disk_dir="/")


def test_every_trainer_computes_the_same() -> None:
    layouts = [
        plan_layout(model, [sgd(model)], 3, LayoutOptions(configs=PsConfigs(split_method="HashName")))
        for model in (TwoTables(), TwoTables())
    ]
    assert layouts[0].specs_on(1) == layouts[1].specs_on(1)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="1 parameters that are not in the model"):
        plan_layout(
            TwoTables(), [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)], 1, LayoutOptions()
        )


def test_a_parameter_that_is_not_float32_is_named() -> None:
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    with pytest.raises(NotSupportedError, match=r"'weight' is torch\.float64"):
        plan_layout(model, [sgd(model)], 1, LayoutOptions())


class Slots(torch.nn.Module):
    """Embeddings by name and number of rows, of 64 bytes each; None: unbounded."""

    def __init__(self, **rows: int | None) -> None:
        super().__init__()
        for name, size in rows.items():
            made = SparseEmbedding(16) if size is None else torch.nn.Embedding(size, 16, sparse=True)
            self.add_module(name, made)


def places(model: Slots, servers: int, **options: object) -> dict[str, tuple[int, ...]]:
    """The servers of each table."""
    configs = PsConfigs(table_mb_per_server=0.0625)  # 1,024 rows
    layout = plan_layout(model, [sgd(model)], servers, LayoutOptions(configs=configs, **options))  # type: ignore[arg-type]
    return {each.name.removesuffix(".weight"): holders(each.spec, servers) for each in layout.sparse}


def test_a_table_is_on_as_many_servers_as_its_size_needs() -> None:
    found = places(Slots(one=1024, two=1025, all=5000, unknown=None), 4)
    assert [len(found[name]) for name in ("one", "two", "all", "unknown")] == [1, 2, 4, 4]
    own = {"unknown.weight": TableConfigs(servers=2), "one.weight": TableConfigs(servers=9)}
    wanted = places(Slots(one=10, unknown=None), 4, tables=own)
    assert [len(wanted[name]) for name in ("one", "unknown")] == [4, 2]


def test_another_table_or_server_moves_few_tables() -> None:
    sizes = {f"slot{number}": 10 for number in range(100)}
    before = places(Slots(**sizes), 4)
    assert all(10 <= list(before.values()).count((server,)) <= 40 for server in range(4))
    more = places(Slots(first=10, second=2000, **sizes), 4)
    assert {name: more[name] for name in sizes} == before
    wider = places(Slots(**sizes), 5)
    assert {wider[name] for name in sizes if wider[name] != before[name]} == {(4,)}


def test_tables_of_a_server_follow_each_other_and_the_plan_says_how_many_it_has() -> None:
    model = Slots(large=5000, **{f"slot{number}": 10 for number in range(20)})
    layout = plan_layout(model, [sgd(model)], 3, LayoutOptions(configs=PsConfigs(table_mb_per_server=0.0625)))
    found = [holders(each.spec, 3) for each in layout.sparse]
    assert found == [(0, 1, 2), *sorted(found[1:])]
    counts = [found.count((server,)) for server in range(3)]
    said = f"21 tables on 3 servers: 20 whole ({', '.join(map(str, counts))}), 1 shared (1, 1, 1)"
    assert layout.describe() == said


def test_a_table_that_makes_one_server_do_much_more_is_named_and_what_to_set() -> None:
    model = Slots(large=5000, **{f"slot{number}": 10 for number in range(20)})
    layout = plan_layout(model, [sgd(model)], 4, LayoutOptions(configs=PsConfigs(table_mb_per_server=0.0625)))
    rows = np.zeros((4, 21), np.int64)
    for each in layout.sparse:
        rows[list(holders(each.spec, 4)), each.table] = 10_000
    assert layout.uneven(rows) == "", "many tables on one server, and none that is used more"
    (used,) = (each for each in layout.sparse if each.name == "slot7.weight")
    (server,) = holders(used.spec, 4)
    rows[server, used.table] = 200_000
    share = rows.sum(axis=1)[server] / (rows.sum() / 4)
    assert layout.uneven(rows) == (
        f"Server {server} sends {share:.1f} times as many bytes of rows as the average of 4 servers. To "
        "divide the largest tables among more servers, add to the settings in strategy.sparse_table_configs: "
        '{"slot7.weight": {"servers": 4}}'
    )
    assert layout.uneven(rows // 100) == "", "too few to say"


def homes(**configs: object) -> dict[str, int]:
    """Which of three servers has each dense block."""
    model = TwoTables()
    layout = plan_layout(model, [sgd(model)], 3, LayoutOptions(configs=PsConfigs(**configs)))  # type: ignore[arg-type]
    return {block.spec.name: block.server for dense in layout.dense for block in dense.blocks}


def test_dense_blocks_go_where_the_settings_say() -> None:
    in_turn, by_name = homes(), homes(split_method="HashName")
    assert list(in_turn.values()) == [number % 3 for number in range(len(in_turn))]
    assert list(by_name.values()) == place_blocks(list(by_name), 3, "HashName")
    assert in_turn.keys() == by_name.keys()
    assert in_turn != by_name
    assert "wide.weight[0:8400]" in in_turn
    assert "wide.weight[0:16800]" in homes(slice_var_up=False)


def test_a_table_is_what_its_own_settings_make_of_it() -> None:
    model = torch.nn.ModuleList([SparseEmbedding(2, entry=CountFilterEntry(3), low=-1.0) for _ in range(2)])
    own = TableConfigs(rule=Adagrad(), lr=0.5, entry=ShowClickEntry(), low=-0.5, high=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other, mine = plan_layout(model, [optimizer], 1, LayoutOptions(tables={"1.weight": own})).sparse
    assert (other.spec.rule, other.lr, other.spec.rows.low) == (SGD(), 0.1, -1.0)
    assert (other.spec.rows.entry, other.spec.rows.statistics) == (CountFilterEntry(3), False)
    assert (mine.spec.rule, mine.lr) == (Adagrad(), 0.5)
    rows = mine.spec.rows
    assert (rows.entry, rows.low, rows.high) == (ShowClickEntry(), -0.5, 2.0)
    assert rows.statistics, "who filters by shows and clicks has them counted"


def test_rows_have_the_type_of_their_module_or_of_their_entry_and_tables_of_two_types_are_apart() -> None:
    wide = torch.nn.Embedding(3, 2, sparse=True)
    short = torch.nn.Embedding(3, 2, sparse=True, dtype=torch.float16)
    model = torch.nn.ModuleList([wide, short, SparseEmbedding(2, dtype=torch.bfloat16), SparseEmbedding(2)])
    tables = {"3.weight": TableConfigs(dtype="bfloat16"), "*": TableConfigs(rule=RowWiseAdagrad())}
    layout = plan_layout(model, [sgd(model)], 1, LayoutOptions(tables=tables))
    found = {each.name: each for each in layout.sparse}
    types = [found[f"{number}.weight"].spec.rows.dtype for number in range(4)]
    assert types == [RowType.FLOAT32, RowType.FLOAT16, RowType.BFLOAT16, RowType.BFLOAT16]
    rules = [type(found[f"{number}.weight"].rule) for number in range(4)]
    assert rules == [RowWiseAdagrad, RowWiseAdagrad, RowWiseAdagrad, SGD], "an own entry counts alone"
    assert len({each.alike for each in layout.sparse}) == 4
    (frozen, *_) = plan_layout(model, [], 1, LayoutOptions(tables={"*": tables["*"]})).sparse
    assert frozen.rule == Fixed()
    double = torch.nn.ModuleList([torch.nn.Embedding(3, 2, sparse=True, dtype=torch.float64)])
    with pytest.raises(NotSupportedError, match=r"'0' is torch\.float64"):
        plan_layout(double, [sgd(double)], 1, LayoutOptions())
    with pytest.raises(UsageError, match="int8"):
        SparseEmbedding(2, dtype=torch.int8)


def test_a_table_learns_at_the_rate_of_its_group_or_its_own() -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(3, 2, sparse=True) for _ in range(3)])
    groups = [{"params": model[:2].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    tables = {"1.weight": TableConfigs(lr=2.0)}
    layout = plan_layout(model, [optimizer], 1, LayoutOptions(tables=tables))
    found = {each.name: each for each in layout.sparse}
    for group in optimizer.param_groups:
        group["lr"] /= 10  # as a scheduler does
    rates = [found[f"{number}.weight"].lr for number in range(3)]
    assert rates == [pytest.approx(0.01), 2.0, pytest.approx(0.05)]
    assert len({each.alike for each in layout.sparse}) == 3


@pytest.mark.parametrize("table", [TableConfigs(max_rows=7), TableConfigs(statistics=True)])
def test_a_padding_row_that_would_read_as_zeros_is_refused(table: TableConfigs) -> None:
    """Torch reads what is in it. Only a table that keeps its rows can do so."""
    model = torch.nn.Sequential(torch.nn.Embedding(10, 2, padding_idx=3, sparse=True))
    options = LayoutOptions(configs=PsConfigs(), tables={"0.weight": table})
    plan_layout(model, [sgd(model)], 1, options)
    with torch.no_grad():
        model[0].weight[3] = 7.0
    plan_layout(model, [sgd(model)], 1, LayoutOptions(configs=PsConfigs(), tables={}))
    with pytest.raises(NotSupportedError, match="id 3"):
        plan_layout(model, [sgd(model)], 1, options)
