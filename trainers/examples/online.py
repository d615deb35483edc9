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
import contextlib
import http.client
import json
import math
import os
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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

Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Online learning: one of the processes of examples/online.toml"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the log, the model and its versions")
    parser.add_argument("--seconds", type=positive, default=120, help="how long people click")
    parser.add_argument("--period", type=positive, default=60, help="seconds of a turn of their taste")
    parser.add_argument("--rate", type=positive, default=2000, help="items that are shown in a second")
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between published versions")
    args = parser.parse_args()
    if not os.environ.get("FLEETRUN_CONTAINER"):
        parser.error("start it with: fleetrun up examples/online.toml")
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
    if fleet.is_first_worker() and not (folder / "program").exists():
        save(folder / "program", model, rows=False)
    log = MultiSlotFiles(folder / "clicks", use_var=SLOTS)
    cross_entropy = torch.nn.BCEWithLogitsLoss()
    first, to_save = fleet.is_first_worker(), folder / "save"
    for batch in fleet.stream(log, batch_size=256, follow=True, until=(folder / "over").exists, poll_s=0.1):
        labels = batch.tensor("label").squeeze(1)
        loss = cross_entropy(model(batch.joined("user", "item")), labels)
        optimizer.minimize(loss)
        fleet.report(samples=len(labels))
        if first and to_save.exists():
            save(folder / "saved", model, rows=True)
            to_save.unlink()
    fleet.stop_worker()
    if (folder / "failed").exists():
        sys.exit((folder / "failed").read_text())


def save(to: Path, model: Module, *, rows: bool) -> None:
    """Save the model for serving, without rows if these are published. The directory appears when it
    is whole.
    """
    part = to.with_suffix(".part")
    fleet.save_inference_model(part, model, torch.zeros(2, 2, dtype=torch.long), rows=rows)
    part.rename(to)


# ---- The users


class Shown(NamedTuple):
    """Shown rows: ids (rows, 2) int64, the true probability of a click, and the click, both (rows,)."""

    ids: Ids
    probability: Doubles
    clicks: npt.NDArray[np.bool_]


class Taste:
    """Gives each user a rate of clicks, and makes each item liked for a part of `period` seconds, in turn."""

    def __init__(self, period: float) -> None:
        self._random = np.random.default_rng(7)
        self._period = period
        self._users = self._random.normal(0, 0.5, USERS)
        self._phases = self._random.uniform(0, 2 * math.pi, ITEMS)
        shares = 1 / np.arange(1, ITEMS + 1) ** 0.7
        self._shares = np.cumsum(shares / shares.sum())[:-1]

    def draw(self, rows: int, moment: float) -> Shown:
        user = self._random.integers(0, USERS, rows)
        item = np.searchsorted(self._shares, self._random.random(rows))
        turn = 2 * math.pi * moment / self._period
        logit = -1 + self._users[user] + 1.8 * np.cos(turn + self._phases[item])
        probability = 1 / (1 + np.exp(-logit))
        return Shown(
            ids=np.stack([user, item], axis=1) + 1,
            probability=probability,
            clicks=self._random.random(rows) < probability,
        )


