"""One trainer of three that shuffle their data sets across each other: writes what it has afterwards as JSON,
and what happens when one has other slots, or is gone. Arguments: rank, folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainers.data.dataset import InMemoryDataset
from trainers.data.exchange import Peers, default_peers
from trainers.data.slots import Slot
from trainers.errors import FleetError


def examples(dataset: InMemoryDataset) -> list[object]:
    found: list[object] = []
    for batch in dataset:
        bags, weights = batch.bag("bag"), batch.bag("weights")
        for i in range(len(batch)):
            bag = bags.values[bags.offsets[i] : bags.offsets[i + 1]].tolist()
            weight = weights.values[weights.offsets[i] : weights.offsets[i + 1]].tolist()
            found.append([batch.tensor("id")[i].item(), batch.tensor("dense")[i].tolist(), bag, weight])
    return found


def loaded(*paths: Path, other: bool = False) -> InMemoryDataset:
    dataset = InMemoryDataset()
    slots = [Slot("id"), Slot("other" if other else "dense", "float32", 2)]
    dataset.init(use_var=[*slots, Slot("bag", length=None), Slot("weights", "float32", None)], batch_size=7)
    dataset.set_filelist(paths)
    dataset.load_into_memory()
    return dataset


def failure(dataset: InMemoryDataset, group: Peers) -> list[str]:
    try:
        dataset.global_shuffle(group=group)
    except FleetError as error:
        return [type(error).__name__, str(error)]
    return []


def main(rank: int, folder: Path) -> None:
    path = folder / f"part-{rank}"
    dataset, other = loaded(path), loaded(path, other=rank == 1)
    dataset.global_shuffle("fleet")  # the job's own group, as a script has it
    first = examples(dataset)
    group = default_peers()
    assert group is not None
    dataset.global_shuffle(group=lambda: group)
    sizes = [
        dataset.get_memory_data_size(),
        dataset.get_shuffle_data_size(),
        dataset.get_memory_data_size("fleet"),
        dataset.get_shuffle_data_size(group),
    ]
    answer: dict[str, object] = {
        "first": first,
        "second": examples(dataset),
        "sizes": sizes,
        "other": failure(other, group),
    }
    fewer = loaded(*[path][rank:])  # of the first trainer only
    fewer.global_shuffle(group=group)
    answer["third"] = examples(fewer)
    if rank != 1:  # which is gone then
        answer["lost"] = failure(dataset, group)
    (folder / f"answer-{rank}").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
