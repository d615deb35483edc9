"""Programs that would answer wrongly, quietly: they are refused, or computed request by request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from tests.support.inference import JSON_SIZE, encoded
from trainers.export import save_program
from trainers.inference_server.answers import Answers
from trainers.inference_server.batching import Batcher
from trainers.inference_server.files import CacheFile
from trainers.inference_server.model import ModelVersion, ServedModel
from trainers.inference_server.protocol import RefusedError
from trainers.serving.bundle import read_bundle
from trainers.storage.errors import LoadError
from trainers.zoo.resnet import ResNet

pytestmark = pytest.mark.slow  # torch.export


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x) + 0 * self.calls


class Counting(Function):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def served(
    folder: Path,
    model: nn.Module,
    example: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    *,
    unread: bool = False,
) -> ServedModel:
    """`unread`: as if nothing in the program's graph could combine rows."""
    save_program(folder, model.eval(), torch.rand(5, 3) if example is None else example, None, {})
    bundle = read_bundle(folder, "inference", ("program", "weights"))
    files = {}
    for part, content in bundle.contents.items():
        path = folder / f"part-{part}"
        path.write_bytes(content.numpy().tobytes())
        files[part] = CacheFile(path=str(path), size=len(content))
    version = ModelVersion(sequence=1, version="1", about=bundle.about, values=None, **files)
    found = ServedModel(version)
    if unread:
        found.program.mixes = ""
    found.warm_up()
    return found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.shape[0] % 2 else x,
        lambda x: x * 2 if x.shape[0] != 7 else x,
    ],
)
def test_a_program_for_some_sizes_only_is_refused(
    tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(LoadError, match=r"the program is right only if .*size"):
        served(tmp_path, Function(function))


def test_a_program_with_a_least_size_is_checked_for_each_request(tmp_path: Path) -> None:
    model = served(tmp_path, Function(lambda x: x * 2 if x.shape[0] > 3 else x))
    _, (alone,) = model.compute([(torch.ones(1, 3),)])
    assert isinstance(alone, BaseException)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.T,
        lambda x: x.softmax(0),
        lambda x: x[:1] + x,
        lambda x: x - x.mean(0),
        lambda x: x / torch.where(x.max() > 1, 255.0, 1.0),
        lambda x: (x * (127 / x.abs().amax())).round(),
        lambda x: x / x.shape[0],
        lambda x: x + torch.arange(x.shape[0])[:, None],
        lambda x: torch.full_like(x, 2.0) + torch.full(x.shape, x.shape[0]),
        lambda x: x + torch.arange(999.0)[: x.shape[0], None],
        lambda x: x.cumsum(0),
        lambda x: x.sort(0).values,
        lambda x: x.flip(0),
        lambda x: x.roll(1),
        lambda x: x[x[:, 0].argsort()],
        lambda x: x.gather(0, (x < 9).long()),
        lambda x: torch.ones(9, 99).gather(1, (x > 9).long().T).T,
        lambda x: functional.embedding((x[:, 0] > 9).long(), x),
        lambda x: x.T.reshape(x.shape),
        lambda x: x.flatten().cumsum(0).view(x.shape),
        lambda x: torch.cat([x, x])[: x.shape[0]],
        lambda x: torch.vstack([x[:1], x])[1:],
        lambda x: x.repeat(2, 1).view(x.shape[0], 2, 3).sum(1),
        lambda x: x.clone().index_put_((torch.tensor([0]),), torch.tensor(1.0)),
        lambda x: zeroed(x.clone()),
        lambda x: torch.einsum("ri,si->r", x, x)[:, None],
        lambda x: functional.batch_norm(x, None, None, training=True),
        lambda x: functional.normalize(x, dim=0),
        lambda x: functional.layer_norm(x.T, x.shape[:1]).T,
        lambda x: functional.scaled_dot_product_attention(x, x, x),
        lambda x: functional.instance_norm(x.T[None])[0].T,
        lambda x: functional.conv1d(x.T[None], torch.ones(3, 3, 3), padding=1)[0].T,
        lambda x: torch.tril(x @ torch.ones(3, 3)),
        lambda x: x * (x @ x.T).sum(),
    ],
)
def test_rows_that_may_depend_on_each_other_are_not_joined_with_those_of_another_request(
    tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    model = served(tmp_path, Function(function))
    assert not model.program.joins
    assert re.search("one by one: (operator aten|the first dimension)", capfd.readouterr().err)


def zeroed(x: torch.Tensor) -> torch.Tensor:
    x[:1].zero_()
    return x


def test_rows_that_do_not_are(tmp_path: Path) -> None:
    model = served(tmp_path, Function(lambda x: x.softmax(1)))
    assert model.program.joins
    one, other = torch.rand(2, 3), torch.rand(1, 3)
    _, results = model.compute([(one,), (other,)])
    for request, result in zip((one, other), results, strict=True):
        assert isinstance(result, dict)
        assert torch.allclose(result["output"], request.softmax(1))


@pytest.mark.parametrize(
    ("function", "example"),
    [
        (lambda x: x / torch.where(x.max() > 1, 255.0, 1.0), torch.rand(5, 3)),
        (lambda x: x - x.clamp(max=0).amin(), torch.rand(5, 3)),
        (lambda x: x / x.abs().max().clamp(min=1e9), torch.rand(5, 3)),
        (lambda x: x + (x == 1).all(1).any(), torch.rand(5, 3)),
        (
            lambda ids: (ids.max() > 100) * 1.0 + functional.embedding(ids, torch.rand(200, 2)),
            torch.ones(5, 3).long(),
        ),
        (lambda ids: (ids.max() > 1 << 40) + ids, torch.ones(5, 3).long()),
    ],
)
def test_probes_find_what_depends_on_large_and_rare_values(
    tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor], example: torch.Tensor
) -> None:
    model = served(tmp_path, Function(function), example, unread=True)
    assert model.program.mixes.startswith("an answer changed")


