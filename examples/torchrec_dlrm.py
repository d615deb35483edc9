"""Train TorchRec's DLRM on generated clicks with parameter servers.

    fleetrun --server_num=2 --trainer_num=2 examples/torchrec_dlrm.py

Six places differ from the same script for TorchRec's DistributedModelParallel. The comment `TorchRec:` has
the line that was there, or nothing where a line is new.
"""

import argparse
import os
from collections.abc import Iterator

import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from trainers import fleet  # TorchRec: from torchrec.distributed import DistributedModelParallel

FEATURES = [f"feature_{number}" for number in range(8)]
IDS, DENSE, DIM, BATCH = 1000, 4, 16, 256


class Clicks(torch.utils.data.IterableDataset):
    """Batches of clicks. Each id has an effect on the probability of a click."""

    def __init__(self, seed: int, batches: int) -> None:
        self.seed, self.batches = seed, batches
        self.effects = torch.randn(len(FEATURES), IDS, generator=torch.Generator().manual_seed(0))

    def __iter__(self) -> Iterator[Batch]:
        random = torch.Generator().manual_seed(self.seed)
        for _ in range(self.batches):
            ids = torch.randint(0, IDS, (len(FEATURES), BATCH), generator=random)
            dense = torch.rand(BATCH, DENSE, generator=random)
            logits = self.effects.gather(1, ids).sum(0) + dense.sum(1) - DENSE / 2
            labels = (torch.rand(BATCH, generator=random) < torch.sigmoid(logits)).int()
            lengths = torch.ones(ids.numel(), dtype=torch.int32)
            yield Batch(dense, KeyedJaggedTensor(FEATURES, ids.view(-1), lengths=lengths), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=400, help="batches of each trainer [%(default)s]")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate [%(default)s]")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cpu")
    fleet.init()  # TorchRec: torch.distributed.init_process_group("gloo")

    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=IDS, feature_names=[name])
        for name in FEATURES
    ]
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=DENSE,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[64, 1],
        dense_device=device,
    )
    train_model = DLRMTrain(dlrm)
    embeddings = dlrm.sparse_arch.parameters()
    apply_optimizer_in_backward(torch.optim.Adagrad, embeddings, {"lr": args.lr, "eps": 1e-8})
    model = fleet.distributed_model(train_model)  # TorchRec: model = DistributedModelParallel(train_model)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda some: torch.optim.Adagrad(some, lr=args.lr))
    optimizer = fleet.distributed_optimizer(optimizer)  # TorchRec:
    if fleet.is_server():  # TorchRec:
        fleet.init_server()  # TorchRec:
        fleet.run_server()  # TorchRec:
        return  # TorchRec:
    fleet.init_worker()  # TorchRec:

    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    clicks = Clicks(os.getpid(), args.batches)
    coming = iter(torch.utils.data.DataLoader(clicks, batch_size=None))
    losses = []
    for step in range(args.batches):
        loss, _, _ = pipeline.progress(coming)
        losses.append(float(loss))
        if step % 100 == 99:
            print(f"step {step + 1}: mean loss {sum(losses[-100:]) / 100:.4f}")


if __name__ == "__main__":
    main()
