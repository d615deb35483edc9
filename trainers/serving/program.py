"""Export a model's forward pass by torch.export, without its weights. `bundle` writes the files.

    outputs = program.module()(weights, inputs)

`weights` and `inputs` are tuples of tensors. Their names and order are stored next to the program. The
weights can therefore be in a file of a plain format, and you can replace them without the program.

EmbeddingBag is replaced by operations whose shapes torch.export can derive. The original computes the number
of bags by an arange over all ids. This would fix a program to the batch of the export.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter, functional

from fleetrun.aliases import Document
from fleetrun.frozen import frozen
from trainers.errors import NotSupportedError, UsageError

# ---- EmbeddingBag in operations whose shapes torch.export can derive


class Bags(Module):
    """An EmbeddingBag in evaluation, with the same arguments and results.

    `rows` looks up (..., dim) for ids (...), if the bag's own weight is not used.
    """

    weight: Parameter | None

    def __init__(self, bag: torch.nn.EmbeddingBag, rows: Module | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.weight = cast(Parameter, bag.weight) if rows is None else None
        self._mode = bag.mode
        self._last = bag.include_last_offset
        self._padding = bag.padding_idx

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        rows = self._look_up(input)
        kept = torch.ones_like(input, dtype=torch.bool) if self._padding is None else input != self._padding
        if input.dim() == 2 and offsets is None:
            weights = None if per_sample_weights is None else per_sample_weights[..., None]
            return _COMBINED[self._mode](rows if weights is None else rows * weights, kept[..., None])
        return self._divided(rows, kept, offsets, per_sample_weights)

    def _divided(
        self,
        rows: Tensor,
        kept: Tensor,
        offsets: Tensor | None,
        weights: Tensor | None,
    ) -> Tensor:
        """Combine bags of flat ids, each from its offset to the next one."""
        if offsets is None:
            raise UsageError("an EmbeddingBag needs ids (batch, ids of a bag), or flat ids and offsets")
        places = torch.arange(rows.shape[0], device=rows.device)
        fit = (offsets == offsets.cummax(0).values) & (offsets <= rows.shape[0])
        if self._last and self._mode != "sum":  # torch adds some ids after the last offset to the last bag
            fit = fit & (offsets[-1:] == rows.shape[0])
        torch._assert_async(
            fit.all() & (offsets[:1] == 0).all(),
            "offsets must start with 0, must not decrease, and must end within the ids, or at their end for "
            "means and maxima of bags with include_last_offset",
        )
        bag = torch.searchsorted(offsets.to(torch.int64), places, right=True)
        count = offsets.shape[0] - int(self._last)
        empty = rows.new_zeros(offsets.shape[0] + 1, rows.shape[1])  # bag 0 collects ids outside every bag
        if self._mode == "max":
            lowest = torch.where(kept[:, None], rows, -math.inf)
            spread = bag[:, None].expand(-1, rows.shape[1])
            found = torch.full_like(empty, -math.inf).scatter_reduce(0, spread, lowest, "amax")
            return torch.where(found > -math.inf, found, 0.0)[1 : count + 1]
        rows = torch.where(kept[:, None], rows if weights is None else rows * weights[:, None], 0.0)
        sums = empty.index_add(0, bag, rows)
        if self._mode == "mean":
            counts = empty[:, 0].index_add(0, bag, kept.to(rows.dtype))
            sums = sums / counts.clamp(min=1)[:, None]
        return sums[1 : count + 1]

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.rows is not None:
            found: Tensor = self.rows(ids)
            return found
        assert self.weight is not None
        return functional.embedding(ids, self.weight)


def _bag_sum(rows: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, rows, 0.0).sum(1)


_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": _bag_sum,
    "mean": lambda rows, kept: _bag_sum(rows, kept) / kept.sum(1).clamp(min=1),
    "max": lambda rows, kept: torch.where(kept.any(1), torch.where(kept, rows, -math.inf).amax(1), 0.0),
}


# ---- Programs: a model's forward pass without its weights

Inputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


@frozen
class Program:
    """An exported program.

    `file` is the content for torch.export.load. `weights` maps names to values, in order. `inputs` holds the
    name, type and shape of each input, with None for any size.
    """

    file: bytes
    weights: dict[str, Tensor]
    inputs: list[Document]


def program_of(
    model: Module,
    example: Inputs,
    dynamic_shapes: object = None,
    stand_ins: Mapping[Module, Module] | None = None,
) -> Program:
    """Export the model as it evaluates (`eval()`, no gradients), on the CPU. The original does not change.

    `stand_ins` maps modules of the model to their replacements. `dynamic_shapes` is torch.export's argument
    for the inputs, in a tuple. None accepts any size of the first dimension. Raises UsageError for inputs
    that are not tensors, NotSupportedError for a model that fixes the size of a batch, and torch.export's
    errors.
    """
    names, tensors = _named(model, example)
    plain = _copied(model, stand_ins or {})
    weights = dict(plain.named_parameters()) | dict(plain.named_buffers())
    values = {name: weights[name].detach().cpu() for name in sorted(weights)}
    inputs = tuple(each.detach().cpu() for each in tensors)
    free = dynamic_shapes is None
    if free and all(each.dim() and each.shape[0] == 1 for each in inputs):
        inputs = tuple(torch.cat([each, each]) for each in inputs)  # torch treats a size of 1 as a constant
    positional = 0 if isinstance(example, Mapping) else len(names)
    stateless = _Stateless(plain, list(values), positional, names)
    shapes = tuple({0: torch.export.Dim.AUTO} if free and each.dim() else {} for each in inputs)
    with torch.no_grad():
        exported = torch.export.export(
            stateless,
            (tuple(values.values()), inputs),
            dynamic_shapes=(tuple({} for _ in values), dynamic_shapes or shapes),
        )
    found = list(map(_described, names, _placeholders(exported, len(names))))
    if free:
        fixed = [
            each
            for each, tensor in zip(found, inputs, strict=True)
            if tensor.dim() and each["shape"][0] is not None
        ]
        if fixed:
            raise NotSupportedError(
                f"The model fixes the first size of input {fixed[0]['name']!r} at {fixed[0]['shape'][0]}, so "
                "it could serve only batches of this size. Use the input's shape in forward(), or pass "
                "dynamic_shapes=() for a program of fixed shapes."
            )
    return Program(_file_of(exported), values, found)


class _Stateless(Module):
    """A model whose weights are arguments."""

    def __init__(self, model: Module, weights: list[str], positional: int, names: list[str]) -> None:
        super().__init__()
        self.__dict__["model"] = model  # not a submodule, because its weights would then be the program's own
        self._weights, self._positional, self._names = weights, positional, names

    def forward(self, weights: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> object:
        values = dict(zip(self._weights, weights, strict=True))
        args = inputs[: self._positional]
        kwargs = dict(zip(self._names[self._positional :], inputs[self._positional :], strict=True))
        return torch.func.functional_call(self.__dict__["model"], values, args, kwargs)


def _named(model: Module, example: Inputs) -> tuple[list[str], list[Tensor]]:
    """Return the inputs, and their names in `forward`. Raises UsageError for other values than tensors."""
    if isinstance(example, Mapping):
        names, tensors = list(example), list(example.values())
    else:
        tensors = [example] if isinstance(example, Tensor) else list(example)
        taken = [
            parameter.name
            for parameter in inspect.signature(type(model).forward).parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ][1:]
        names = [*taken, *(f"input{place}" for place in range(len(taken), len(tensors)))][: len(tensors)]
    wrong = [value for value in tensors if not isinstance(value, Tensor)]
    if wrong or not tensors:
        has = f"{wrong[0]!r} in it" if wrong else "nothing in it"
        raise UsageError(
            f"example_inputs has {has}. Pass a tensor, a tuple of tensors, or a dict of tensors by name."
        )
    return names, tensors


def _copied(model: Module, stand_ins: Mapping[Module, Module]) -> Module:
    """Copy the modules in eval mode, with the same tensors."""
    memo: dict[int, object] = {}
    for module in model.modules():
        other = stand_ins.get(module, module)
        bag = type(other).forward is torch.nn.EmbeddingBag.forward
        if bag or other is not module:
            memo[id(module)] = Bags(cast(torch.nn.EmbeddingBag, other)) if bag else other
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = tensor
    copied = copy.deepcopy(model, memo)
    return copied.eval()


def _placeholders(exported: torch.export.ExportedProgram, count: int) -> list[Tensor]:
    """Return the program's view of its last `count` inputs."""
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    return [node.meta["val"] for node in nodes[-count:]]


