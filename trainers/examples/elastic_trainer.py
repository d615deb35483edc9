"""Train data parallel on handwritten digits, and resume after a crash, a stop, or a change of nodes.

fleetrun --gpus 0,1 --max_restart 3 trainers/examples/elastic_trainer.py --dir checkpoints
fleetrun --nnodes 2:4 --master h1:6768 trainers/examples/elastic_trainer.py --dir /shared/checkpoints
"""

import argparse
import os
import signal
import time

import torch
import xxhash
from torch.utils.data import DataLoader

from trainers import fleet
from trainers.collective.group import current_device
from trainers.data.sampler import ElasticBatchSampler
from trainers.examples.arguments import count, positive
from trainers.examples.mnist import mnist_on_mlp_model, test_accuracy


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Elastic training of an MLP on digits")
    parser.add_argument("--dir", required=True, help="checkpoints; a directory that all nodes share")
    parser.add_argument("--data", metavar="DIR", help="MNIST idx files (default: scikit-learn's digits)")
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument("--batch_size", type=positive, default=64, help="batch size of all trainers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--save_every", type=positive, default=50, metavar="STEPS")
    parser.add_argument("--print_every", type=positive, default=20, metavar="STEPS")
    parser.add_argument(
        "--step_time", type=float, default=0.0, metavar="S", help="seconds that a step takes at least"
    )
    return parser.parse_args()


def digest(model: torch.nn.Module) -> str:
    """Return a digest that is equal for equal parameters, bit by bit."""
    content = xxhash.xxh3_64()
    for _, value in sorted(model.state_dict().items()):
        content.update(value.cpu().numpy().tobytes())
    return content.hexdigest()


def main() -> None:
    args, device = options(), current_device()
    train_data, test_data, mlp = mnist_on_mlp_model(args.data, args.seed)

    fleet.init(is_collective=True)
    rank, world = fleet.worker_index(), fleet.worker_num()
    model = fleet.distributed_model(mlp.to(device))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=args.lr))
    sampler = ElasticBatchSampler(len(train_data), args.batch_size, rank=rank, trainers=world, seed=args.seed)
    loader = DataLoader(train_data, batch_sampler=sampler)

    if fleet.load_checkpoint(args.dir, model, optimizer, sampler=sampler) is not None:
        print(f"resumed at step {fleet.resume_step()}", flush=True)
    step = start = fleet.resume_step()
    notice = None
    while step < args.steps and notice is None:
        for x, y in sampler.batches(loader):
            step += 1
            began = time.monotonic()
            cost = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device), reduction="sum")
            # DDP takes the mean over trainers. This makes it the mean over the job's batch.
            optimizer.minimize(cost * world / args.batch_size)
            if step in (start + 1, args.steps) or step % args.print_every == 0:
                report(step, float(cost.detach()) / len(y))
            time.sleep(max(0.0, began + args.step_time - time.monotonic()))
            notice = fleet.stop_requested(signals=[signal.SIGUSR1])  # all ranks get it at the same step
            if notice is not None or step == args.steps:
                break
            if step % args.save_every == 0:
                fleet.save_checkpoint(args.dir, step, model, optimizer, sampler=sampler)

    fleet.save_checkpoint(args.dir, step, model, optimizer, sampler=sampler)
    if notice is not None:
        print(f"stopped at step {step}: {notice.why}, {notice.seconds_left:.1f} s left", flush=True)
    elif fleet.is_first_worker():
        print(f"test accuracy: {test_accuracy(model, test_data, device):.4f}", flush=True)
        print(f"done at step {step}: parameters {digest(mlp)}", flush=True)


def report(step: int, loss: float) -> None:
    restarts = os.environ.get("PADDLE_RESTART_COUNT", "0")
    print(f"step {step} loss {loss:.6f} world {fleet.worker_num()} restarts {restarts}", flush=True)


if __name__ == "__main__":
    main()
