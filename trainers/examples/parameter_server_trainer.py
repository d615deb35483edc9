"""Train an MLP on handwritten digits on parameter servers, asynchronously, or synchronously with --sync.

fleetrun --worker_num 2 --server_num 2 trainers/examples/parameter_server_trainer.py
fleetrun --server_num=1 --trainer_num=2 -m trainers.examples.parameter_server_trainer --data DIR
"""

import torch

from trainers import fleet
from trainers.examples.mnist import batches, mnist_on_mlp_model, options, report, test_accuracy


def main() -> None:
    parser = options("Parameter-server training of an MLP on digits", epochs=30)
    parser.add_argument("--sync", action="store_true", help="let all trainers step together")
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

        cross_entropy = torch.nn.CrossEntropyLoss()
        for step, (x, y) in batches(args, train_data):
            cost = cross_entropy(model(x), y)
            optimizer.minimize(cost)
            report(step, cost.detach())
        fleet.stop_worker()
        if fleet.is_first_worker():
            accuracy = test_accuracy(model, test_data, torch.device("cpu"))
            print(f"test accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
