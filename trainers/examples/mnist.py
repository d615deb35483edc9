"""Share code between the MNIST trainers.

The module has the model (the MLP of Paddle's quick start), options, data, a line for each batch, and the
final accuracy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.data import DataLoader, TensorDataset

from trainers import fleet, static
from trainers.data.images import digits, mnist
from trainers.data.shard import shard_loader
from trainers.examples.arguments import add_training

# ---- The two-layer MLP of Paddle's quick start: 784 -> 128 tanh -> 128 tanh -> 10.


class MnistMlp(Module):
    """Maps (batch, ...) float32 images of `inputs` values to (batch, classes) logits."""

    def __init__(self, inputs: int = 784, classes: int = 10, hidden: int = 128) -> None:
        super().__init__()
        self.fc_1 = torch.nn.Linear(inputs, hidden)
        self.fc_2 = torch.nn.Linear(hidden, hidden)
        self.prediction = torch.nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        hidden = torch.tanh(self.fc_1(flat))
        logits: Tensor = self.prediction(torch.tanh(self.fc_2(hidden)))
        return logits


# ---- Options, data and model, a line for each batch, and the final accuracy


def options(description: str, *, epochs: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", metavar="DIR", help="MNIST idx files (default: scikit-learn's digits)")
    add_training(parser, epochs=epochs, batch_size=64, lr=0.001)
    return parser


def mnist_on_mlp_model(data: str | None, seed: int) -> tuple[TensorDataset, TensorDataset, MnistMlp]:
    """Return (train data, test data, model)."""
    torch.manual_seed(seed)
    images = mnist(data) if data else digits()
    return images.train, images.test, MnistMlp(inputs=images.pixels)


def batches(args: argparse.Namespace, data: TensorDataset) -> Iterator[tuple[int, Any]]:
    """Yield number and content of each batch of this trainer's share, for --epochs passes and at most --steps
    batches.
    """
    loader = shard_loader(
        data, args.batch_size, rank=fleet.worker_index(), trainers=fleet.worker_num(), seed=args.seed
    )
    step = 0
    for _ in range(args.epochs):
        for batch in loader:
            if step == args.steps:
                return
            step += 1
            yield step, batch


def feeds(images: TensorDataset) -> list[static.Data]:
    """Return the feeds x and y of a step in static style."""
    return [
        static.data(name="x", shape=[None, *images.tensors[0].shape[1:]], dtype="float32"),
        static.data(name="y", shape=[None], dtype="int64"),
    ]


def network(model: Module, x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
    """Compute a step in static style."""
    prediction = model(x)
    correct = (prediction.argmax(1) == y).float()
    return {"cost": torch.nn.functional.cross_entropy(prediction, y), "acc": correct.mean()}


def report(batch: int, loss: SupportsFloat) -> None:
    """Print the line of Paddle's trainers."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"time: [{now}], batch: [{batch}], loss[1]:[{float(loss):.6f}]", flush=True)


def tested(exe: static.Executor, program: static.Program, test_data: TensorDataset) -> float:
    """Return the same as `test_accuracy`, in static style."""
    test_program = program.clone(for_test=True)
    correct = 0.0
    for x, y in DataLoader(test_data, batch_size=1000):
        (acc,) = exe.run(test_program, feed={"x": x, "y": y}, fetch_list=["acc"])
        correct += float(acc) * len(y)
    return correct / len(test_data)


@torch.no_grad()
def test_accuracy(model: Module, test_data: TensorDataset, place: torch.device) -> float:
    """Return the share of test images whose label the model predicts correctly."""
    model.eval()
    correct = 0
    for x, y in DataLoader(test_data, batch_size=1000):
        correct += int((model(x.to(place)).argmax(1) == y.to(place)).sum())
    return correct / len(test_data)