class Server:
    """A serving process."""

    def __init__(self, folder: Path, bundle: str) -> None:
        self._port, self._bundle = folder / f"{bundle}.port", bundle

    def wait(self) -> None:
        """Wait until it answers. The process exits if it does not."""
        until = time.monotonic() + 150
        with progress.activity(f"waiting for {self._bundle} to be served"):
            while self.scores(np.ones((1, 2), np.int64)) is None:
                if time.monotonic() > until:
                    sys.exit(f"{self._bundle} is not served: see the logs of evaluators 1 and 2")
                time.sleep(0.2)

    def scores(self, ids: Ids) -> Tensor | None:
        """Return (rows,) probabilities, or None while it does not answer."""
        entry = {"name": "ids", "datatype": "INT64", "shape": list(ids.shape), "data": ids.tolist()}
        answer = self._ask(f"v2/models/{self._bundle}/infer", json.dumps({"inputs": [entry]}).encode())
        return None if answer is None else torch.tensor(json.loads(answer)["outputs"][0]["data"]).sigmoid()

    def age(self) -> float | None:
        """Return the age in seconds of the values that it serves, or None."""
        for line in (self._ask("metrics") or b"").decode().splitlines():
            name, _, value = line.partition(" ")
            if name == "fleetrun_serve_version_timestamp_seconds" and float(value):
                return time.time() - float(value)
        return None

    def _ask(self, path: str, body: bytes | None = None) -> bytes | None:
        try:
            port = self._port.read_text()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", body, timeout=5) as answer:
                return bytes(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return None


class ClickLog:
    """MultiSlot lines in growing files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [(folder / f"part-{number}").open("a") for number in range(PARTITIONS)]

    def write(self, shown: Shown) -> None:
        for number, file in enumerate(self._files):
            part = slice(number, None, PARTITIONS)
            rows = zip(shown.ids[part].tolist(), shown.clicks[part].tolist(), strict=True)
            file.write("".join(f"1 {user} 1 {item} 1 {click:d}\n" for (user, item), click in rows))
            file.flush()


def click(folder: Path, args: argparse.Namespace) -> None:
    """Request scores and click, four times a second.

    The distribution drifts with the number of shown rows, and so slowly on a slow node.
    """
    taste, log = Taste(args.period), ClickLog(folder / "clicks")
    published, saved = (Server(folder, bundle) for bundle in ("program", "saved"))
    servers = {"published": published, "saved once": saved}
    areas = {name: WindowedAuc(2 * args.rate) for name in ("best possible", *servers)}
    published.wait()
    due = time.monotonic()
    for tick in range(4 * args.seconds):
        shown = taste.draw(args.rate // 4, tick / 4)
        labels = torch.from_numpy(shown.clicks).float()
        areas["best possible"].update(torch.from_numpy(shown.probability), labels)
        for name, server in servers.items():
            scores = server.scores(shown.ids)
            if scores is not None:
                areas[name].update(scores, labels)
        log.write(shown)
        if tick == args.period and not (folder / "saved").exists():  # after a quarter of a turn
            (folder / "save").touch()
            saved.wait()
            due = time.monotonic()
        found = {f"AUC/{name}": area.value() for name, area in areas.items()}
        values: Document = {name: value for name, value in found.items() if not math.isnan(value)}
        if tick % 4 == 0 and (age := published.age()) is not None:
            values["version age, s"] = age
        progress.report(samples=len(labels), **values)
        if tick % 20 == 0:
            print(f"{tick // 4} s:", *(f"{name} {value:.3f}" for name, value in values.items()), flush=True)
        due += 1 / 4
        time.sleep(max(0.0, due - time.monotonic()))


# ---- Serving


def serve(bundle: Path, *options: str) -> None:
    """Replace this process by `fleetrun serve` once the exported model exists."""
    with progress.activity("waiting for the model"):
        while not bundle.exists():
            time.sleep(0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        number = str(free.getsockname()[1])
    bundle.with_suffix(".port").write_text(number)
    os.execv(
        sys.executable, [sys.executable, "-m", "fleetrun", "serve", str(bundle), "--port", number, *options]
    )


def main() -> None:
    args = options()
    pod, role, number = os.environ["FLEETRUN_CONTAINER"].rsplit(".", 2)
    folder = args.folder / pod
    (folder / "clicks").mkdir(parents=True, exist_ok=True)
    if role != "evaluator":
        train(folder, args)
        return
    if number == "0":
        try:
            click(folder, args)
        except SystemExit as failed:
            (folder / "failed").write_text(str(failed))
            raise
        finally:
            (folder / "over").touch()
    elif number == "1":
        serve(folder / "program", "--follow", str(folder / "published"))
    else:
        serve(folder / "saved")


if __name__ == "__main__":
    main()
