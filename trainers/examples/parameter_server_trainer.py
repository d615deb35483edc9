"""Parameter-server training of an MLP on handwritten digits: asynchronous, or synchronous with --sync.

fleetrun --worker_num 2 --server_num 2 trainers/examples/parameter_server_trainer.py
fleetrun --server_num=1 --trainer_num=2 -m trainers.examples.parameter_server_trainer --data DIR
"""

import torch

from trainers import fleet
from trainers.data.shard import shard_loader
from trainers.examples.mnist import mnist_on_mlp_model, options, report, test_accuracy


def main() -> None:
    parser = options("Parameter-server training of an MLP on digits", epochs=30)
    parser.add_argument("--sync", action="store_true", help="all trainers step together")
    args = parser.parse_args()
    train_data, test_data, mlp = mnist_on_mlp_model(args.data, args.seed)

    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = not args.sync
    model = fleet.distributed_model(mlp)
    adam = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(adam, strategy)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        fleet.init_worker()

        train_dataloader = shard_loader(
            train_data,
            args.batch_size,
            rank=fleet.worker_index(),
            trainers=fleet.worker_num(),
            seed=args.seed,
        )
        cross_entropy = torch.nn.CrossEntropyLoss()
        step = 0
        for _ in range(args.epochs):
            for x, y in train_dataloader:
                if step == args.steps:
                    break
                step += 1
                cost = cross_entropy(model(x), y)
                optimizer.minimize(cost)
                report(step, cost.detach())
        fleet.stop_worker()
        if fleet.is_first_worker():
            accuracy = test_accuracy(model, test_data, torch.device("cpu"))
            print(f"test accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
