"""What the person asked for: one frozen value, whose fields are the options. Knows no process and no machine.

Each option is declared once, here: default, parser, variables, help. `resolve.py` makes the value out of a
command line and an environment, `usage.py` prints the help.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from fleetrun.envs import addresses, values
from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.options import COLLECTIVE, HETER, PROCESSES, SERVERS, Group, Takes, of, option, switch
from fleetrun.envs.wishes import RoleWish, Variables
from fleetrun.frozen import dataclass, field

DEVICE_KINDS = {"gpus": "gpu", "selected_gpus": "gpu", "xpus": "xpu", "selected_xpus": "xpu", "npus": "npu"}
"""The spellings of --devices that also say what kind of device."""

PREFIXES = {"elastic_server": "etcd://", "PADDLE_ELASTIC_SERVER": "etcd://"}
"""Where a value is written shorter than under the option's own name."""

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DISPLAYS = ("auto", "live", "plain", "json", "quiet")
_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl", "hccl")

_job = partial(option, group=Group.JOB)
_process = partial(option, group=Group.PROCESSES)
_server = partial(option, group=Group.SERVERS, modes=SERVERS)
_servers = partial(_server, makes=Mode.PS)
_heter = partial(option, group=Group.SERVERS, modes=HETER, makes=Mode.PS_HETER)
_network = partial(option, group=Group.NETWORK)
_failure = partial(option, group=Group.FAILURE)
_log = partial(option, group=Group.LOGS)
_machine = partial(option, group=Group.MACHINES)
_monitor = partial(option, group=Group.MONITORING)
_engine = partial(option, group=Group.ENGINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """Every option under its own name, typed and checked. `None` and empty tuples mean: not given.

    Times are seconds, sizes bytes. Endpoints are `host:port`. In ps modes without endpoint lists,
    `server_num` and `trainer_num` are numbers; in ps-heter, `heter_devices` has an entry for each stage after
    the trainers'. `environment` and `roles` are those of a job file, which no option can say; `script_filed`:
    it says the script too, and goes along to other machines.
    """

    script: str
    script_args: tuple[str, ...] = ()
    script_filed: bool = False
    environment: Variables = ()
    roles: tuple[RoleWish, ...] = ()

    # A table, set by hand: one argument per line would make it three times as long.
    # fmt: off
    run_mode: Mode = _job(
        Mode.COLLECTIVE, values.run_mode, "MODE", choices=tuple(map(str, Mode)), env=("PADDLE_RUN_MODE",),
        help="How the processes work together.",
        shown_default="ps when servers or trainers are given, else collective")
    module: bool = switch(
        False, group=Group.JOB, short="-m", help="SCRIPT is a module, as in python -m.")
    no_python: bool = switch(
        False, group=Group.JOB, help="SCRIPT is a program, even if its name ends in .py.")
    job_id: str = _job(
        "default", values.job_id, "NAME", env=("PADDLE_JOB_ID", "PADDLE_ELASTIC_JOB_ID"),
        help="Name of the job; the names of its log files begin with it.")
    backend: str = _job(
        "auto", values.choice(*_BACKENDS), "NAME", choices=_BACKENDS, env=("PADDLE_DISTRI_BACKEND",),
        modes=COLLECTIVE,
        help="What collectives run on; auto: nccl on GPUs, else gloo.")
    config: str | None = _job(
        None, values.nonempty, "FILE",
        help="Job file: options that were not typed and have no variable. See `fleetrun init`.")
    timeout: float | None = _job(
        None, values.seconds, "TIME", env=("FLEETRUN_TIMEOUT",),
        help="Stop a job that takes longer, with exit code 124.")

    nproc_per_node: int | str | None = _process(
        None, values.count_or_word("auto", "gpu", "cpu"), "N", env=("PADDLE_NPROC_PER_NODE",),
        modes=PROCESSES,
        help="Number of processes on this machine. gpu: one per GPU; cpu: one per core; auto: gpu if "
             "there is one, else cpu.",
        shown_default="one per device, 1 without devices")
    devices: tuple[str, ...] = _process(
        (), values.device_list, "LIST", aliases=tuple(DEVICE_KINDS), env=("PADDLE_DEVICES",),
        help="Devices to use, as 0,1 or by UUID. Numbers count within CUDA_VISIBLE_DEVICES.",
        shown_default="all visible ones")
    device_kind: str = "gpu"
    visible_devices: str = _process(
        "node", values.choice("node", "process"), "WHOSE", choices=("node", "process"),
        env=("FLEETRUN_VISIBLE_DEVICES",),
        help="What a process sees: the devices of its node, with LOCAL_RANK as index, or only its own.")

    server_num: int | None = _servers(
        None, values.count_or_none, "N", env=("PADDLE_SERVER_NUM",),
        help="Number of servers on this machine.", shown_default="1 in ps modes")
    trainer_num: int | None = _servers(
        None, values.count_or_none, "N", aliases=("worker_num",), env=("PADDLE_TRAINER_NUM",),
        help="Number of trainers on this machine.", shown_default="1 in ps modes")
    servers: tuple[str, ...] = _servers(
        (), addresses.endpoint_list, "LIST", env=("PADDLE_SERVERS_ENDPOINTS",),
        help="Endpoints of the servers, as host:port,host:port. Goes with --trainers.")
    trainers: tuple[str, ...] = _servers(
        (), addresses.trainer_list, "LIST", aliases=("workers",), env=("PADDLE_TRAINERS_ENDPOINTS",),
        help="Endpoints of the trainers. Hosts without ports get 6170 + number of servers and upwards.")
    coordinator_num: int | None = _servers(
        None, values.count, "N", help="Number of coordinators.")
    coordinators: tuple[str, ...] = _servers(
        (), addresses.endpoint_list, "LIST", help="Endpoints of the coordinators.")
    heter_worker_num: tuple[int, ...] = _heter(
        (), values.stage_counts, "N;N",
        help="Number of heter workers, by stage after the trainers. Makes the mode ps-heter.")
    heter_workers: tuple[tuple[str, ...], ...] = _heter(
        (), addresses.stage_endpoints, "LIST;LIST", help="Endpoints of the heter workers, by stage.")
    heter_devices: tuple[str, ...] = _heter(
        (), values.stage_devices, "KIND;KIND",
        help="cpu, gpu, xpu or npu for each stage of heter workers.", shown_default="gpu")
    with_gloo: int = _server(
        0, values.whole(0, 2), "0|1|2", env=("PADDLE_WITH_GLOO",), help="PADDLE_WITH_GLOO of the processes.")
    gloo_port: int = _server(
        6767, addresses.port, "PORT", env=("PADDLE_GLOO_PORT",),
        help="Port of the Gloo service with --servers.")
    http_port: int | None = _server(
        None, addresses.port, "PORT",
        help="Port of the Gloo service with --server_num.", shown_default="a free port")

    host: str | None = _network(
        None, addresses.host, "ADDRESS", env=("POD_IP",),
        help="Address of this machine.", shown_default="127.0.0.1; with several the one to --master")
    start_port: int | None = _network(
        None, addresses.port, "PORT", env=("PADDLE_START_PORT", "FLAGS_START_PORT"),
        help="Use the ports from this one upwards.", shown_default="free ports")
    port_range: tuple[int, int] | None = _network(
        None, addresses.port_range, "LOW:HIGH", env=("PORT_RANGE",),
        help="Use free ports of this range.", shown_default="any")
    master_addr: str | None = _network(
        None, addresses.host, "ADDRESS", modes=COLLECTIVE,
        help="MASTER_ADDR of the trainers. With several machines (torchrun's custom): where they meet.",
        shown_default="that of the first machine")
    master_port: int | None = _network(
        None, addresses.port, "PORT", modes=COLLECTIVE,
        help="MASTER_PORT of the trainers.", shown_default="a free port")

    max_restart: int = _failure(
        3, values.whole(0, 1_000_000), "N", aliases=("max_restarts",), env=("PADDLE_MAX_RESTART",),
        help="How many failures are answered with a restart; 0: none.")
    stop_timeout: float = _failure(
        10.0, values.seconds, "TIME", env=("FLEETRUN_STOP_TIMEOUT",), help="From SIGTERM to SIGKILL.",
        shown_default="10s")
    hang_timeout: float | None = _failure(
        None, values.seconds, "TIME", env=("FLEETRUN_HANG_TIMEOUT",),
        help="When no trainer prints or reports progress for so long: write the stacks of all processes into "
             "their logs, then restart or fail (124).", shown_default="never")
    elastic_pre_hook: str | None = _failure(
        None, values.shell_words, "COMMAND", help="Command to run before each start, without a shell.")

    log_dir: str = _log(
        "log", values.nonempty, "DIR", env=("PADDLE_LOG_DIR",),
        help="Where the output of the processes goes.")
    log_level: str = _log(
        "INFO", values.choice(*_LEVELS, also={"warn": "WARNING", "fatal": "CRITICAL"}), "LEVEL",
        choices=_LEVELS, env=("PADDLE_LOG_LEVEL",),
        help="What fleetrun itself says.")
    log_overwrite: bool = switch(
        False, group=Group.LOGS, takes=Takes.BOOLEAN, env=("PADDLE_LOG_OVERWRITE",),
        help="Delete the logs of earlier runs of this job first.")
    log_rotate: int | None = _log(
        None, values.size, "SIZE", env=("FLEETRUN_LOG_ROTATE",),
        help="Keep only the newest output, about this much of each process, as 100M.", shown_default="all")
    follow: tuple[values.FollowRule, ...] = _log(
        ((Role.TRAINER, (0,)),), values.follow, "WHAT", env=("FLEETRUN_FOLLOW",), repeats=True,
        help="Output to show: all, none, or roles (trainer, ps, heter, coordinator, evaluator) with or "
             "without numbers, as trainer:0,1+ps.",
        shown_default="trainer:0")
    display: str = _log(
        "auto", values.choice(*DISPLAYS), "HOW", choices=DISPLAYS, env=("FLEETRUN_DISPLAY",),
        help="live: a line at the foot of the terminal says how the job stands; plain: lines only; json: one "
             "event a line on stdout; quiet: errors only. auto: live on a terminal, else plain.")
    enable_gpu_log: bool = switch(
        True, group=Group.LOGS, takes=Takes.BOOLEAN,
        help="Log the state of the GPUs; --enable_gpu_log=0: do not.", shown_default="on")
    dry_run: bool = switch(
        False, group=Group.LOGS, help="Print what would be started, and start nothing.")
    json: bool = switch(
        False, group=Group.LOGS, help="With --dry_run: print one JSON document.")
    save: str | None = _log(
        None, values.nonempty, "FILE", help="With --dry_run: write the options as a job file.")

    tensorboard: str | None = _monitor(
        None, values.nonempty, "DIR", env=("FLEETRUN_TENSORBOARD",),
        help="Write what trainers report as TensorBoard event files.")
    metrics_port: int | None = _monitor(
        None, values.whole(0, 65535), "PORT", env=("FLEETRUN_METRICS_PORT",),
        help="Serve Prometheus metrics of the job; 0: at a free port, which is told.")
    metrics_host: str = _monitor(
        "127.0.0.1", addresses.host, "ADDRESS", env=("FLEETRUN_METRICS_HOST",),
        help="Address at which --metrics_port listens.")

    nnodes: tuple[int, int] = _machine(
        (1, 1), addresses.node_range, "N|MIN:MAX", aliases=("np",),
        env=("PADDLE_NNODES", "PADDLE_ELASTIC_NP"),
        help="Number of machines. MIN:MAX: the job goes on while they come and go.", shown_default="1")
    ips: tuple[str, ...] = _machine(
        (), addresses.host_list, "LIST", env=("PADDLE_IPS",),
        help="The machines, in the order of their ranks. They meet at the first.", shown_default="this one")
    master: str | None = _machine(
        None, addresses.meeting_point, "ADDRESS", aliases=("elastic_server",),
        env=("PADDLE_MASTER", "PADDLE_ELASTIC_SERVER"),
        help="Where machines meet: host:port (the launcher there serves it) or etcd://host:port,...",
        shown_default="this machine says")
    rank: int = _machine(
        -1, values.whole(-1, 65534), "N", aliases=("node_rank",), env=("PADDLE_RANK",),
        help="Rank of this machine; -1: any.")
    sort_ip: bool = switch(
        False, group=Group.MACHINES, takes=Takes.BOOLEAN, env=("PADDLE_SORT_IP",),
        help="Rank machines by address.")
    nic: str | None = _machine(
        None, values.nonempty, "NAME", env=("FLEETRUN_NIC",),
        help="Network interface whose address is this machine's.", shown_default="the one to --master")
    rdzv_timeout: float = _machine(
        600.0, values.seconds, "TIME", env=("FLEETRUN_RDZV_TIMEOUT",),
        help="How long to wait for the machines at the start.", shown_default="10m")
    heartbeat_timeout: float = _machine(
        10.0, values.seconds_from(2.0), "TIME", env=("FLEETRUN_HEARTBEAT_TIMEOUT",),
        help="How long a machine may be silent before it counts as lost; 2 s or more.", shown_default="10s")
    elastic_level: int = _machine(
        -1, values.whole(-1, 1), "LEVEL",
        env=("PADDLE_ELASTIC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL"),
        help="When a machine is lost: -1: end the job; 0: hold for another in its place, also for one whose "
             "process failed; 1: go on with those that are left, if enough.",
        shown_default="-1; 1 with MIN:MAX")
    elastic_timeout: float = _machine(
        30.0, values.seconds, "TIME", env=("PADDLE_ELASTIC_TIMEOUT",),
        help="How long to wait for more machines, or for another in place of a lost one.",
        shown_default="30s")
    token_file: str | None = _machine(
        None, values.nonempty, "FILE", env=("FLEETRUN_TOKEN_FILE",),
        help="File with the job's secret, 16 characters or more: who has it may take part, others may not, "
             "and what machines say is encrypted. FLEETRUN_TOKEN can hold the secret itself.")

    scheduler: str = _engine(
        "local", values.choice("local", "slurm", "srun", "kubernetes", "ssh"), "ENGINE",
        choices=("local", "slurm", "srun", "kubernetes", "ssh"), env=("FLEETRUN_SCHEDULER",),
        help="Hand the job to an engine that starts fleetrun on the machines.")
    scheduler_option: tuple[str, ...] = _engine(
        (), values.assignment, "NAME=VALUE", repeats=True,
        help="An option of the engine, as partition=gpu for slurm.")
    image: str | None = _engine(
        None, values.nonempty, "IMAGE", env=("FLEETRUN_IMAGE",),
        help="Container image, for --scheduler kubernetes.")

    legacy: bool = switch(
        False, group=Group.COMPATIBLE, takes=Takes.BOOLEAN,
        help="Only --legacy=0: there is one launcher here.")
    standalone: bool = switch(
        False, group=Group.COMPATIBLE, help="As torchrun's: one machine, which is what it is anyway.")
    # fmt: on

    def wish(self, role: Role) -> RoleWish:
        """What a job file says of the processes of this role."""
        return next((each for each in self.roles if each.role is role), RoleWish(role=role))


OPTIONS = of(LaunchSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings, and what to tell about them.

    `origins` says where a setting came from: `--trainer_num` as it was typed, or `PADDLE_NNODES`; a default
    is absent. `notices` are one-line remarks for the console. `words` has each of them as one word of a
    command line; `engine` names those that an engine said.
    """

    settings: LaunchSettings
    origins: Mapping[str, str]
    notices: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    engine: frozenset[str] = frozenset()
