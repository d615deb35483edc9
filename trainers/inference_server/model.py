"""Compute answers in a worker, with the program and the weights that the worker maps."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fleetrun.aliases import Document, Fields
from fleetrun.frozen import frozen_by_name
from trainers.inference_server.files import CacheFile, map_file
from trainers.inference_server.follow import Followed, check_tables
from trainers.inference_server.mixing import find_mixing, keep_rows, repeat_late
from trainers.inference_server.protocol import DATATYPES, Given, TensorSpec
from trainers.process.log import glog
from trainers.ps.tables.shared import SharedRows, SharedVersion
from trainers.serving.lookup import TABLES
from trainers.shapes import Sizes
from trainers.storage.errors import LoadError

_SMALLEST, _ANY_SIZE = 2, 1 << 40
"""Torch reports 2 if there is no least size, because 0 and 1 are special to it."""

_PROBES = (1, 0), (2e6, -1e6), (0, 1), (0, 3e38), (0, -3e38), (0, math.nan)
"""Width and start of ranges of numbers: ordinary, large of both signs, equal, and extreme ones."""

_LATE = 8
"""Kept programs for different sets of inputs with one row."""

_SIZE = r"L\['inputs'\]\[\d+\]\.size\(\)\[\d+\]"
_EQUAL = re.compile(rf"{_SIZE} == {_SIZE}|\(\(-1\) \+ {_SIZE}\) != 1")
_RANGE = re.compile(rf"{_SIZE} (<|<=|>|>=) \d+|\d+ (<|<=|>|>=) {_SIZE}")
"""Guards that the protocol or the program checks for each request.

For one bag, the number of bags is one less than the number of offsets with their end. It is special only to
torch, and gives no other program.
"""

Outputs = dict[str, Tensor]
Result = Outputs | BaseException


@frozen_by_name
class ModelVersion:
    """The version that workers serve.

    `sequence` grows with every version of this server. `version` is its name in answers. `values` come from
    the followed directory and replace the values of the exported model.
    """

    sequence: int
    version: str
    program: CacheFile
    weights: CacheFile
    about: Fields
    values: Followed | None

    def encode(self) -> bytes:
        """Return the version as a line for workers."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> ModelVersion:
        body = json.loads(line)
        files = {name: CacheFile(**body[name]) for name in ("program", "weights")}
        return cls(**body | files | {"values": body["values"] and _followed(body["values"])})


