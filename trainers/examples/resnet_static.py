"""Train ResNet-50 data parallel in static style, with a step that is declared once and then fed.

The losses are equal to those from resnet_dygraph.

    fleetrun --gpus 0,1 trainers/examples/resnet_static.py --data DIR
    fleetrun --nproc_per_node 2 -m trainers.examples.resnet_static --layers 18 --image_size 64 --steps 20
"""

import torch
from torch import Tensor

from trainers import fleet, static
from trainers.collective.group import current_device
from trainers.examples.resnet_common import batches, optimizer_setting, options, report, resnet
from trainers.metrics import topk_accuracy


def network(model: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    out = model(x)
    return {
        "avg_cost": torch.nn.functional.cross_entropy(out, y),
        "acc_top1": topk_accuracy(out, y, k=1),
        "acc_top5": topk_accuracy(out, y, k=5),
    }


def train_resnet() -> None:
    parser = options("ResNet on pictures, data parallel, in static style")
    parser.add_argument("--compile", action="store_true", help="compile with torch.compile")
    args, device = parser.parse_args(), current_device()
    image = static.data(name="x", shape=[None, 3, args.image_size, args.image_size], dtype="float32")
    label = static.data(name="y", shape=[None], dtype="int64")

    strategy = fleet.DistributedStrategy()
    fleet.init(is_collective=True, strategy=strategy)
    net = resnet(args).to(device)
    optimizer = fleet.distributed_optimizer(optimizer_setting(net.parameters(), args.lr))
    model = fleet.distributed_model(net)
    program = static.Program(
        model, [image, label], network, loss="avg_cost", optimizer=optimizer, compile=args.compile
    )

    exe = static.Executor(device)
    rank, world = fleet.worker_index(), fleet.worker_num()
    for epoch, batch_id, data in batches(args, rank=rank, trainers=world):
        loss, acc1, acc5 = exe.run(program, feed=data, fetch_list=["avg_cost", "acc_top1", "acc_top5"])
        report(epoch, batch_id, loss, acc1, acc5)


if __name__ == "__main__":
    train_resnet()
