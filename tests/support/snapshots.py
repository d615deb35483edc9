"""The snapshots of servers whose state is durable."""

import contextlib
import json
from pathlib import Path


def complete(server: Path) -> set[str]:
    """The names of those in the folder of a server that are complete."""
    found = set()
    for manifest in server.glob("snapshot-*/manifest.json"):
        with contextlib.suppress(FileNotFoundError):  # a newer one has replaced it
            found |= {save["id"] for save in json.loads(manifest.read_bytes())["saves"]}
    return found
