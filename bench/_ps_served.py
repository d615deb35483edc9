"""A server of the parameter server in a process of its own, and its one trainer here, message by message.

    python bench/_ps_served.py --endpoint 127.0.0.1:4000 [--durability none] [--log_fsync no] [--keep FOLDER]
        [--publish FOLDER]

serves until its trainer leaves. With FLEETRUN_TOKEN in the environment both sides encrypt.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

from fleetrun.envs.progress_report import encode_reports
from trainers.ps.client import Client, PendingReplies, Request
from trainers.ps.configs import DURABILITIES, LOG_FSYNCS, PsConfigs
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.server.table_meter import Numbers
from trainers.ps.tables import run
from trainers.ps.tables.spec import TableSpec, describe_job
from trainers.ps.tables.warm import warm_up_server
from trainers.ps.transport import TOKEN, keys_of
from trainers.ps.wire import Field, Kind, Message, Part, bytes_part


class Served:
    """Tables of these specs, numbered from 0, of a new server; leaving the `with` block ends it."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        assigned: Sequence[Part] = (),
        options: Sequence[str] = (),
        token: str = "",
    ) -> None:
        endpoint = free_endpoint()
        command = [sys.executable, str(Path(__file__)), "--endpoint", endpoint, *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", TOKEN: token}
        self._process = subprocess.Popen(command, env=environment)
        self.client = Client([endpoint], 0, PsConfigs(), keys=keys_of({TOKEN: token}), first_retry_s=10.0)
        words = bytes_part(Field.TEXT, describe_job(False, 1, 1, 0).encode())
        self.ask(
            Kind.HELLO,
            words,
            *(bytes_part(Field.SPEC, spec.encode(), number) for number, spec in enumerate(specs)),
        )
        self.ask(Kind.ASSIGN, *assigned)
        self.ask(Kind.READY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.ask(Kind.LEAVE)
            self._process.wait(60)
        finally:
            self._process.kill()
            self.client.close()

    def send(self, kind: Kind, *parts: Part) -> PendingReplies:
        return self.client.send([Request(server=0, kind=kind, parts=parts)])

    def ask(self, kind: Kind, *parts: Part) -> Message:
        (reply,) = self.client.wait(self.send(kind, *parts))
        return reply

    def cpu(self) -> float:
        """Seconds that all threads of the server have worked."""
        return cpu_of(self._process.pid)


def cpu_of(process: int) -> float:
    """Seconds that all threads of a process have worked, to the nanosecond."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"127.0.0.1:{held.getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--durability", choices=DURABILITIES, default="none")
    parser.add_argument("--log_fsync", choices=LOG_FSYNCS, default="no")
    parser.add_argument("--snapshot_interval_s", type=float, default=300.0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--publish", default="")
    parser.add_argument("--publish_interval_s", type=float, default=10.0)
    parser.add_argument("--publish_dtype", default="")
    parser.add_argument("--uncounted", action="store_true", help="count no requests of tables")
    parser.add_argument("--report", action="store_true", help="report tables, to nobody")
    options = parser.parse_args()
    environ: Mapping[str, str] = os.environ
    torch.set_num_threads(1)
    warm_up_server()
    configs = PsConfigs(
        durability=options.durability,
        log_fsync=options.log_fsync,
        snapshot_interval_s=options.snapshot_interval_s,
        publish=options.publish,
        publish_interval_s=options.publish_interval_s,
        publish_dtype=options.publish_dtype,
    )
    plan = ServerPlan(
        endpoints=[options.endpoint],
        index=0,
        trainers=1,
        sync=False,
        configs=configs,
        keys=keys_of(environ),
        durable_dir=options.keep,
    )
    if options.uncounted:
        run.Use = _no_use  # type: ignore[misc,assignment]
    Server(plan, _encode if options.report else None).run()


def _no_use(*_: object) -> None:
    """Instead of a `Use`."""


def _encode(server: Numbers, tables: Mapping[str, Numbers], hot: Mapping[str, Numbers]) -> bool:
    """As a report is sent, without the system call."""
    datagrams = [*encode_reports({"server": server}, tables, "tables"), *encode_reports({}, hot, "hot")]
    return bool(datagrams)


if __name__ == "__main__":
    main()


def table_line(cells: Sequence[str]) -> str:
    """A row of a markdown table."""
    return f"| {' | '.join(cells)} |"