class ServedProgram:
    """The program of an exported model.

    `inputs` and `outputs` describe its tensors. Outputs that are not tensors are left out. `mixes` is the
    reason why requests cannot be computed together, concatenated in the first dimension, or "" if they can.
    Raises LoadError.
    """

    def __init__(self, program: CacheFile, about: Fields) -> None:
        exported = torch.export.load(program.path)
        _refuse_what_depends_on_requests(exported)
        keep_rows(exported.graph)
        taken, given = _values(exported, len(about["inputs"]))
        self.inputs = [
            TensorSpec(each["name"], getattr(torch, each["type"]), tuple(each["shape"]))
            for each in about["inputs"]
        ]
        self._places = [place for place, value in enumerate(given) if isinstance(value, Tensor)]
        names = _names(exported)
        self.outputs = [
            TensorSpec(names[place], given[place].dtype, _sizes(given[place])) for place in self._places
        ]
        self.mixes = find_mixing(exported, [*taken, *(given[place] for place in self._places)])
        for spec in (*self.inputs, *self.outputs):
            if spec.dtype not in DATATYPES:
                raise LoadError(f"{spec.name!r} is {spec.dtype}, which the protocol does not support")
        self._rows = {  # rows of embeddings, by the placeholder of their ids in the graph
            str(node.args[1]): len(node.args[0].meta["val"])
            for node in exported.graph.nodes
            if node.target is torch.ops.aten.embedding.default
        }
        sizes = [size for spec in self.inputs for size in spec.shape[1:]]
        self._checked = bool(self.mixes) or None in sizes or _bounded(exported)
        self._module = exported.module() if self._checked else _unchecked(exported)
        self._late: dict[tuple[bool, ...], torch.fx.GraphModule | None] = {}

    def __call__(self, weights: Given, inputs: Given, rows: Sequence[int] = ()) -> Outputs:
        """Compute the outputs. Raises the errors of the program, which may be of any type.

        `rows` are the rows of each request in `inputs`. An input may have one row for all rows of a request.
        """
        once = tuple(len(each) == len(rows) < sum(rows) for each in inputs) if rows else ()
        with torch.inference_mode():
            late = None
            if any(once):
                which, late = torch.repeat_interleave(torch.tensor(rows)), self._repeated_late(once)
                if late is None:
                    both = zip(inputs, once, strict=True)
                    inputs = tuple(each[which] if single else each for each, single in both)
            if self._checked:
                found = torch.utils._pytree.tree_leaves(self._module(weights, inputs))
            elif late is not None:
                found = late.forward(*weights, *inputs, which)
            else:
                found = self._module.forward(*weights, *inputs)
        return {spec.name: found[place] for spec, place in zip(self.outputs, self._places, strict=True)}

    def named(self, error: Exception, inputs: Given) -> Exception:
        """Return the error. For an id outside its table, return an error with the name of the input."""
        for place, ids in enumerate(inputs):
            if (rows := self._rows.get(f"inputs_{place}")) and len(wrong := ids[(ids < 0) | (ids >= rows)]):
                who = f"{self.inputs[place].name} has the id {int(wrong[0])}"
                return IndexError(f"{who}, but its table has {rows} rows, 0 to {rows - 1}")
        return error

    def rows(self, inputs: Given) -> int:
        """Return the number of rows of a request."""
        if self.joins:
            return max(map(len, inputs))
        return len(inputs[0]) if inputs[0].dim() else 1

    def _repeated_late(self, once: tuple[bool, ...]) -> torch.fx.GraphModule | None:
        """Return `repeat_late` of the program, or None if the inputs must be repeated.

        The first sets of inputs keep their programs. torch keeps memory for each program that was ever made.
        """
        if once not in self._late and len(self._late) < _LATE and not self._checked:
            self._late[once] = None
            try:
                self._late[once] = repeat_late(self._module, once)
            except Exception as error:  # noqa: BLE001  (repeated inputs have the same answers)
                glog(f"inputs with one row are repeated before the program computes: {error!r}")
        return self._late.get(once)

    @property
    def joins(self) -> bool:
        """True if requests can be computed together."""
        return not self.mixes

    def example(self, rows: int, scale: float, start: float, bits: int) -> Given:
        """Draw inputs. Numbers lie between `start` and `start + scale`, and whole numbers have `bits`
        bits.
        """
        random, found = torch.Generator().manual_seed(rows), []
        for spec in self.inputs:
            shape = [2 if size is None else size for size in spec.shape]
            shape[:1] = [rows] if spec.shape and spec.shape[0] is None else shape[:1]
            largest = 1 << min(bits, 8 * spec.dtype.itemsize - 1)
            whole = torch.randint(largest, shape, generator=random)
            numbers = start + scale * torch.rand(shape, generator=random, dtype=torch.float64)
            found.append((numbers if spec.dtype.is_floating_point else whole).to(spec.dtype))
        return tuple(found)


