"""Hold the settings of `fleetrun serve` in one frozen value, sent to the server and its workers as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from fleetrun.frozen import frozen_by_name


@frozen_by_name
class ServeSettings:
    """The settings of a server. Sizes are in bytes, and times in seconds.

    `fleetrun` is its version. `bundle` is a directory or URL. A `port` or `grpc_port` of 0 takes a free port,
    and a `grpc_port` of None turns gRPC off. `threads` is torch's number in each worker. `cache` is the
    directory of the files that workers share. `follow` is a published directory or URL, checked every
    `poll_s`, or "" for none.

    `max_body` and `max_rows` limit a request. `max_batch_rows` limits requests computed together, and 0
    computes each alone. `max_waiting` limits waiting requests in one worker. `keepalive_s` limits a
    connection without a request. A request of `slow_s` is logged.
    """

    fleetrun: str
    bundle: str
    name: str
    host: str
    port: int
    grpc_port: int | None
    workers: int
    threads: int
    cache: str
    follow: str
    poll_s: float
    max_body: int
    max_rows: int
    max_batch_rows: int
    max_waiting: int
    timeout_s: float
    keepalive_s: float
    grace_s: float
    slow_s: float

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ServeSettings:
        return cls(**json.loads(text))
