"""The `fleetrun serve` command answers requests with a saved model.

The runtime replaces this process and does the work.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import click

from fleetrun import __version__
from fleetrun.errors import LaunchError, UsageError
from fleetrun.host.cgroups import Groups
from fleetrun.host.interpreter import check_package, helper_command, helper_environment

_MODULE = "trainers.inference_server"
_PACKAGES = ("aiohttp", "prometheus_client")
_AT_LEAST_1 = click.IntRange(1)
_POSITIVE = click.FloatRange(0, min_open=True)


@click.command(context_settings={"show_default": True})
@click.argument("bundle")
@click.option(
    "--host", default="127.0.0.1", help="Address to listen on. 0.0.0.0: all addresses of this node."
)
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="Port for HTTP. 0: a free port.")
@click.option("--grpc_port", type=click.IntRange(0, 65535), help="Port for gRPC. 0: a free port.")
@click.option("--name", help="Name of the model, in paths and answers.  [default: the last word of BUNDLE]")
@click.option(
    "--workers", type=click.IntRange(1, 512), default=1, help="Number of processes that answer requests."
)
@click.option("--threads", type=_AT_LEAST_1, help="Threads of each worker.  [default: CPUs / workers]")
@click.option(
    "--cache",
    metavar="DIR",
    default="",
    show_default=False,
    help="Directory for the files that workers share.  [default: /dev/shm]",
)
@click.option(
    "--follow",
    metavar="URL",
    default="",
    show_default=False,
    help="Serve the newest version of this published directory.",
)
@click.option(
    "--poll", "poll_s", type=_POSITIVE, default=0.5, help="Seconds between two checks for a new version."
)
@click.option("--max_body", type=_AT_LEAST_1, default=16 << 20, help="Largest request, in bytes.")
@click.option("--max_rows", type=_AT_LEAST_1, default=4096, help="Largest request, in rows.")
@click.option(
    "--max_batch",
    "max_batch_rows",
    type=click.IntRange(0),
    default=1024,
    help="Rows of several requests to compute together. 0: compute each request alone.",
)
@click.option("--max_waiting", type=_AT_LEAST_1, default=256, help="Requests that may queue in each worker.")
@click.option(
    "--timeout", "timeout_s", type=_POSITIVE, default=10.0, help="Time limit of a request, in seconds."
)
@click.option(
    "--keepalive",
    "keepalive_s",
    type=_POSITIVE,
    default=75.0,
    help="Seconds that a connection without a request stays open. Set more than the limit of your proxy.",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0),
    default=30.0,
    help="Seconds that a stop waits for running requests.",
)
@click.option(
    "--slow", "slow_s", type=_POSITIVE, default=1.0, help="Seconds after which a request is logged as slow."
)
def command(
    bundle: str,
    name: str | None,
    grpc_port: int | None,
    workers: int,
    threads: int | None,
    **settings: object,
) -> None:
    """Serve an exported model. BUNDLE is the directory or URL that you passed to fleet.save_inference_model.
    The server uses the Open Inference Protocol version 2, over HTTP in JSON or binary, and over gRPC. After
    SIGTERM it answers the running requests and stops. After SIGHUP it loads the model again, and loses no
    request over HTTP.

    With --follow, the server uses the tables and dense parameters that a parameter-server job publishes
    (ps_configs publish), and changes to each new version when it is published.

    \b
    Examples:
      fleetrun serve served --port 8080
      fleetrun serve s3://bucket/served --workers 4 --host 0.0.0.0
      fleetrun serve served --follow s3://bucket/published

    \b
    Exit codes:
      0  a signal stopped the server
      1  the exported model or the port cannot be used
      2  the command line is wrong
    """
    for package in _PACKAGES:
        check_package(package, "fleetrun serve", "serve")
    if grpc_port is not None:
        check_package("grpc_tools", "fleetrun serve --grpc_port", "grpc")
    found = name or bundle.rstrip("/").rpartition("/")[2]
    if not re.fullmatch(r"[A-Za-z0-9._-]+", found):
        raise UsageError(
            f"{found!r} cannot be the name of the model", hint="Set --name to letters, digits, - _ and ."
        )
    settings |= {
        "fleetrun": __version__,
        "bundle": bundle,
        "name": found,
        "grpc_port": grpc_port,
        "workers": workers,
        "threads": threads or max(1, Groups().cores() // workers),
    }
    Path.cwd()  # torch cannot be loaded in a deleted directory
    words = helper_command(_MODULE, json.dumps(settings))
    sys.stdout.flush()
    try:
        os.execve(words[0], words, helper_environment())
    except OSError as error:
        raise LaunchError(f"{words[0]} cannot be started: {error.strerror}") from None
