"""A program's file from others: what could run code when torch loads it is found before."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainers.serving.program import dangers, program_of

Members = dict[str, bytes]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        joined = torch.cat([x * self.scale, self.table(ids).mean(1)])
        return {"out": joined[: x.shape[0] // 2 + 1], "both": joined.flatten()}


@pytest.fixture(scope="module")
def file() -> bytes:
    return program_of(Model(), (torch.zeros(6, 4), torch.zeros(6, 2, dtype=torch.int64))).file


def members(file: bytes) -> Members:
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(parts: Members, *more: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in (*parts.items(), *more):
            archive.writestr(name, content)
    return made.getvalue()


def with_model(change: Callable[[str], str]) -> Callable[[Members], None]:
    def changed(parts: Members) -> None:
        (name,) = [name for name in parts if name.endswith("models/model.json")]
        before = parts[name].decode()
        after = change(before)
        assert after != before
        json.loads(after)
        parts[name] = after.encode()

    return changed


def member(name: str) -> Callable[[Members], None]:
    def changed(parts: Members) -> None:
        parts[next(iter(parts)).partition("/")[0] + name] = b"anything"

    return changed


def unpickled(parts: Members) -> None:
    (name,) = [name for name in parts if name.endswith("model_weights_config.json")]
    parts[name] = parts[name].replace(b'"use_pickle": false', b'"use_pickle": true')
    if b"true" not in parts[name]:
        parts[name] = json.dumps({"config": {"w": {"use_pickle": True}}}).encode()


def expression(text: str) -> Callable[[Members], None]:
    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: text if key == "expr_str" else put(each) for key, each in value.items()}
        return [put(each) for each in value] if isinstance(value, list) else value

    return with_model(lambda model: json.dumps(put(json.loads(model))))


def in_tree(text: str) -> Callable[[Members], None]:
    """A tree spec, which is JSON inside of a string, with this context."""

    def put(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: json.dumps(text) if key == "out_spec" else put(each) for key, each in value.items()}
        return [put(each) for each in value] if isinstance(value, list) else value

    return with_model(lambda model: json.dumps(put(json.loads(model))))


CHANGES = {
    "weights as a file of torch.save": member("/data/weights/model.pt"),
    "a constant as a file of torch.save": member("/data/constants/custom_obj_0"),
    "examples": member("/data/sample_inputs/model.pt"),
    "another directory": member("/extra/x"),
    "a member outside": member("x/data/weights/weight_0"),
    "unpickled": unpickled,
    "a call": expression("__import__('os').system('true')"),
    "an attribute": expression("Symbol('s0').__class__"),
    "a function of sympy": expression("sympify('1')"),
    "a string": expression("Symbol('s0', positive=True) + Function('x y')"),
    "a function of torch": with_model(lambda model: model.replace("torch.ops.aten.mean.dim", "torch.load")),
    "a getter": with_model(lambda model: model.replace("torch.ops.aten.mean.dim", "_operator.attrgetter")),
    "a file's content": with_model(
        lambda model: model.replace("torch.ops.aten.mean.dim", "torch.ops.aten.from_file.default")
    ),
    "a module in an enum": in_tree(json.dumps([{"__enum__": True, "fqn": "os:x"}])),
    "the same, escaped": in_tree('[{"\\u005f_enum__": true}]'),
    "a module in a default": in_tree(json.dumps({"default_factory_module": "os"})),
}


def test_an_export_has_none(file: bytes) -> None:
    assert dangers(file) == []
    assert dangers(packed(members(file))) == []


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_each_is_found(file: bytes, change: Callable[[Members], None]) -> None:
    parts = members(file)
    change(parts)
    assert dangers(packed(parts))


def test_a_member_that_is_there_twice_is_found(file: bytes) -> None:
    parts = members(file)
    (name,) = [name for name in parts if name.endswith("models/model.json")]
    with pytest.warns(UserWarning, match="Duplicate name"):
        twice = packed(parts, (name, parts[name]))
    assert dangers(twice) == [name]


@pytest.mark.parametrize("broken", [b"", b"text", packed({}), packed({"archive/models/model.json": b"{"})])
def test_what_is_no_program_says_so(broken: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not a program|Expecting"):
        dangers(broken)
