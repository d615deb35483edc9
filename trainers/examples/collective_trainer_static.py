"""Train an MLP on handwritten digits, synchronously and data parallel, in static style.

fleetrun --gpus 0,1 trainers/examples/collective_trainer_static.py
fleetrun --nproc_per_node 2 -m trainers.examples.collective_trainer_static --data DIR
"""

import torch

from trainers import fleet, static
from trainers.collective.group import current_device
from trainers.examples.mnist import batches, feeds, mnist_on_mlp_model, network, options, report, tested


def main() -> None:
    args = options("Collective training of an MLP on digits, in static style", epochs=30).parse_args()
    train_data, test_data, mlp = mnist_on_mlp_model(args.data, args.seed)
    device = current_device()

    fleet.init(is_collective=True)
    strategy = fleet.DistributedStrategy()
    adam = torch.optim.Adam(mlp.to(device).parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(adam, strategy=strategy)
    model = fleet.distributed_model(mlp)
    program = static.Program(model, feeds(train_data), network, loss="cost", optimizer=optimizer)

    exe = static.Executor(device)
    for step, data in batches(args, train_data):
        loss_val, _acc_val = exe.run(program, feed=data, fetch_list=["cost", "acc"])
        if step == 1 or step % 20 == 0:
            report(step, loss_val)

    if fleet.is_first_worker():
        print(f"test accuracy: {tested(exe, program, test_data):.4f}", flush=True)


if __name__ == "__main__":
    main()
