"""What both MNIST trainers share: options, data and model in one call, a line for each batch, the
accuracy at the end.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainers.data.images import digits, mnist
from trainers.zoo.mnist_mlp import MnistMlp


def options(description: str, *, epochs: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", metavar="DIR", help="MNIST idx files (default: scikit-learn's digits)")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--steps", type=int, help="stop after so many batches")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.001)
    return parser


def mnist_on_mlp_model(data: str | None, seed: int) -> tuple[TensorDataset, TensorDataset, MnistMlp]:
    """(train data, test data, model)."""
    torch.manual_seed(seed)
    images = mnist(data) if data else digits()
    return images.train, images.test, MnistMlp(inputs=images.pixels)


def report(batch: int, loss: torch.Tensor) -> None:
    """The line of Paddle's trainers."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"time: [{now}], batch: [{batch}], loss[1]:[{float(loss.detach()):.6f}]", flush=True)


@torch.no_grad()
def test_accuracy(model: torch.nn.Module, test_data: TensorDataset, place: torch.device) -> float:
    """The share of test images whose label the model gets right."""
    model.eval()
    correct = 0
    for x, y in DataLoader(test_data, batch_size=1000):
        correct += int((model(x.to(place)).argmax(1) == y.to(place)).sum())
    return correct / len(test_data)
