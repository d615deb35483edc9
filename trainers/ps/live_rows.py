"""Read rows of a running job by key, for `fleetrun tables show`.

`python -m trainers.ps.live_rows ENDPOINTS TABLE KEY...` sends the request to all servers, and one of them has
the row. If the environment holds the job's token, the connection is encrypted.

A server answers between two requests of trainers. It counts no pull, admits no key and changes no row.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import torch

from fleetrun.aliases import Document
from trainers.checks import nearest
from trainers.errors import UsageError
from trainers.ps.client import Client, to_all
from trainers.ps.configs import PsConfigs
from trainers.ps.saves.inspection import key_of, print_document
from trainers.ps.transport import keys_of
from trainers.ps.wire import NO_TRAINER, Field, Kind, Part, text_part

_WITHIN_S = 10.0


def live_rows(endpoints: Sequence[str], name: str, words: Sequence[str]) -> Document:
    """Return the row of each key, and its server. Raises FleetError."""
    keys = [key_of(word) for word in words]
    parts = (text_part(name), Part(0, Field.KEYS, torch.tensor(keys)))
    client = Client(endpoints, NO_TRAINER, PsConfigs(), keys=keys_of(os.environ), name="fleetrun tables")
    try:
        requests = to_all(len(endpoints), Kind.LOOK, 0, *parts)
        answers = [json.loads(reply.text) for reply in client.ask(requests, _WITHIN_S)]
    finally:
        client.close()
    if not any("rows" in each for each in answers):
        names = sorted({table for each in answers for table in each["tables"]})
        others = nearest(name, names) if names else "; the job has no sparse table"
        raise UsageError(f"The job has no sparse table {name!r}{others}")
    rows = {key: {"key": key, "state": "no row"} for key in keys}
    for server, answer in enumerate(answers):
        for key, row in zip(keys, answer.get("rows", ()), strict=False):
            if row["state"] != "no row":
                rows[key] = {"key": key, **row, "server": server}
    return {"table": name, "rows": list(rows.values())}


def main(argv: Sequence[str]) -> int:
    endpoints, name, *words = argv
    return print_document(lambda: live_rows(endpoints.split(","), name, words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
