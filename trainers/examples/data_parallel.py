"""Train ResNet-50 with torch's own optimizer and DataLoader.

Each process calls `init_parallel_env` and `DataParallel`, and reads a share of the data. This is Paddle's
quick start of data parallel training.

    fleetrun --gpus 0,1 trainers/examples/data_parallel.py --data DIR
    fleetrun --nproc_per_node 2 -m trainers.examples.data_parallel --layers 18 --image_size 64 --steps 20
"""

import torch

import trainers
from trainers.collective.group import current_device
from trainers.examples.resnet_common import batches, optimizer_setting, options, report, resnet
from trainers.metrics import topk_accuracy


def train_resnet() -> None:
    parser = options("ResNet on pictures, DataParallel")
    parser.set_defaults(num_workers=2)
    args, device = parser.parse_args(), current_device()
    trainers.init_parallel_env()

    net = resnet(args).to(device)
    optimizer = optimizer_setting(net.parameters(), args.lr)
    model = trainers.DataParallel(net)

    model.train()
    rank, world = trainers.get_rank(), trainers.get_world_size()
    for epoch, batch_id, (img, label) in batches(args, rank=rank, trainers=world):
        img, label = img.to(device), label.to(device)
        out = model(img)
        avg_loss = torch.nn.functional.cross_entropy(out, label)
        acc_top1 = topk_accuracy(out, label, k=1)
        acc_top5 = topk_accuracy(out, label, k=5)

        avg_loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation
        optimizer.step()
        model.clear_gradients()
        report(epoch, batch_id, avg_loss.detach(), acc_top1, acc_top5)


if __name__ == "__main__":
    train_resnet()
