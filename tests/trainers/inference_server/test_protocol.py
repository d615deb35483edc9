"""The Open Inference Protocol: what is read out of requests, what is refused, and what answers look like."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.inference import decoded, encoded, in_json
from trainers.inference_server.protocol import (
    DATATYPES,
    InferAnswer,
    InferRequest,
    RequestError,
    TensorSpec,
    decode_request,
    encode_answer,
)

IDS = TensorSpec("ids", torch.int64, (None, 2))
X = TensorSpec("x", torch.float32, (None,))
INPUTS = [IDS, X]
OUTPUTS = ["score", "side"]


def request() -> dict[str, Any]:
    return {"inputs": in_json({"x": torch.tensor([0.5, -1.0]), "ids": torch.tensor([[1, 2], [3, -4]])})}


def decode(body: object, json_size: str | None = None) -> InferRequest:
    return decode_request(json.dumps(body).encode(), json_size, INPUTS, OUTPUTS)


def test_inputs_come_in_the_order_of_the_program_nested_or_flat():
    asked = decode({**request(), "id": "7"})
    flat = request()
    flat["inputs"][1]["data"] = [1, 2, 3, -4]
    for found in (asked, decode(flat)):
        assert [tensor.tolist() for tensor in found.inputs] == [[[1, 2], [3, -4]], [0.5, -1.0]]
        assert [tensor.dtype for tensor in found.inputs] == [torch.int64, torch.float32]
    assert asked.id == "7"
    assert asked.outputs == (("score", False), ("side", False))


@pytest.mark.parametrize("dtype", DATATYPES)
def test_every_type_in_binary_and_in_json(dtype):
    tensor = torch.tensor([[1, 0], [1, 1], [0, 1]]).to(dtype)
    spec = [TensorSpec("t", dtype, (None, 2))]
    body, headers = encoded({"t": tensor})
    asked = decode_request(body, *headers.values(), spec, ["t"])
    assert torch.equal(asked.inputs[0], tensor)
    text = json.dumps({"inputs": in_json({"t": tensor}), "outputs": [{"name": "t"}]}).encode()
    plain = decode_request(text, None, spec, ["t"])
    assert torch.equal(plain.inputs[0], tensor)
    for each in (asked, plain):
        pieces, json_size = encode_answer("m", InferAnswer(each, "9", {"t": tensor}))
        size = None if json_size is None else str(json_size)
        version, outputs = decoded(b"".join(pieces), size)
        assert version == "9"
        assert torch.equal(outputs["t"], tensor)


def test_only_the_outputs_that_are_wanted_each_as_it_is_wanted():
    wanted = {"outputs": [{"name": "side", "parameters": {"binary_data": True}}, {"name": "score"}]}
    asked = decode({**request(), **wanted})
    outputs = {"score": torch.tensor([0.5, float("nan")]), "side": torch.tensor([[1]])}
    pieces, json_size = encode_answer("m", InferAnswer(asked, "9", outputs))
    assert json_size == len(pieces[0])
    head = json.loads(pieces[0])
    assert [entry["name"] for entry in head["outputs"]] == ["side", "score"]
    assert head["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert head["outputs"][1]["data"] == [0.5, None], "JSON has no NaN"
    assert bytes(pieces[1]) == (1).to_bytes(8, "little")


def changed(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (changed("inputs", to=[]), "inputs is"),
        (changed("inputs", to={"ids": [1]}), "inputs is"),
        (changed("inputs", 0, to=5), "inputs[0] is 5"),
        (changed("inputs", 0, "name", to="y"), "inputs[0].name"),
        (changed("inputs", 0, "name", to="ids"), "inputs[0] (ids).datatype"),
        (lambda body: body["inputs"].pop(), "inputs: 'ids' is missing"),
        (lambda body: body["inputs"].append(body["inputs"][0]), "inputs[2].name: 'x' occurs twice"),
        (changed("inputs", 0, "datatype", to="FP64"), "inputs[0] (x).datatype"),
        (changed("inputs", 1, "shape", to=[2]), "inputs[1] (ids).shape"),
        (changed("inputs", 1, "shape", to=[2, 3]), "inputs[1] (ids).shape"),
        (changed("inputs", 1, "shape", to=[2, True]), "inputs[1] (ids).shape"),
        (changed("inputs", 1, "shape", to=[-2, 2]), "inputs[1] (ids).shape"),
        (changed("inputs", 1, "shape", to=[1 << 60, 2]), "inputs[1] (ids).shape"),
        (changed("inputs", 0, "shape", to=[3]), "inputs[0] (x).data has 2"),
        (changed("inputs", 1, "data", to=[[1, 2, 3, 4]]), "inputs[1] (ids).data is nested"),
        (changed("inputs", 1, "data", to=[[1, 2], [3]]), "inputs[1] (ids).data"),
        (changed("inputs", 1, "data", to=[1, 2, 3, 4.5]), "inputs[1] (ids).data must contain only whole"),
        (changed("inputs", 1, "data", to=[1, 2, 3, 1 << 63]), "inputs[1] (ids).data"),
        (changed("inputs", 1, "data", to=[1, 2, 3, "4"]), "inputs[1] (ids).data"),
        (changed("inputs", 0, "data", to=[1, None]), "inputs[0] (x).data"),
        (changed("inputs", 0, "data", to=[0.5, True]), "inputs[0] (x).data contains true or false"),
        (
            changed("inputs", 1, "data", to=[[1, 2], [3, False]]),
            "inputs[1] (ids).data contains true or false",
        ),
        (changed("inputs", 0, "data", to=[1, 1e300]), "inputs[0] (x).data"),
        (changed("inputs", 0, "data", to=None), "inputs[0] (x).data is missing"),
        (changed("inputs", 0, "parameters", to={"binary_data_size": 8}), "inputs[0] (x) has both data"),
        (changed("inputs", 0, "parameters", to=3), "inputs[0] (x).parameters"),
        (changed("id", to=5), "id is 5"),
        (changed("outputs", to=[{"name": "other"}]), "outputs[0].name"),
        (changed("outputs", to=[{"name": "score"}, {"name": "score"}]), "outputs[1].name"),
        (
            changed("outputs", to=[{"name": "score", "parameters": {"binary_data": 1}}]),
            "outputs[0].parameters.binary_data",
        ),
        (
            changed("outputs", to=[{"name": "score", "parameters": {"classification": 3}}]),
            "outputs[0].parameters.classification",
        ),
        (changed("parameters", to={"binary_data_output": "yes"}), "parameters.binary_data_output"),
    ],
)
def test_what_is_wrong_is_named_by_its_field(change, field):
    body = request()
    change(body)
    with pytest.raises(RequestError) as caught:
        decode(body)
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"inputs": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_request(body):
    with pytest.raises(RequestError, match="the body"):
        decode_request(body, None, INPUTS, OUTPUTS)


def test_more_json_than_the_inputs_need_is_not_parsed():
    body, headers = encoded({"ids": torch.zeros(9, 2, dtype=torch.int64), "x": torch.zeros(9)})
    space, (size,) = b" " * 70_000, headers.values()
    for each, json_size in ((b"[" + space, None), (space + body, str(len(space) + int(size)))):
        with pytest.raises(
            RequestError, match="bytes of JSON, but all inputs have at most 30 numbers together"
        ):
            decode_request(each, json_size, INPUTS, OUTPUTS, 10)
    decode_request(space + body, str(len(space) + int(size)), INPUTS, OUTPUTS)
    decode_request(body, size, INPUTS, OUTPUTS, 10)


def test_a_number_may_have_all_its_digits_and_a_line_of_its_own():
    numbers = torch.full((5000, 2), -(1 << 62))
    entries = in_json({"ids": numbers, "x": torch.full((5000,), -2.2250738585072014e-38)})
    text = json.dumps({"inputs": entries}, indent=2).encode()
    assert len(text) > 1 << 18
    assert torch.equal(decode_request(text, None, INPUTS, OUTPUTS, 5000).inputs[0], numbers)


@pytest.mark.parametrize(
    ("size", "more", "field"),
    [
        ("-1", b"", "Inference-Header-Content-Length"),
        ("²", b"", "Inference-Header-Content-Length"),
        ("999999", b"", "Inference-Header-Content-Length"),
        (None, b"x", "the body has 1 bytes after"),
    ],
)
def test_sizes_of_binary_bodies(size, more, field):
    body, headers = encoded({"ids": torch.zeros(2, 2, dtype=torch.int64), "x": torch.zeros(2)})
    (right,) = headers.values()
    with pytest.raises(RequestError, match=field):
        decode_request(body + more, size or right, INPUTS, OUTPUTS)
    for cut in range(1, 41):
        with pytest.raises(RequestError, match="binary_data_size"):
            decode_request(body[:-cut], right, INPUTS, OUTPUTS)


def test_a_binary_size_must_fit_its_shape():
    body, headers = encoded({"ids": torch.zeros(2, 2, dtype=torch.int64), "x": torch.zeros(2)})
    wrong = body.replace(b'"binary_data_size": 32', b'"binary_data_size": 31')
    with pytest.raises(
        RequestError, match=r"inputs\[0\] \(ids\).parameters.binary_data_size is 31.* must be 32"
    ):
        decode_request(wrong, *headers.values(), INPUTS, OUTPUTS)
