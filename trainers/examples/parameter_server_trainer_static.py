"""Train an MLP on handwritten digits on parameter servers in static style.

Training is asynchronous, or synchronous with --sync.

    fleetrun --worker_num 2 --server_num 2 trainers/examples/parameter_server_trainer_static.py
    fleetrun --server_num=1 --trainer_num=2 -m trainers.examples.parameter_server_trainer_static --data DIR
"""

import torch

from trainers import fleet, static
from trainers.examples.mnist import batches, feeds, mnist_on_mlp_model, network, options, tested


def main() -> None:
    parser = options("Parameter-server training of an MLP on digits, in static style", epochs=30)
    parser.add_argument("--sync", action="store_true", help="let all trainers step together")
    args = parser.parse_args()
    train_data, test_data, mlp = mnist_on_mlp_model(args.data, args.seed)

    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = not args.sync
    adam = torch.optim.Adam(mlp.parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(adam, strategy)
    model = fleet.distributed_model(mlp)
    program = static.Program(model, feeds(train_data), network, loss="cost", optimizer=optimizer)

    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        exe = static.Executor("cpu")
        fleet.init_worker()

        for _, data in batches(args, train_data):
            cost_val, acc_val = exe.run(program, feed=data, fetch_list=["cost", "acc"])
            print(f"loss: {cost_val}, acc: {acc_val}", flush=True)
        fleet.stop_worker()
        if fleet.is_first_worker():
            print(f"test accuracy: {tested(exe, program, test_data):.4f}", flush=True)


if __name__ == "__main__":
    main()
