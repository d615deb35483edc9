"""`fleetrun serve` in a process of its own, and requests to it."""

from __future__ import annotations

import contextlib
import copy
import http.client
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fleetrun.commands import serve
from fleetrun.host.interpreter import helper_environment
from tests.support.cluster import Running
from tests.support.command import FLEETRUN, environment
from tests.support.forking import Forked, Forker
from tests.support.traces import wait_until
from trainers.inference_server.protocol import DATATYPES

JSON_SIZE = "Inference-Header-Content-Length"
Tensors = dict[str, torch.Tensor]


class Served:
    """A server that serves. `process` is the one that holds the port."""

    def __init__(self, process: Running, log: Path, port: int, name: str) -> None:
        self.process = process
        self.log = log
        self.port = port
        self.path = f"/v2/models/{name}"

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def json(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        content = None if body is None else json.dumps(body).encode()
        status, _, text = self.ask(method, path, content)
        return status, json.loads(text)

    def infer(self, inputs: Tensors, *, binary: bool = True) -> tuple[str, Tensors]:
        """The version, and the outputs. AssertionError unless the status is 200."""
        body, headers = encoded(inputs) if binary else (json.dumps({"inputs": in_json(inputs)}).encode(), {})
        status, found, content = self.ask("POST", f"{self.path}/infer", body, headers)
        assert status == 200, content
        return decoded(content, found.get(JSON_SIZE))

    def workers(self) -> list[int]:
        """Their pids."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def served(
    folder: Path, bundle: str, *words: str, cache: Path | None = None, forker: Forker | None = None
) -> Iterator[Served]:
    """`fleetrun serve bundle words` in `folder`, when it says that it serves. `forker`: as `forked`."""
    words = (bundle, "--port=0", f"--cache={cache or folder / 'cache'}", "--name=model", *words)
    log = folder / "serve.log"
    process: Running
    if forker is not None:
        process = forked(forker, folder, *words)
    else:
        with log.open("w") as file:
            process = subprocess.Popen(
                [*FLEETRUN, "serve", *words], cwd=folder, env=_environment(), stdout=file, stderr=file
            )
    try:
        wait_until(lambda: "is served at" in log.read_text() or process.poll() is not None, log.read_text)
        found = re.search(r"is served at http://127\.0\.0\.1:(\d+)", log.read_text())
        assert found, log.read_text()
        yield Served(process, log, int(found[1]), "model")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class _Became(Exception):
    """What `fleetrun serve` becomes: a command."""


def forked(forker: Forker, folder: Path, *words: str) -> Forked:
    """`fleetrun serve words`, with its output in serve.log. This process reads the command line, and the
    forker starts what the command becomes: the server does not import torch again. Its workers do.
    """

    def become(file: str, command: list[str], environ: dict[str, str]) -> None:
        raise _Became(command[-3:])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "execve", become)
        became = CliRunner().invoke(copy.copy(serve.command), words).exception  # click caches its options
    assert isinstance(became, _Became), became
    log = folder / "serve.log"
    log.write_bytes(b"")
    return forker.start(became.args[0], helper_environment(_environment()), folder, log)


def not_served(forker: Forker, folder: Path, bundle: str, *words: str) -> str:
    """What `fleetrun serve bundle words` says. Its exit code is 1."""
    given = words if any(word.startswith("--port=") for word in words) else (*words, "--port=0")
    server = forked(forker, folder, bundle, f"--cache={folder / 'cache'}", *given)
    log = folder / "serve.log"
    try:
        wait_until(lambda: server.poll() is not None or "is served at" in log.read_text(), log.read_text)
        assert server.poll() == 1, log.read_text()
    finally:
        server.kill()
    return log.read_text()


def _environment() -> dict[str, str]:
    return environment({"NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR", "")})


def in_json(inputs: Tensors) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "datatype": DATATYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data": tensor.tolist(),
        }
        for name, tensor in inputs.items()
    ]


def encoded(inputs: Tensors) -> tuple[bytes, dict[str, str]]:
    """A request with all tensors in binary."""
    entries, pieces = [], []
    for name, tensor in inputs.items():
        content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        entries.append(
            {
                "name": name,
                "datatype": DATATYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "parameters": {"binary_data_size": len(content)},
            }
        )
        pieces.append(content)
    head = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    return b"".join([head, *pieces]), {JSON_SIZE: str(len(head))}


def decoded(content: bytes, json_size: str | None) -> tuple[str, Tensors]:
    size = len(content) if json_size is None else int(json_size)
    head, rest = json.loads(content[:size]), content[size:]
    dtypes = {name: dtype for dtype, name in DATATYPES.items()}
    outputs: Tensors = {}
    for entry in head["outputs"]:
        dtype, shape = dtypes[entry["datatype"]], entry["shape"]
        if "data" in entry:
            outputs[entry["name"]] = torch.tensor(entry["data"], dtype=dtype).view(shape)
            continue
        count = entry["parameters"]["binary_data_size"]
        outputs[entry["name"]] = torch.frombuffer(bytearray(rest[:count]), dtype=dtype).view(shape)
        rest = rest[count:]
    assert not rest
    return head["model_version"], outputs


def equal(found: Tensors, wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(found.values(), wanted, strict=True))
