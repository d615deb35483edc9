"""Share code between the ResNet trainers, so that all of them train in the same way.

The module has options, model, optimizer, pictures, and the line of Paddle's quick start.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsFloat

import torch

from trainers.data.flowers import Flowers, SyntheticPictures, flowers
from trainers.data.shard import shard_loader
from trainers.errors import UsageError
from trainers.examples.arguments import add_training, count, positive
from trainers.zoo.resnet import ResNet

Pictures = Flowers | SyntheticPictures

MOMENTUM = 0.9
L2_DECAY = 1e-4
SAMPLES = 6149  # as many as the training set of Flowers-102
EVERY = 5  # batches from one line to the next


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", metavar="DIR", help="Flowers-102 (default: synthetic pictures)")
    add_training(parser, epochs=10, batch_size=32, lr=0.1, batch_of="batch size of each trainer")
    parser.add_argument("--layers", type=int, default=50, help="18, 34, 50, 101 or 152")
    parser.add_argument("--width", type=positive, default=64, help="channels of the first stage")
    parser.add_argument("--class_dim", type=positive, default=102)
    parser.add_argument("--image_size", type=positive, default=224, help="pixels along each side")
    parser.add_argument("--samples", type=positive, default=SAMPLES, help="number of synthetic pictures")
    parser.add_argument("--num_workers", type=count, help="processes per trainer that read pictures")
    return parser


def resnet(args: argparse.Namespace) -> ResNet:
    """Return a ResNet on the CPU, with equal parameters for equal seeds. It calls `torch.manual_seed`."""
    torch.manual_seed(args.seed)
    return ResNet(layers=args.layers, class_dim=args.class_dim, width=args.width)


def optimizer_setting(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.SGD:
    """Return momentum with L2 decay, as in Paddle: v = 0.9 v + (g + 1e-4 p), p = p - lr v."""
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, weight_decay=L2_DECAY)


def batches(args: argparse.Namespace, *, rank: int, trainers: int) -> Iterator[tuple[int, int, Any]]:
    """Yield epoch, number and content of each batch of this trainer's share, for --epochs passes and at most
    --steps batches.

    Batches are (batch_size, 3, image_size, image_size) float32 and (batch_size,) int64. They are equal for
    equal seed, number of trainers and epoch. By default, two processes read Flowers-102, and synthetic
    pictures need none. `--num_workers` changes this.
    """
    workers = args.num_workers if args.num_workers is not None else (2 if args.data else 0)
    of_epoch = pictures(args)
    step = 0
    for epoch in range(args.epochs):
        loader = shard_loader(
            of_epoch(epoch),
            args.batch_size,
            rank=rank,
            trainers=trainers,
            seed=args.seed,
            epoch=epoch,
            num_workers=workers,
        )
        for number, batch in enumerate(loader):
            if step == args.steps:
                return
            step += 1
            yield epoch, number, batch


def pictures(args: argparse.Namespace) -> Callable[[int], Pictures]:
    """Return a function from epoch to data set: Flowers-102 with `--data`, else synthetic pictures."""
    if args.data:
        real = flowers(args.data, size=args.image_size, seed=args.seed)
        if real.classes > args.class_dim:
            raise UsageError(f"--class_dim is {args.class_dim}, but {args.data} has {real.classes} classes")
        return real.at
    synthetic = SyntheticPictures(args.samples, args.class_dim, args.image_size, args.seed)
    return lambda epoch: synthetic


def report(epoch: int, batch: int, loss: SupportsFloat, acc1: SupportsFloat, acc5: SupportsFloat) -> None:
    """Print the line of Paddle's trainers, every fifth batch."""
    if batch % EVERY == 0:
        cost, top1, top5 = float(loss), float(acc1), float(acc5)  # waits for a GPU only here
        print(
            f"[Epoch {epoch}, batch {batch}] loss: {cost:.5f}, acc1: {top1:.5f}, acc5: {top5:.5f}", flush=True
        )
