"""Train an MLP on handwritten digits, synchronously and data parallel.

fleetrun --gpus 0,1 trainers/examples/collective_trainer.py
fleetrun --nproc_per_node 2 -m trainers.examples.collective_trainer --data DIR
"""

import torch

from trainers import fleet
from trainers.collective.group import current_device
from trainers.examples.mnist import batches, mnist_on_mlp_model, options, report, test_accuracy


def main() -> None:
    args, device = (
        options("Collective training of an MLP on digits", epochs=30).parse_args(),
        current_device(),
    )
    train_data, test_data, mlp = mnist_on_mlp_model(args.data, args.seed)

    fleet.init(is_collective=True)
    strategy = fleet.DistributedStrategy()
    model = fleet.distributed_model(mlp.to(device))
    adam = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(adam, strategy=strategy)

    cross_entropy = torch.nn.CrossEntropyLoss()
    for step, (x, y) in batches(args, train_data):
        cost = cross_entropy(model(x.to(device)), y.to(device))
        optimizer.minimize(cost)
        if step == 1 or step % 20 == 0:
            report(step, cost.detach())

    if fleet.is_first_worker():
        print(f"test accuracy: {test_accuracy(model, test_data, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