class ServedModel:
    """A program and the version of its weights.

    All outputs of a batch have one version, because each version is served by a `successor`.
    """

    def __init__(self, version: ModelVersion) -> None:
        self.program = ServedProgram(version.program, version.about)
        self._fixed = version.weights.tensors()
        self._tables: dict[str, SharedRows] = {}
        self.version = version
        self.weights: Given = ()
        self.swap(version)

    def described(self, name: str) -> Document:
        """Return the model's metadata in the protocol's form."""
        return {
            "name": name,
            "versions": [self.version.version],
            "platform": "pytorch_torch_export",
            "inputs": [spec.described() for spec in self.program.inputs],
            "outputs": [spec.described() for spec in self.program.outputs],
        }

    def swap(self, version: ModelVersion) -> None:
        """Compute with this version from now on. It must belong to the same program.

        Raises LoadError or OSError, and then keeps the former version.
        """
        weights, tables = self._fixed, self._tables
        if (values := version.values) is not None:
            dense = values.dense.tensors()
            weights = {name: _shaped(name, dense.get(name), own) for name, own in weights.items()}
            wanted = {weight: table["name"] for weight, table in version.about.get("tables", {}).items()}
            tables = {
                name: SharedRows(values.tables[name], map_file, self._tables.get(name))
                for name in wanted.values()
            }
            weights |= {weight: torch.tensor(id(tables[name])) for weight, name in wanted.items()}
        self.weights = tuple(weights[name] for name in version.about["weights"])
        TABLES.update((id(reader), reader) for reader in tables.values())
        self._tables, self.version = tables, version

    def successor(self, version: ModelVersion) -> ServedModel:
        """Return the same program with another version. Raises as `swap` does."""
        other = copy.copy(self)
        other.swap(version)
        return other

    def warm_up(self) -> None:
        """Make the first calls, which compile and allocate.

        They also check that an ordinary request has the same answer together with other requests of all
        kinds. If it does not, requests are computed one by one.
        """
        program, ordinary = self.program, self.program.example(2, 1, 0, 1)
        alone = self._one(ordinary)
        if program.joins:
            answered = (bits for bits in range(62, 0, -1) if self._answers(program.example(3, 1, 0, bits)))
            bits = next(answered, 1)  # the largest ids that the program accepts have this many bits
            for scale, start in _PROBES:
                other = program.example(3, scale, start, bits)
                if self._answers(other) and not _alike(alone, self._together([ordinary, other])[0]):
                    program.mixes = (
                        f"an answer changed when computed with a request of numbers around {start:g}"
                    )
        if program.mixes:
            glog(f"requests are computed one by one: {program.mixes}")

    def compute(self, requests: Sequence[Given]) -> tuple[ModelVersion, list[Result]]:
        """Return the version and, for each request, its outputs or its error.

        Requests of one call have equal types and shapes, except for the first size. If the joined computation
        fails, each request is computed alone, because one of them may be wrong.
        """
        found = self._together(requests) if len(requests) > 1 else [None]
        return self.version, [
            self._one(request) if result is None else result
            for request, result in zip(requests, found, strict=True)
        ]

    def _together(self, requests: Sequence[Given]) -> Sequence[Outputs | None]:
        """Return the outputs of joined requests, or None for each if they cannot be computed together."""
        rows = list(map(self.program.rows, requests))
        try:
            joined = tuple(torch.cat(parts) for parts in zip(*requests, strict=True))
            found = self.program(self.weights, joined, rows)
            parts = {name: torch.split(tensor, rows) for name, tensor in found.items()}
        except Exception:  # noqa: BLE001  (whatever it is, one of them may be the reason)
            return [None] * len(rows)
        return [{name: pieces[place] for name, pieces in parts.items()} for place in range(len(rows))]

    def _answers(self, inputs: Given) -> bool:
        return not isinstance(self._one(inputs), BaseException)

    def _one(self, inputs: Given) -> Result:
        try:
            rows = [self.program.rows(inputs)] if self.program.joins else []
            return self.program(self.weights, inputs, rows)
        except Exception as error:  # noqa: BLE001  (a program may raise anything)
            return self.program.named(error, inputs)


def _followed(body: Fields) -> Followed:
    tables = {name: SharedVersion(**table) for name, table in body["tables"].items()}
    return Followed(**{**body, "dense": CacheFile(**body["dense"]), "tables": tables})


def check_values(version: ModelVersion, where: str) -> None:
    """Raise LoadError unless the followed values fit the program."""
    if version.values is None:
        return
    check_tables(version.about.get("tables", {}), version.values, where)
    fixed = version.weights.tensors()
    for name, flat in version.values.dense.tensors().items():
        if name not in fixed:
            raise LoadError(
                f"{where} has values of {name!r}, which the program of the bundle does not use, so it "
                "belongs to another model. Save the bundle again with fleet.save_inference_model(..., "
                "rows=False)"
            )
        _shaped(name, flat, fixed[name])


