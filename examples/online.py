"""Learn online from clicks within seconds, and serve the new model.

Users' taste drifts, so a model that does not change is soon wrong.

    fleetrun up examples/online.toml
    fleetrun plot online

Evaluator 0 simulates the users. It requests scores from both serving processes, draws clicks from a drifting
distribution, and writes them to a log. Trainers train from the growing log, and the servers publish their
tables every few seconds. Evaluator 1 is `fleetrun serve --follow`, which serves the newest version. Evaluator
2 serves the model as saved once. The plot has the AUC of both, and the best possible AUC.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import re
import socket
import sys
import time
import urllib.request
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from fleetrun.aliases import Document
from trainers import MultiSlotFiles, fleet, progress
from trainers.data.slots import Slot
from trainers.examples.arguments import positive
from trainers.metrics import WindowedAuc
from trainers.ps import SparseEmbedding, Uniform
from trainers.zoo.click_models import perceptron

USERS, ITEMS, DIM = 2_000, 200, 8
SLOTS = (Slot("user"), Slot("item"), Slot("label", "float32"))
PARTITIONS = 4
"""Files of the log, divided among the trainers."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Online learning: one of the processes of examples/online.toml"
    )
    parser.add_argument(
        "--folder", type=Path, required=True, help="directory for the log, the model and its versions"
    )
    parser.add_argument("--seconds", type=positive, default=120, help="how long people click, in seconds")
    parser.add_argument("--period", type=positive, default=60, help="period of the users' taste, in seconds")
    parser.add_argument("--rate", type=positive, default=2000, help="items that are shown per second")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between published versions")
    args = parser.parse_args()
    if not os.environ.get("FLEETRUN_CONTAINER"):
        parser.error("This example runs as a job. Start it with: fleetrun up examples/online.toml")
    return args


# ---- Servers and trainers


class Model(Module):
    """Maps (batch, 2) ids of a user and an item to (batch,) logits of a click."""

    def __init__(self) -> None:
        super().__init__()
        self.user = SparseEmbedding(DIM, init=Uniform(-0.01, 0.01))
        self.item = SparseEmbedding(DIM, init=Uniform(-0.01, 0.01))
        self.deep = perceptron(2 * DIM, [32])

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.cat([self.user(ids[:, 0]), self.item(ids[:, 1])], dim=1)
        logit: Tensor = self.deep(rows)[:, 0]
        return logit


def train(folder: Path, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.ps_configs = {
        "durability": "log",
        "publish": str(folder / "published"),
        "publish_interval_s": args.interval,
    }
    model = fleet.distributed_model(Model())
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.02), strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    example = torch.zeros(2, 2, dtype=torch.long)
    if fleet.is_first_worker() and not is_saved(folder / "program"):
        fleet.save_inference_model(folder / "program", model, example, rows=False)  # the rows are published
    log = MultiSlotFiles(folder / "clicks", use_var=SLOTS)
    cross_entropy = torch.nn.BCEWithLogitsLoss()
    request, over = folder / "save", folder / "over"
    for batch in fleet.stream(log, batch_size=256, follow=True, until=over.exists, poll_s=0.1):
        labels = batch.tensor("label").squeeze(1)
        loss = cross_entropy(model(batch.joined("user", "item")), labels)
        optimizer.minimize(loss)
        fleet.report(samples=len(labels))
        if fleet.is_first_worker() and request.exists():
            fleet.save_inference_model(folder / "saved", model, example)
            request.unlink()
    fleet.stop_worker()
    if over.exists() and (failure := over.read_text()):
        sys.exit(failure)


def is_saved(bundle: Path) -> bool:
    """Return True if a complete model is in this directory. Its manifest is written last."""
    return (bundle / "inference.json").exists()


# ---- The users


class Taste:
    """Gives each user a rate of clicks, and makes each item liked for a part of `period` seconds, in turn."""

    def __init__(self, period: float) -> None:
        torch.manual_seed(7)
        self._period = period
        self._users = torch.randn(USERS) / 2
        self._phases = 2 * math.pi * torch.rand(ITEMS)
        self._shares = torch.arange(1, ITEMS + 1) ** -0.7

    def draw(self, rows: int, moment: float) -> tuple[Tensor, Tensor]:
        """Return ids (rows, 2) int64 of users and shown items, and the probabilities (rows,) of a click."""
        user = torch.randint(USERS, (rows,))
        item = self._shares.multinomial(rows, replacement=True)
        turn = 2 * math.pi * moment / self._period
        logit = -1 + self._users[user] + 1.8 * torch.cos(turn + self._phases[item])
        return torch.stack([user, item], dim=1) + 1, logit.sigmoid()


