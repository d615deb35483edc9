"""What `fleetrun serve` was told: one frozen value, which crosses to the server and its workers as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from fleetrun.frozen import frozen_by_name


@frozen_by_name
class ServeSettings:
    """`fleetrun`: its version; `bundle`: folder or URL; `port` 0: any free one; `grpc_port` as well,
    None: no gRPC; `threads`: of torch in each
    worker; `cache`: where the files that workers share are; `follow`: a published folder or
    URL, "": none, looked at every `poll_s`; `max_body`: bytes of a request; `max_rows`: of a
    request; `max_batch_rows`: of requests that are computed together, 0: each alone; `max_waiting`: requests
    in one worker; `keepalive_s`: of a connection without a request.
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

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ServeSettings:
        return cls(**json.loads(text))