def _shaped(name: str, flat: Tensor | None, own: Tensor) -> Tensor:
    """Return flat followed values in the program's shape and type. Raises LoadError for a wrong size."""
    if flat is None:
        return own
    if len(flat) != own.numel():
        raise LoadError(
            f"{name!r} has {own.numel()} values in the bundle, but {len(flat)} in the followed directory"
        )
    return flat.view(own.shape).to(own.dtype)


def _values(exported: torch.export.ExportedProgram, inputs: int) -> tuple[list[Tensor], list[Any]]:
    """Return the program's inputs (without weights) and outputs, as seen by torch.export."""
    nodes = list(exported.graph.nodes)
    taken = [node.meta["val"] for node in nodes if node.op == "placeholder"][-inputs:]
    (last,) = (node for node in nodes if node.op == "output")
    given = [each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in last.args[0]]
    return taken, given


def _alike(one: Result, other: Outputs | None) -> bool:
    """Return True if a request has the same outputs alone and together with another, except for rounding."""
    if isinstance(one, BaseException) or other is None or one.keys() != other.keys():
        return False
    return all(
        tensor.shape == other[name].shape
        and torch.allclose(tensor.double(), other[name].double(), rtol=1e-3, atol=1e-5, equal_nan=True)
        for name, tensor in one.items()
    )


def _refuse_what_depends_on_requests(exported: torch.export.ExportedProgram) -> None:
    """Raise LoadError for a program that is wrong for some sizes, or that changes its weights with each
    request.

    Programs that check these sizes themselves are accepted.
    """
    guards = [
        guard for guard in _guards(exported) if not (_EQUAL.fullmatch(guard) or _RANGE.fullmatch(guard))
    ]
    if guards:
        raise LoadError(
            f"the program is right only if {guards[0]}, because the model's forward() depends on this "
            "condition. Remove the condition, and save the model again"
        )
    for node in exported.graph.nodes:
        changes = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if changes and node.args and getattr(node.args[0], "op", "") == "placeholder":
            raise LoadError(
                f"each request would change a value of the program ({node.target}). Remove the change from "
                "the model's forward()"
            )


def _guards(exported: torch.export.ExportedProgram) -> list[str]:
    """Return torch.export's assumptions about sizes, as Python expressions.

    Raises LoadError if torch does not provide them, because the program could then be wrong for other sizes.
    """
    found: Sequence[str] | None = getattr(exported, "_guards_code", None)
    if found is None:
        raise LoadError(f"torch {torch.__version__} does not report for which sizes the program is right")
    return [guard for guard in found if guard]


def _bounded(exported: torch.export.ExportedProgram) -> bool:
    """Return True if a size has an upper or lower limit."""
    return any(_RANGE.fullmatch(guard) for guard in _guards(exported)) or any(
        bool(sizes.upper < _ANY_SIZE) or bool(sizes.lower > _SMALLEST)
        for sizes in exported.range_constraints.values()
    )


def _unchecked(exported: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """Return the program as a function of single weights and inputs, without torch's checks of sizes.

    The checks take longer than a small model. Use this only for programs whose sizes the protocol has
    checked, where the number of rows is the only variable size.
    """
    module = exported.module()
    assert isinstance(module, torch.fx.GraphModule)
    module._forward_pre_hooks.clear()
    for node in list(module.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            module.graph.erase_node(node)
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    return module


def _names(exported: torch.export.ExportedProgram) -> list[str]:
    """Return a name for each output, from its key or position, as `output`, `output_1`, `scores`,
    `scores_1`.
    """
    spec = exported.call_spec.out_spec
    assert spec is not None
    tree = torch.utils._pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    found = []
    for path, _ in torch.utils._pytree.tree_flatten_with_path(tree)[0]:
        words = [str(getattr(key, "idx", getattr(key, "key", getattr(key, "name", "")))) for key in path]
        named = bool(path) and not hasattr(path[0], "idx")
        found.append("_".join(words if named else ["output", *words]))
    return found


def _sizes(tensor: Tensor) -> Sizes:
    return tuple(size if isinstance(size, int) else None for size in tensor.shape)
