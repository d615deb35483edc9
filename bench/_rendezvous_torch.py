"""torch.distributed.elastic's dynamic rendezvous (c10d) for N simulated nodes: threads of one process, a
TCPStore client each, all on this machine. Prints one JSON object.

    python _rendezvous_torch.py NODES
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import uuid
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

PATIENCE = 300.0
# Or every node but one waits for a store at the made-up address of the first.
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"


class Nodes:
    def __init__(self, count: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.errors: list[str] = []
        self._count = count
        self._shared = (f"127.0.0.1:{port}", uuid.uuid4().hex)
        self._handlers: list[Any] = [None] * count
        self._make(0)  # the one that serves the store
        self._each(self._make, range(1, count))

    def join(self) -> float:
        """Seconds until every node has its rank."""
        gate = threading.Barrier(self._count + 1)
        began = [0.0]

        def next_rendezvous(number: int) -> None:
            gate.wait()
            try:
                self._handlers[number].next_rendezvous()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is shown in the table
                self.errors.append(repr(error)[:200])

        def start() -> None:
            gate.wait()
            began[0] = time.monotonic()

        self._each(next_rendezvous, range(self._count), start)
        return time.monotonic() - began[0]

    def _make(self, number: int) -> None:
        endpoint, run_id = self._shared
        parameters = RendezvousParameters(
            "c10d", endpoint, run_id, self._count, self._count, local_addr=f"node{number}",
            is_host=str(number == 0).lower(),
        )  # fmt: skip
        backend, store = create_backend(parameters)
        self._handlers[number] = create_handler(store, backend, parameters)

    def _each(self, target: Any, numbers: range, start: Any = lambda: None) -> None:
        threads = [threading.Thread(target=target, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        start()
        for thread in threads:
            thread.join(PATIENCE)
            if thread.is_alive():
                self.errors.append(f"not within {PATIENCE:g} s")


def main() -> None:
    logging.disable(logging.CRITICAL)
    nodes = Nodes(int(sys.argv[1]))
    cpu = time.process_time()
    seconds = nodes.join()
    print(json.dumps({"met": seconds, "cpu": time.process_time() - cpu, "errors": nodes.errors}), flush=True)
    os._exit(0)  # its threads need not end well


if __name__ == "__main__":
    main()
