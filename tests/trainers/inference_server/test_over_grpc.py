"""gRPC: the same answers and refusals as over HTTP, by a client whose messages are the protocol's."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.support.forking import Forker
from tests.support.inference import Served, Tensors, equal, not_served, served
from tests.support.traces import wait_until
from tests.trainers.inference_server.test_server import Net, batch, computed, save
from trainers.inference_server.protocol import DATATYPES

pytestmark = pytest.mark.slow  # servers import torch

PROTO = "trainers/inference_server/open_inference.proto"
messages, services = grpc.protos_and_services(PROTO)
FIELDS = {torch.int64: "int64_contents", torch.float32: "fp32_contents"}


def test_the_compiled_description_is_that_of_the_proto(tmp_path: Path) -> None:
    """grpcio-tools are not needed where a model is served."""
    folder, made = Path(PROTO).parent, tmp_path / "made.pb"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"--descriptor_set_out={made}"]
    subprocess.run([*command, Path(PROTO).name], check=True)
    assert made.read_bytes() == (folder / "open_inference.pb").read_bytes()


class Client:
    """`fleetrun serve --grpc_port`, and a stub of it."""

    def __init__(self, server: Served) -> None:
        self.server = server
        found = re.search(r" and grpc://(127\.0\.0\.1:\d+)\n", server.log.read_text())
        assert found, server.log.read_text()
        self.place = found[1]
        self.stub = services.GRPCInferenceServiceStub(grpc.insecure_channel(self.place))

    def infer(self, inputs: Tensors, *, raw: bool = True, **more: Any) -> tuple[str, Tensors]:
        request = messages.ModelInferRequest(model_name="model", **more)
        for name, tensor in inputs.items():
            entry = request.inputs.add(name=name, datatype=DATATYPES[tensor.dtype], shape=tensor.shape)
            if raw:
                request.raw_input_contents.append(tensor.contiguous().numpy().tobytes())
            else:
                getattr(entry.contents, FIELDS[tensor.dtype]).extend(tensor.flatten().tolist())
        answer = self.stub.ModelInfer(request, timeout=60)
        assert answer.id == request.id
        dtypes = {name: dtype for dtype, name in DATATYPES.items()}
        raws = zip(answer.outputs, answer.raw_output_contents, strict=True)
        return answer.model_version, {
            each.name: torch.frombuffer(bytearray(content), dtype=dtypes[each.datatype]).view(*each.shape)
            for each, content in raws
        }

    def refused(self, inputs: Tensors, **more: Any) -> tuple[str, str]:
        with pytest.raises(grpc.RpcError) as error:
            self.infer(inputs, **more)
        return error.value.code().name, error.value.details()


@contextlib.contextmanager
def serving(forker: Forker, folder: Path, workers: int) -> Iterator[Client]:
    save(folder / "bundle")
    words = ("--grpc_port=0", f"--workers={workers}", "--max_rows=64", "--max_body=20000", "--threads=1")
    with served(folder, "bundle", *words, forker=forker) as server:
        yield Client(server)
        assert server.stop() == 0


@pytest.fixture(scope="module")
def client(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(forker, tmp_path_factory.mktemp("grpc"), 1) as found:
        yield found


def test_answers_are_those_of_the_model(client: Client) -> None:
    model = Net()

    def ask(number: int) -> bool:
        inputs = batch(1 + number % 7, number)
        _, outputs = client.infer(inputs, raw=number % 2 == 0, id=str(number))
        return list(outputs) == ["score", "rows", "column"] and equal(outputs, computed(model, inputs))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(60)))
    version, outputs = client.infer(batch(2), outputs=[{"name": "rows"}])
    assert (version, list(outputs)) == (client.server.infer(batch(2))[0], ["rows"])
    assert client.infer(batch(2), model_version=version)[0] == version


def test_what_it_serves(client: Client) -> None:
    asked = client.stub.ModelMetadata(messages.ModelMetadataRequest(name="model"))
    assert [(each.name, each.datatype, list(each.shape)) for each in asked.inputs] == [
        ("ids", "INT64", [-1, 3]),
        ("x", "FP32", [-1, 4]),
    ]
    assert client.stub.ServerLive(messages.ServerLiveRequest()).live
    assert client.stub.ServerReady(messages.ServerReadyRequest()).ready
    assert client.stub.ModelReady(messages.ModelReadyRequest(name="model")).ready
    assert client.stub.ServerMetadata(messages.ServerMetadataRequest()).name == "fleetrun"
    with pytest.raises(grpc.RpcError, match="model 'other' does not exist"):
        client.stub.ModelReady(messages.ModelReadyRequest(name="other"))


def test_refusals_name_the_field(client: Client) -> None:
    inputs = batch(2)
    code, text = client.refused({**inputs, "x": inputs["x"][:, :3]})
    assert (code, text) == ("INVALID_ARGUMENT", "inputs[1] (x).shape is [2, 3]; it must be [any, 4]")
    assert client.refused({"ids": inputs["ids"]}) == ("INVALID_ARGUMENT", "inputs: 'x' is missing")
    assert client.refused({**inputs, "ids": inputs["ids"] + 1000})[0] == "INVALID_ARGUMENT"
    assert client.refused(inputs, model_version="0")[0] == "NOT_FOUND"
    assert client.refused({**inputs, "x": inputs["x"].half()}, raw=True)[1].startswith(
        "inputs[1] (x).datatype"
    )
    with pytest.raises(grpc.RpcError, match="raw_input_contents has 1 elements, but inputs has 0"):
        client.stub.ModelInfer(messages.ModelInferRequest(model_name="model", raw_input_contents=[b"1"]))
    assert client.refused(batch(65))[0] == "INVALID_ARGUMENT"
    assert client.refused(batch(1 << 15))[0] == "RESOURCE_EXHAUSTED"
    code, text = client.refused(batch(1000))
    assert (code, text.split(";")[0]) == ("RESOURCE_EXHAUSTED", "the body has more than 20000 bytes")
    wide = messages.ModelInferRequest(model_name="model")
    wide.inputs.add(name="ids", datatype="INT64", shape=[1, 3]).contents.int_contents.extend([1, 2, 3])
    with pytest.raises(grpc.RpcError, match=r"inputs\[0\].contents.int64_contents has 0 elements, but shape"):
        client.stub.ModelInfer(wide)
    both = messages.ModelInferRequest(model_name="model", raw_input_contents=[b"1"])
    both.inputs.add(name="ids", datatype="INT64", shape=[1, 3]).contents.int64_contents.extend([1, 2, 3])
    with pytest.raises(grpc.RpcError, match=r"inputs\[0\].contents and raw_input_contents are both set"):
        client.stub.ModelInfer(both)
    top = [{"name": "score", "parameters": {"classification": {"int64_param": 3}}}]
    assert client.refused(inputs, outputs=top)[1].endswith("classification is not supported")
    nan = client.infer({**inputs, "x": torch.full((2, 4), float("nan"))}, raw=False)[1]
    assert bool(nan["score"].isnan().all())
    text = client.server.ask("GET", "/metrics")[2].decode()
    assert 'fleetrun_serve_requests_total{path="infer",status="400"}' in text


def test_another_server_cannot_have_the_port(client: Client, forker: Forker, tmp_path: Path) -> None:
    """Not even one that lets its own workers share it."""
    port = client.place.rpartition(":")[2]
    said = not_served(forker, tmp_path, str(tmp_path), f"--grpc_port={port}")
    assert f"127.0.0.1:{port} (--grpc_port): Address already in use" in said


def test_a_killed_worker_is_replaced(forker: Forker, tmp_path: Path) -> None:
    with serving(forker, tmp_path, 2) as client:
        (first, _) = client.server.workers()
        os.kill(first, signal.SIGKILL)
        log = client.server.log
        wait_until(lambda: re.search(r"worker \d+ serves version", log.read_text()), log.read_text)
        for number in range(8):  # each connection has a worker of its own
            with grpc.insecure_channel(client.place, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                ready = services.GRPCInferenceServiceStub(channel).ServerReady
                assert ready(messages.ServerReadyRequest(), wait_for_ready=True, timeout=60).ready, number
        assert equal(client.infer(batch(3))[1], computed(Net(), batch(3)))
