"""What torch needs for the model alone: forward, backward and Adam on the dense part, the rows given as a
leaf, on one thread. No lookup, no data, no servers: the upper limit of a core.

Prints examples/s.
"""

from __future__ import annotations

import argparse
import time

import torch

from trainers.data.clicks import DENSE, SLOTS
from trainers.zoo.click_models import WideDeep


class Leaf(torch.nn.Module):
    """The same rows for any ids, as a leaf with a gradient of its own."""

    def __init__(self, batch: int, dim: int) -> None:
        super().__init__()
        self.rows = torch.empty(batch, SLOTS, dim).uniform_(-0.01, 0.01)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows.detach().requires_grad_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--hidden", default="128,64")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = [int(units) for units in args.hidden.split(",")]
    model = WideDeep(Leaf(args.batch_size, args.dim), args.dim, hidden=hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dense, labels = torch.rand(args.batch_size, DENSE), torch.randint(0, 2, (args.batch_size,)).float()
    ids = torch.zeros(args.batch_size, SLOTS, dtype=torch.int64)

    def step() -> None:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    steps, started = 0, time.perf_counter()
    while time.perf_counter() - started < args.seconds:
        step()
        steps += 1
    print(steps * args.batch_size / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
