"""Which trainers have the rows after training: `ps_rows_at_end all|first|none`."""

import sys
from collections.abc import Callable

import torch

from trainers import fleet
from trainers.errors import UsageError


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return "refused" if "rows_at_end" in str(error) else str(error)
    return "works"


def main() -> None:
    torch.set_num_threads(1)
    fleet.init()
    strategy = fleet.DistributedStrategy()
    strategy.ps_configs = {"rows_at_end": sys.argv[1]}
    table = torch.nn.Embedding(3000, 512, sparse=True)
    free = torch.nn.Embedding(9, 2, sparse=True, device="meta")
    dense = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(table.weight)
    model = fleet.distributed_model(torch.nn.ModuleDict({"a": table, "b": free, "c": dense}))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), strategy)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    fleet.init_worker()
    loss = table(torch.arange(3000)).sum() + free(torch.arange(2)).sum() + dense.weight.sum()
    optimizer.minimize(loss)
    whole = bool((model.state_dict()["a.weight"] == 0).all())
    fleet.stop_worker()
    calls = lambda: table(torch.arange(3)), model.state_dict, dense.state_dict
    rows = len(table.weight), bool((table.weight == 0).all())
    print(whole, *map(outcome, calls), *rows, dense.weight.numel(), flush=True)


if __name__ == "__main__":
    main()
