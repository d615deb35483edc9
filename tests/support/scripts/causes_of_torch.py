"""Makes torch fail for real, once for each name; prints JSON, name to traceback. /dev/shm has 1 MiB."""

import datetime
import io
import json
import os
import signal
import socket
import tempfile
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Killed(torch.utils.data.Dataset):
    def __init__(self, end):
        self.end = end

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.end()


def load(end):
    next(iter(DataLoader(Killed(end), num_workers=1)))


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, values):
        return self.used(values)


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def memory():
    torch.empty(1 << 50)


def shared_memory():
    load(lambda: torch.zeros(4 << 20))


def worker_killed():
    load(lambda: os.kill(os.getpid(), signal.SIGKILL))


def other_model():
    nn.Linear(2, 2).load_state_dict(nn.Linear(3, 3).state_dict())


def wrapped_model():
    nn.Linear(2, 2).load_state_dict(nn.ModuleDict({"module": nn.Linear(2, 2)}).state_dict())


def cut_short():
    torch.load(io.BytesIO(saved(torch.zeros(1000))[:500]))


def more_than_tensors():
    torch.load(io.BytesIO(saved(datetime.timedelta(1))))


def from_a_gpu():
    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)
    torch.load(io.BytesIO(saved(torch.zeros(1))))


def no_group():
    dist.all_reduce(torch.zeros(1))


def no_cuda():
    torch.zeros(1).cuda()


def unused_parameters():
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        model = DistributedDataParallel(TwoParts())
        for _ in range(2):
            model(torch.zeros(1, 1)).sum().backward()


def not_a_number():
    with torch.autograd.detect_anomaly(check_nan=True):
        values = torch.zeros(1, requires_grad=True)
        (values.sqrt() * 0).sum().backward()


def nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dist.TCPStore("127.0.0.1", port, 2, False, timeout=datetime.timedelta(seconds=1))


def port_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        dist.TCPStore("127.0.0.1", server.getsockname()[1], 1, True)


CAUSES = (
    memory, shared_memory, worker_killed, other_model, wrapped_model, cut_short, more_than_tensors, no_group,
    no_cuda, unused_parameters, not_a_number, nobody_listens, port_taken, from_a_gpu,
)  # fmt: skip
said = {}
for cause in CAUSES:
    try:
        cause()
        said[cause.__name__] = "it did not fail"
    except Exception:  # noqa: BLE001 - it is what the test is about
        said[cause.__name__] = traceback.format_exc()
print(json.dumps(said))
