"""Run `python -m trainers.inference_server SETTINGS`, the process that `fleetrun serve` becomes."""

from __future__ import annotations

import asyncio
import os
import sys

from trainers.errors import FleetError
from trainers.inference_server.server import serve
from trainers.inference_server.settings import ServeSettings


def main() -> None:
    try:
        asyncio.run(serve(ServeSettings.decode(sys.argv[1])))
    except (FleetError, OSError) as error:
        sys.stderr.write(f"fleetrun: error: {error}\n")
        sys.exit(1)
    sys.stdout.flush()
    os._exit(0)  # all work is done, and tearing down torch takes a second


if __name__ == "__main__":
    main()
