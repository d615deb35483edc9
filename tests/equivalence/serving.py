"""Serving programs: how they are drawn, and how a model is exported, loaded, served and asked.

One process exports the model and asks for answers: of the loaded model, of the server's code in the same
process, where many requests arrive at the same moment, and of a worker of `fleetrun serve` over HTTP and
gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fleetrun.envs import contract
from tests.equivalence.children import Job, Result, Seen, Way, a_folder, fork
from tests.equivalence.program import Drawing, Program, kinds_of
from tests.equivalence.serving_model import Inputs, Net, named, requests
from tests.support.inference import JSON_SIZE, decoded, encoded, in_json
from trainers import fleet
from trainers.inference import load_inference_model
from trainers.inference_server import worker
from trainers.inference_server.answers import Answers
from trainers.inference_server.files import CacheFile
from trainers.inference_server.metrics import Metrics
from trainers.inference_server.model import ModelVersion
from trainers.inference_server.protocol import DATATYPES, encode_answer
from trainers.inference_server.settings import ServeSettings
from trainers.serving.bundle import read_bundle

_HTTP, _GRPC = 6, 5
"""Requests to the worker."""
_CLIENTS = 3
WAYS = [Way("served", 1)]


def draw(seed: int) -> Program:
    rng = random.Random(f"serving {seed}")
    drawing = Drawing(rng, kinds_of("serving"))
    drawing.add("input", rng.choice((1, 1, 2, 2, 3)))
    drawing.add("mix", rng.choice((0, 1, 1, 2, 3)))
    drawing.add("head")
    drawing.add("request", rng.choice((0, 1, 1, 2)))
    return drawing.program(seed, "serving")


def ways(program: Program) -> list[Way]:
    return WAYS


# ---- What there is to see


def _order(program: Program, count: int, turn: int) -> list[int]:
    """Requests beside each other are others in each turn."""
    return random.Random(program.seed + turn).sample(range(count), count)


def _plan(program: Program, count: int) -> list[tuple[str, list[int]]]:
    """In which way which requests are made."""
    return [
        ("loaded", list(range(count))),
        *((f"together {turn}", _order(program, count, turn)) for turn in (1, 2)),
        ("over HTTP", _order(program, count, 3)[:_HTTP]),
        ("over gRPC", _order(program, count, 4)[:_GRPC]),
    ]


def _see(
    result: Result, way: str, numbers: Sequence[int], answers: Sequence[dict[str, torch.Tensor]]
) -> None:
    for number, answer in zip(numbers, answers, strict=True):
        result.seen += [
            Seen(f"{name} of request {number}, {way},", value.clone()) for name, value in answer.items()
        ]


def run_plain(program: Program, way: Way) -> Result:
    """The model by itself, on each request."""
    result = Result()
    try:
        net = Net(program)
        asked = requests(program, net)
        with torch.no_grad():
            answers = [named(net(**each)) for each in asked]
        for how, numbers in _plan(program, len(asked)):
            _see(result, how, numbers, [answers[number] for number in numbers])
    except Exception as error:  # noqa: BLE001  # whatever the model raises is the result
        result.failed(error)
    return result


# ---- The process that exports the model, and asks


def _settings(port: int, grpc_port: int) -> ServeSettings:
    return ServeSettings(
        fleetrun="0",
        bundle="bundle",
        name="model",
        host="127.0.0.1",
        port=port,
        grpc_port=grpc_port,
        workers=1,
        threads=1,
        cache="",
        follow="",
        poll_s=0.5,
        max_body=1 << 20,
        max_rows=64,
        max_batch_rows=64,
        max_waiting=256,
        timeout_s=60.0,
        keepalive_s=75.0,
        grace_s=5.0,
        slow_s=1.0,
    )


def _save(program: Program, net: Net) -> ModelVersion:
    block = program.first("example_of_rows")
    example = net.inputs(3 if block is None else block["rows"], "usual", 1)
    given = example if program.has("named_example") else tuple(example.values())
    fleet.save_inference_model("bundle", net, given)
    bundle = read_bundle("bundle", "inference", ("program", "weights"))
    files = {}
    for part in ("program", "weights"):
        (path,) = Path("bundle").resolve().glob(f"*{part}-{bundle.id}.*")
        files[part] = CacheFile(str(path), path.stat().st_size)
    return ModelVersion(sequence=1, version=bundle.id, about=bundle.about, values=None, **files)


def run_client(program: Program, settings: ServeSettings, control: socket.socket) -> Result:
    result = Result()
    try:
        net = Net(program)
        asked = requests(program, net)
        fleet.init(is_collective=True)
        version = _save(program, net)
        (loaded, first, second, over_http, over_rpc) = _plan(program, len(asked))
        model = load_inference_model("bundle")
        _see(result, *loaded, [named(model(**each)) for each in asked])
        for way, answers in zip(
            (first, second),
            asyncio.run(_together(settings, version, asked, first[1], second[1])),
            strict=True,
        ):
            _see(result, *way, answers)
        control.sendall(version.encode())
        control.recv(100)  # the worker serves it
        with ThreadPoolExecutor(_CLIENTS) as clients:
            for way, ask in ((over_http, _over_http), (over_rpc, _over_grpc(settings))):
                calls = [(ask, settings, asked[number], number) for number in way[1]]
                _see(result, *way, list(clients.map(_called, calls)))
    except Exception as error:  # noqa: BLE001  # whatever is raised is the result
        result.failed(error)
    return result


def _called(call: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    ask, *arguments = call
    return ask(*arguments)


def _body(inputs: Inputs, number: int) -> tuple[bytes, dict[str, str]]:
    """In binary or in JSON, in turn."""
    if number % 2:
        return encoded(inputs)
    return json.dumps({"inputs": in_json(inputs)}).encode(), {}


async def _together(
    settings: ServeSettings, version: ModelVersion, asked: Sequence[Inputs], *orders: Sequence[int]
) -> list[list[dict[str, torch.Tensor]]]:
    """Ask the server's code in this process for the answers to requests that arrive at the same moment."""
    answers = Answers(settings, Metrics(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
    await answers.serve(version)

    async def ask(number: int) -> dict[str, torch.Tensor]:
        body, headers = _body(asked[number], number)

        async def pieces() -> AsyncIterator[bytes]:
            yield body

        answer = await answers.infer("model", None, pieces(), headers.get(JSON_SIZE))
        found, size = encode_answer("model", answer)
        return decoded(b"".join(found), None if size is None else str(size))[1]

    found = [list(await asyncio.gather(*map(ask, order))) for order in orders]
    answers.close()
    return found


def _over_http(settings: ServeSettings, inputs: Inputs, number: int) -> dict[str, torch.Tensor]:
    body, headers = _body(inputs, number)
    connection = http.client.HTTPConnection("127.0.0.1", settings.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v2/models/model/infer", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return decoded(content, answer.getheader(JSON_SIZE))[1]


def _over_grpc(settings: ServeSettings) -> Any:
    import grpc

    messages, services = grpc.protos_and_services("trainers/inference_server/open_inference.proto")
    stub = services.GRPCInferenceServiceStub(grpc.insecure_channel(f"127.0.0.1:{settings.grpc_port}"))
    dtypes = {name: dtype for dtype, name in DATATYPES.items()}

    def ask(settings: ServeSettings, inputs: Inputs, number: int) -> dict[str, torch.Tensor]:
        request = messages.ModelInferRequest(model_name="model")
        for name, tensor in inputs.items():
            request.inputs.add(name=name, datatype=DATATYPES[tensor.dtype], shape=tensor.shape)
            request.raw_input_contents.append(tensor.contiguous().numpy().tobytes())
        answer = stub.ModelInfer(request, timeout=60)
        return {
            each.name: torch.frombuffer(bytearray(raw), dtype=dtypes[each.datatype]).view(tuple(each.shape))
            for each, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        }

    return ask


# ---- In the process that starts them


def run_worker(settings: ServeSettings, listening: socket.socket, control: socket.socket) -> Result:
    asyncio.run(worker.work(settings, listening, control))
    return Result()


@contextlib.contextmanager
def job(program: Program, way: Way) -> Iterator[Job]:
    """A worker, and the process that exports the model and asks; what still runs at the end is killed."""
    running = Job(awaited=False)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(a_folder())
        listening, held = (stack.enter_context(socket.socket()) for _ in range(2))
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        mine, its = (stack.enter_context(each) for each in socket.socketpair())
        settings = _settings(listening.getsockname()[1], held.getsockname()[1])
        environ = contract.without_contract(os.environ) | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
        try:
            work = partial(run_worker, settings, listening, its)
            running.servers.append(fork(folder, "worker", environ, work))
            client = partial(run_client, program, settings, mine)
            running.trainers.append(fork(folder, "client", environ, client))
            yield running
        finally:
            running.kill()


def warm_up() -> None:
    """Import what export, load and answers need, before the first fork."""
    importlib.import_module("grpc.aio")
    with a_folder() as folder, contextlib.chdir(folder):
        for seed in range(6):
            _export(draw(seed))


def _export(program: Program) -> None:
    from trainers.export import save_program

    net = Net(program)
    save_program("bundle", net, net.inputs(3, "usual", 1), None, {})
    load_inference_model("bundle")
