"""The embedded store in a process of its own, as the launcher that hosts it runs it.

    python _rendezvous_store.py LEASE

Prints where it listens. Ends when it is killed.
"""

from __future__ import annotations

import resource
import sys

from fleetrun.elastic.embedded.server import StoreServer
from fleetrun.elastic.store import Ledger
from fleetrun.pod.loop import Loop


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = Loop()
    server = StoreServer(Ledger(), loop, "127.0.0.1:0", job_id="bench", lease=float(sys.argv[1]))
    print(server.endpoint, flush=True)
    loop.run()


if __name__ == "__main__":
    main()
