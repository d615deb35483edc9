"""Train ResNet-50 data parallel, step by step in the script. This is Paddle's quick start.

fleetrun --gpus 0,1 trainers/examples/resnet_dygraph.py --data DIR
fleetrun --nproc_per_node 2 -m trainers.examples.resnet_dygraph --layers 18 --image_size 64 --steps 20
"""

import torch

from trainers import fleet
from trainers.collective.group import current_device
from trainers.examples.resnet_common import batches, optimizer_setting, options, report, resnet
from trainers.metrics import topk_accuracy


def train_resnet() -> None:
    args, device = options("ResNet on pictures, data parallel").parse_args(), current_device()
    fleet.init(is_collective=True)

    net = resnet(args).to(device)
    optimizer = fleet.distributed_optimizer(optimizer_setting(net.parameters(), args.lr))
    model = fleet.distributed_model(net)

    model.train()
    rank, world = fleet.worker_index(), fleet.worker_num()
    for epoch, batch_id, (img, label) in batches(args, rank=rank, trainers=world):
        img, label = img.to(device), label.to(device)
        out = model(img)
        avg_loss = torch.nn.functional.cross_entropy(out, label)
        acc_top1 = topk_accuracy(out, label, k=1)
        acc_top5 = topk_accuracy(out, label, k=5)

        avg_loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation
        optimizer.minimize(avg_loss)
        model.clear_gradients()  # type: ignore[operator]  # the wrapped model's
        report(epoch, batch_id, avg_loss.detach(), acc_top1, acc_top5)


if __name__ == "__main__":
    train_resnet()