def _described(name: str, tensor: Tensor) -> Document:
    from torch.fx.experimental.symbolic_shapes import is_concrete_int

    shape = [int(size) if is_concrete_int(size) else None for size in tensor.shape]
    return {"name": name, "type": str(tensor.dtype).removeprefix("torch."), "shape": shape}


def _file_of(exported: torch.export.ExportedProgram) -> bytes:
    exported._example_inputs = None  # remove the user's data, which torch keeps as pickle
    file = io.BytesIO()
    torch.export.save(exported, file)
    content = file.getvalue()
    if suspects := dangers(content):
        raise NotSupportedError(
            f"The program has parts that are not safe to load ({', '.join(suspects[:3])}). For example, "
            "torch stores constants that are not plain tensors as pickle. Convert them to buffers or "
            "numbers."
        )
    return content


def dangers(file: bytes) -> list[str]:
    """Return the parts of a program's file that could run code when torch loads it.

    Such parts are members that an export of plain tensors does not have, constants that are unpickled, and
    text in the graph that torch would evaluate, import or call. Raises ValueError for a file that is not a
    program.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(file)) as archive:
            infos = archive.infolist()
            root = infos[0].filename.partition("/")[0] + "/"
            names = [
                info.orig_filename for info in infos if info.file_size or not _EXAMPLES.match(info.filename)
            ]
            found = [
                name for name, count in Counter(names).items() if count > 1 or not _MEMBER.fullmatch(name)
            ]
            found += [name for name in names if not name.startswith(root)]
            for name in archive.namelist():
                if name.endswith("_config.json"):
                    entries = json.loads(archive.read(name))["config"]
                    found += [key for key, entry in entries.items() if entry["use_pickle"]]
            return [*found, *_code_in(json.loads(archive.read(f"{root}models/model.json")))]
    except (zipfile.BadZipFile, KeyError, IndexError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"it is not a program: {error!r}") from error


def _code_in(value: object, key: str = "") -> Iterator[str]:
    """Yield suspect text and keys below `value`.

    Suspect is text that torch evaluates, and that is not an expression of sizes or an operator's name. So are
    keys by which torch's tree specs import modules. Tree specs are JSON inside strings.
    """
    if isinstance(value, str):
        if key in _GRAMMARS and not _GRAMMARS[key].fullmatch(value):
            yield f"{key} {value[:80]!r}"
        if value[:1] in ("[", "{", '"'):
            with contextlib.suppress(ValueError):
                yield from _code_in(json.loads(value), key)
    elif isinstance(value, dict):
        yield from _IMPORTING & value.keys()
        for name, each in value.items():
            yield from _code_in(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from _code_in(each, key)


_EXAMPLES = re.compile(r"[^/]+/data/sample_inputs/model\.pt")
_MEMBER = re.compile(
    r"[^/]+/(data/weights/(weight_\d+|\w+_config\.json)|data/constants/(tensor_\d+|\w+_config\.json)"
    r"|models/model\.json|archive_format|archive_version|byteorder|\.data/(version|serialization_id))"
)
_SYMPY = (
    "Symbol Integer Rational Float Add Mul Pow Max Min Mod Abs floor ceiling Equality Unequality "
    "LessThan GreaterThan StrictLessThan StrictGreaterThan Eq Ne Le Lt Ge Gt And Or Not FloorDiv "
    "CleanDiv CeilDiv ModularIndexing PythonMod IntTrueDiv FloatTrueDiv TruncToInt CeilToInt FloorToInt "
    "RoundToInt ToFloat Where true false precision positive negative nonnegative nonpositive nonzero "
    "zero integer real finite True False"
)
_OPERATOR = re.compile(
    r"torch\.ops\.(?!aten\.from_file)\w+\.\w+(\.\w+)?|torch\._?sym_\w+|math\.\w+"
    r"|_operator\.(?!call|attrgetter|itemgetter|methodcaller)\w+"
)
_EXPRESSION = rf"(\b({_SYMPY.replace(' ', '|')}|[suz]+\d+)\b|'[a-z]+\d+'|'[\d.]+'|\d|[\s(),=<>+*/%-])*"
_GRAMMARS = {"expr_str": re.compile(_EXPRESSION), "target": _OPERATOR, "as_operator": _OPERATOR}
_IMPORTING = {"__enum__", "default_factory_module"}
