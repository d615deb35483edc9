"""What the person asked for: one frozen value out of flags, environment and defaults. Knows no process and no port."""

from __future__ import annotations

from dataclasses import dataclass

from fleetrun.envs.contract import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Every option under its own name, typed and checked. `None` and empty tuples mean: not given.

    Times are seconds, sizes bytes. Endpoints are `host:port`.
    """

    script: str
    script_args: tuple[str, ...] = ()
    module: bool = False
    run_mode: Mode = Mode.COLLECTIVE
    job_id: str = "default"

    nnodes: tuple[int, int] = (1, 1)
    nproc_per_node: int | None = None
    devices: tuple[str, ...] = ()
    device_kind: str = "gpu"
    visible_devices: str = "node"
    backend: str = "auto"

    server_num: int | None = None
    trainer_num: int | None = None
    coordinator_num: int | None = None
    heter_worker_num: tuple[int, ...] = ()
    servers: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    coordinators: tuple[str, ...] = ()
    heter_workers: tuple[tuple[str, ...], ...] = ()
    heter_devices: tuple[str, ...] = ()
    with_gloo: int = 0
    gloo_port: int = 6767
    http_port: int | None = None

    host: str | None = None
    ips: tuple[str, ...] = ()
    start_port: int | None = None
    port_range: tuple[int, int] | None = None

    max_restart: int = 3
    stop_timeout: float = 10.0
    timeout: float | None = None
    elastic_pre_hook: str | None = None

    log_dir: str = "log"
    log_level: str = "INFO"
    log_overwrite: bool = False
    log_rotate: int | None = None
    follow: str = "trainer:0"
    enable_gpu_log: bool = True

    dry_run: bool = False
    json: bool = False