class Server:
    """A serving process."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle

    def wait(self) -> None:
        """Wait until it answers. The process exits if it does not."""
        name, until = self._bundle.name, time.monotonic() + 150
        with progress.activity(f"waiting until {name} is served"):
            while self.scores(torch.ones(1, 2, dtype=torch.long)) is None:
                if time.monotonic() > until:
                    sys.exit(f"{name} is not served. See the logs of evaluators 1 and 2.")
                time.sleep(0.2)

    def scores(self, ids: Tensor) -> Tensor | None:
        """Return (rows,) probabilities, or None while it does not answer."""
        entry = {"name": "ids", "datatype": "INT64", "shape": list(ids.shape), "data": ids.tolist()}
        answer = self._ask(f"v2/models/{self._bundle.name}/infer", json.dumps({"inputs": [entry]}).encode())
        return torch.tensor(json.loads(answer)["outputs"][0]["data"]).sigmoid() if answer else None

    def age(self) -> float | None:
        """Return the age in seconds of the values that it serves, or None if it does not report one."""
        found = re.search(r"\nfleetrun_serve_version_timestamp_seconds (\S+)", self._ask("metrics"))
        saved = float(found[1]) if found else 0.0  # 0 before the first version
        return time.time() - saved if saved else None

    def _ask(self, path: str, body: bytes | None = None) -> str:
        """Return the answer, or an empty text while there is none."""
        try:
            port = port_file(self._bundle).read_text()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", body, timeout=5) as answer:
                return str(answer.read(), "utf-8")
        except (OSError, http.client.HTTPException):
            return ""


def write_log(folder: Path, ids: Tensor, clicks: Tensor) -> None:
    """Append MultiSlot lines to the files of the log."""
    rows = zip(ids.tolist(), clicks.tolist(), strict=True)
    lines = [f"1 {user} 1 {item} 1 {click:.0f}\n" for (user, item), click in rows]
    for number in range(PARTITIONS):
        with (folder / f"part-{number}").open("a") as file:
            file.writelines(lines[number::PARTITIONS])


def click(folder: Path, args: argparse.Namespace) -> None:
    """Request scores and click, four times a second.

    The distribution drifts with the number of shown rows, and so slowly on a slow node.
    """
    taste, published, saved = Taste(args.period), Server(folder / "program"), Server(folder / "saved")
    areas = {name: WindowedAuc(2 * args.rate) for name in ("best possible", "published", "saved once")}
    published.wait()
    due = time.monotonic()
    for tick in range(4 * args.seconds):
        ids, probabilities = taste.draw(args.rate // 4, tick / 4)
        clicks = probabilities.bernoulli()
        scores = (probabilities, published.scores(ids), saved.scores(ids))
        for area, found in zip(areas.values(), scores, strict=True):
            if found is not None:
                area.update(found, clicks)
        write_log(folder / "clicks", ids, clicks)
        if tick == args.period and not is_saved(folder / "saved"):  # after a quarter of a turn
            (folder / "save").touch()
            saved.wait()
            due = time.monotonic()
        values: Document = {f"AUC/{name}": area.value() for name, area in areas.items() if area.state.any()}
        if tick % 4 == 0 and (age := published.age()) is not None:
            values["version age, s"] = age
        progress.report(samples=len(clicks), **values)
        if tick % 20 == 0:
            print(f"{tick // 4} s:", *(f"{name} {value:.3f}" for name, value in values.items()), flush=True)
        due += 1 / 4
        time.sleep(max(0.0, due - time.monotonic()))


# ---- Serving


def serve(bundle: Path, *options: str) -> None:
    """Replace this process by `fleetrun serve` once the exported model exists."""
    with progress.activity("waiting for the model"):
        while not is_saved(bundle):
            time.sleep(0.2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    port_file(bundle).write_text(port)
    os.execv(
        sys.executable, [sys.executable, "-m", "fleetrun", "serve", str(bundle), "--port", port, *options]
    )


def port_file(bundle: Path) -> Path:
    return bundle.with_suffix(".port")


def main() -> None:
    args = options()
    pod, role, number = os.environ["FLEETRUN_CONTAINER"].rsplit(".", 2)
    folder = args.folder / pod
    (folder / "clicks").mkdir(parents=True, exist_ok=True)
    if role != "evaluator":
        train(folder, args)
    elif number == "0":
        failure = ""
        try:
            click(folder, args)
        except SystemExit as failed:
            failure = str(failed)
            raise
        finally:
            (folder / "failure").write_text(failure)
            (folder / "failure").rename(folder / "over")  # trainers find the whole text
    elif number == "1":
        serve(folder / "program", "--follow", str(folder / "published"))
    else:
        serve(folder / "saved")


if __name__ == "__main__":
    main()