class Attention(nn.Module):
    """As most models have it: heads by views, and the rows in the middle of a dimension for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(8, 24)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.first = nn.Parameter(torch.rand(1, 1, 8))
        self.positions = nn.Embedding(9, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions(torch.arange(x.shape[1]))
        heads = self.all(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads.unbind(0)
        found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        scores = (queries @ keys.transpose(-1, -2)).masked_fill(torch.ones(5, 5).triu(1) > 0, -9.0)
        found = (
            found + scores.softmax(-1) @ values + torch.einsum("bhtd,bhsd,bhse->bhte", queries, keys, values)
        )
        return self.encoder(found.transpose(1, 2).reshape(x.shape))[:, 0]


class Clicks(nn.Module):
    """Tables, bags and their products."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(1000, 4, padding_idx=0), nn.EmbeddingBag(1000, 4, mode="mean")
        self.tower = nn.Sequential(
            nn.Linear(16, 8), nn.LayerNorm(8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout()
        )
        self.gates = nn.ModuleList([nn.Linear(8, 2) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.table(ids)
        pairs = (rows.sum(1).square() - rows.square().sum(1)) / 2
        crosses = torch.stack([rows[:, i] * rows[:, j] for i, j in [(0, 1), (1, 2)]], 1)
        chosen = rows[:, [0, 2]] * functional.one_hot(ids % 2, 4)[:, :2]
        x = self.tower(torch.cat([self.bag(ids), pairs, crosses.mean(1), chosen.amax(1)], 1))
        weights = torch.stack([gate(x).softmax(-1) for gate in self.gates], -1)
        best = torch.where(x > 0, x, 0.1).topk(3, -1).values.sort(-1).values
        return {
            "best": best,
            "weights": weights,
            "length": (ids != 0).sum(1),
            "sure": functional.normalize(x),
        }


class Last(nn.Module):
    """The last state of a sequence."""

    def __init__(self, states: nn.Module, *, turned: bool = False) -> None:
        super().__init__()
        self.states, self._turned = states, turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.states(x.transpose(0, 1))[0][-1] if self._turned else self.states(x)[0][:, -1]


ORDINARY = {
    "linear": (nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1), nn.Sigmoid()), torch.rand(5, 3)),
    "conv": (
        nn.Sequential(
            *(
                nn.Conv2d(3, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.GroupNorm(2, 4),
            ),
            *(
                nn.Conv2d(4, 4, 3),
                nn.InstanceNorm2d(4),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(4, 2),
            ),
        ),
        torch.rand(5, 3, 8, 8),
    ),
    "attention": (Attention(), torch.rand(5, 4, 8)),
    "clicks": (Clicks(), torch.randint(0, 1000, (5, 3))),
    "sequence": (Last(nn.LSTM(8, 3, batch_first=True)), torch.rand(5, 4, 8)),
    "turned": (Last(nn.GRU(8, 3), turned=True), torch.rand(5, 4, 8)),
    "resnet": (ResNet(18, class_dim=3, width=4), torch.rand(5, 3, 32, 32)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_are_joined(tmp_path: Path, name: str) -> None:
    module, example = ORDINARY[name]
    model = served(tmp_path, module, example)
    assert model.program.mixes == ""
    some = [(example[:2],), (example[2:],)]
    _, results = model.compute(some)
    for request, result in zip(some, results, strict=True):
        wanted = module(*request)
        wanted = wanted if isinstance(wanted, dict) else {"output": wanted}
        assert isinstance(result, dict)
        for key, value in wanted.items():
            assert torch.allclose(result[key], value, atol=1e-5)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_flat_ids_are_served_for_any_number_of_bags(tmp_path: Path, mode: str) -> None:
    """As a data set gives them: offsets with their end."""
    bags = nn.EmbeddingBag(10, 4, mode=mode, include_last_offset=True)
    ids = torch.tensor([1, 2, 3, 4, 9])
    model = served(tmp_path, bags, (ids, torch.tensor([0, 2, 3, 5])))
    for offsets in ([0, 5], [0, 3, 5], [0, 0, 2, 2, 5]):
        _, (found,) = model.compute([(ids, torch.tensor(offsets))])
        assert isinstance(found, dict)
        assert torch.allclose(found["output"], bags(ids, torch.tensor(offsets)))


def test_a_program_that_remembers_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="each request would change"):
        served(tmp_path, Counting(lambda x: x))


class Ranking(nn.Module):
    """A user, with a history, and an item."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4, padding_idx=0)
        self.bag = nn.EmbeddingBag(1000, 4, mode="mean", padding_idx=0)
        self.tower = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
        self.states = nn.GRU(4, 4, batch_first=True)
        self.item, self.top = nn.Linear(8, 4), nn.Linear(16, 1)

    def forward(self, user: torch.Tensor, past: torch.Tensor, item: torch.Tensor) -> dict[str, torch.Tensor]:
        tower = self.tower(self.table(user).view(user.shape[0], -1))
        state = self.states(self.table(past).flatten(0, 1).view(*past.shape, 4))[0][:, -1]
        items = self.item(self.table(item).view(item.shape[0], -1))
        found = self.top(torch.cat([tower * items, state, self.bag(past), items], 1))
        return {"score": found[:, 0].sigmoid(), "user": tower, "rows": self.table(user), "past": past}


def ranked(rows: int, seed: int, single: tuple[bool, ...]) -> tuple[torch.Tensor, ...]:
    of = torch.Generator().manual_seed(seed)
    shapes = zip((3, 5, 2), single, strict=True)
    return tuple(torch.randint(1000, (1 if one else rows, size), generator=of) for size, one in shapes)


def whole(inputs: tuple[torch.Tensor, ...], rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(each.repeat(rows, 1) if len(each) == 1 else each for each in inputs)


@pytest.mark.parametrize("single", [(True, True, False), (False, True, False), (False, False, True)])
def test_an_input_of_one_row_is_computed_once_for_all_rows_of_a_request(
    tmp_path: Path, single: tuple[bool, ...]
) -> None:
    model = served(tmp_path, Ranking(), ranked(5, 0, (False,) * 3))
    assert model.program.joins
    some, other, row = ranked(64, 1, single), ranked(7, 2, single), ranked(1, 3, single)
    with FlopCounterMode(display=False) as cheap:
        _, results = model.compute([some])
    with FlopCounterMode(display=False) as dear:
        _, wanted = model.compute([whole(some, 64)])
    assert cheap.get_total_flops() < dear.get_total_flops()
    requests = [some, other] if single[0] else [some, other, ranked(7, 4, single)]
    _, joined = model.compute(requests)
    for result in (results[0], joined[0]):
        assert_alike(result, wanted[0])
    assert_alike(joined[1], model.compute([whole(other, 7)])[1][0])
    assert_alike(model.compute([row])[1][0], model.compute([whole(row, 1)])[1][0])


def assert_alike(found: object, wanted: object) -> None:
    assert isinstance(found, dict)
    assert isinstance(wanted, dict)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert torch.allclose(found[name], value, atol=1e-6), name
    assert all(torch.equal(found[name], wanted[name]) for name in ("rows", "past") if name in wanted)


class Pair(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._function(x, y)


def changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x * 2
    part = x[:, :1]
    before = part + y
    x.add_(1)
    return before * (part + y)


def flattened(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1)
    return (flat.reshape(-1, 3) * 2 + y) * (flat * y.reshape(-1)).reshape(-1, 3)


def resized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    flat = x.flatten()
    return (flat.view(x.shape[0], 3) * 2 + y) * (flat * y.flatten()).view(y.shape)


def divided(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = x + y
    one, other = torch.cat([x, x], 1).reshape(-1, 2).unbind(1)
    return one.exp().reshape(-1, 3) + both * (other * y.reshape(-1)).reshape(-1, 3)


def shared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    same = torch.ones(x.shape[0], 3)
    return (same + x) * 2 + same * y


@pytest.mark.parametrize(
    "function",
    [
        changed,
        flattened,
        resized,
        divided,
        shared,
        lambda x, y: (x * 2).add_(1) + y,  # in place
        lambda x, y: x.add(1).mul_(y),
        lambda x, y: torch.zeros(x.shape[0], 3) + x + torch.zeros(x.shape[0], 3) * y,
        lambda x, y: torch.cat([torch.ones(y.shape[0], 1), x], 1)[:, :3] + y,
        lambda x, y: ((x + y).flatten() * x.flatten() * y.flatten()).view(x.shape),  # rows share a dimension
        lambda x, y: (x.flatten() + 1).view(-1, 3) - y,
        lambda x, y: (x + y) * (x.T * 3).T.reshape(y.shape[0], 3) * y,
        lambda x, y: x.max(1).values[:, None] * y + x.topk(2, 1)[1][:, :1],
        lambda x, y: torch.stack([x, y]).unbind(0)[0] + y.T.T,
        lambda x, y: x.expand(2, *x.shape)[1] * torch.arange(3) + y,
        lambda x, y: y * 2 + torch.ones(3),
        lambda x, y: x.squeeze(0) * y,
        lambda x, y: (x[:, None] * 2).squeeze() * y,
        lambda x, y: (x[:, None] * 2).squeeze((0, -2)) + (y @ torch.ones(3, 1)).squeeze(-1)[:, None],
        lambda x, y: (x @ torch.ones(3, 1)).squeeze()[:, None] + y,
    ],
)
def test_programs_of_all_kinds_answer_one_row_like_repeated_rows(
    tmp_path: Path, function: Callable[..., torch.Tensor]
) -> None:
    model = served(tmp_path, Pair(function), (torch.rand(5, 3), torch.rand(5, 3)))
    for single in (True, False), (False, True):
        one, other, rest = torch.rand(1, 3), torch.rand(4, 3), torch.rand(1, 3)
        requests = [(one, other), (rest, other[:2])] if single[0] else [(other, one), (other[:2], rest)]
        if not model.program.joins:
            assert "first dimension" in model.program.mixes
            return
        found = [*model._together(requests), *model._together(requests[:1])]
        for request, rows, result in zip((*requests, requests[0]), (4, 2, 4), found, strict=True):
            wanted = function(*whole(request, rows))
            assert isinstance(result, dict), result
            assert result["output"].shape == wanted.shape
            assert torch.allclose(result["output"], wanted)


def test_one_row_is_a_row_of_the_answer_of_a_program_that_removes_sizes_of_one(tmp_path: Path) -> None:
    model = served(
        tmp_path, Pair(lambda x, y: ((x + y) @ torch.ones(3, 1)).squeeze()), (torch.rand(5, 3),) * 2
    )
    _, (found,) = model.compute([(torch.ones(1, 3), torch.zeros(1, 3))])
    assert isinstance(found, dict)
    assert found["output"].tolist() == [3]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, train: functional.dropout(x, 0.5, train),
        lambda x, train: functional.rrelu(x - 0.5, training=train),
        lambda x, train: functional.scaled_dot_product_attention(
            *[x[:, None, :, None]] * 3, dropout_p=0.5 * train
        )[:, 0, :, 0],
    ],
)
def test_each_row_has_random_numbers_of_its_own(
    tmp_path: Path, draw: Callable[[torch.Tensor, bool], torch.Tensor]
) -> None:
    for train in (False, True):
        drawn = Pair(lambda x, y, train=train: draw(x, train) + y)
        model = served(tmp_path / str(train), drawn, (torch.rand(5, 64), torch.rand(5, 64)))
        model.program.mixes = ""  # the probes have found the random numbers
        _, (found,) = model.compute([(torch.rand(1, 64), torch.zeros(2, 64))])
        assert isinstance(found, dict)
        assert torch.equal(*found["output"]) != train


def test_a_program_that_cannot_be_changed_repeats_the_row(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = served(tmp_path, Pair(lambda x, y: x * 2 + y), (torch.rand(5, 3), torch.rand(5, 3)))
    one, other = torch.rand(1, 3), torch.rand(4, 3)
    for node in model.program._module.graph.find_nodes(op="placeholder"):
        node.meta.clear()
    for wanted, request in ((one * 2 + other, (one, other)), (other * 2 + one, (other, one))) * 2:
        _, (found,) = model.compute([request])
        assert isinstance(found, dict)
        assert torch.equal(found["output"], wanted)
    assert capfd.readouterr().err.count("repeated before the program computes: KeyError") == 2


def test_the_first_sets_of_inputs_with_one_row_keep_their_programs(tmp_path: Path) -> None:
    """torch never frees the memory of a program that was made."""
    model = served(tmp_path, Pair(lambda x, y: x * 2 + y), (torch.rand(5, 3), torch.rand(5, 3)))
    model.program._late = {(True,) * inputs: None for inputs in range(8)}
    kept = dict(model.program._late)
    one, other = torch.rand(1, 3), torch.rand(4, 3)
    _, (found,) = model.compute([(other, one)])
    assert isinstance(found, dict)
    assert torch.equal(found["output"], other * 2 + one)
    assert model.program._late == kept


def test_a_program_whose_sizes_torch_checks_repeats_the_row(tmp_path: Path) -> None:
    model = served(tmp_path, Pair(lambda x, y: x + y if x.shape[0] < 999 else x), (torch.rand(5, 3),) * 2)
    one, other = torch.rand(1, 3), torch.rand(4, 3)
    _, (found,) = model.compute([(one, other)])
    assert isinstance(found, dict)
    assert torch.equal(found["output"], one + other)


def test_a_row_for_all_rows_has_the_limit_of_the_body_as_if_it_were_repeated(tmp_path: Path) -> None:
    model = served(tmp_path, Pair(lambda x, y: torch.cat([x, y], 1)), (torch.rand(5, 3), torch.rand(5, 1)))
    settings: Any = SimpleNamespace(max_rows=200, max_body=1200)
    metrics: Any = SimpleNamespace(folder=str(tmp_path))
    answers = Answers(settings, metrics)

    def decode(rows: int) -> None:
        body, headers = encoded({"x": torch.rand(1, 3), "y": torch.rand(rows, 1)})
        answers._decoded(model, body, headers[JSON_SIZE])

    decode(100)
    with pytest.raises(RefusedError, match="repeated for 101 rows, have more than 1200 bytes") as refused:
        decode(101)
    assert refused.value.status == 413


def test_a_request_with_a_header_that_is_no_text_is_kept(tmp_path: Path) -> None:
    metrics: Any = SimpleNamespace(folder=str(tmp_path))
    settings: Any = None
    assert Answers(settings, metrics)._keep("slow", bytearray(b"{}"), "\udcff").startswith("kept in ")
    assert next(tmp_path.glob("slow-*")).read_bytes() == b"?\n{}"


def test_requests_are_computed_alone_when_the_probes_say_so_after_the_start(tmp_path: Path) -> None:
    model = served(tmp_path, Function(lambda x: x * 2))
    counted: list[int] = []

    async def ask(mixes: str) -> None:
        batcher = Batcher(model, 100, 100, counted.append)
        model.program.mixes = mixes
        answers = [batcher.submit((torch.ones(rows, 3),)) for rows in (1, 2, 3)]
        await asyncio.gather(*answers)
        batcher.close()

    asyncio.run(ask(""))
    asyncio.run(ask("an answer changed"))
    assert counted == [6, 1, 2, 3]
