"""The options of `fleetrun`, and the settings that only a job file can express.

Each option is declared once, as a field of `LaunchSettings`, with its default, parser, environment variables
and help. `resolve` builds the settings from a command line, an environment and a job file. `fleetrun.help`
prints the help.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from functools import partial
from typing import Any

from fleetrun import plugins
from fleetrun.aliases import Integers, Strings, Texts
from fleetrun.envs.contract import Mode, NodeLoss, Role
from fleetrun.envs.settings import parsing
from fleetrun.envs.settings.parsing import Parser, boolean, choice
from fleetrun.values import field, field_arguments, frozen, frozen_by_name, replace

COLLECTIVE = frozenset({Mode.COLLECTIVE})
PROCESSES = frozenset({Mode.COLLECTIVE, Mode.RPC})
SERVERS = frozenset({Mode.PS, Mode.PS_HETER})
HETER = frozenset({Mode.PS_HETER})
ANY = frozenset(Mode)


class Group(StrEnum):
    """The sections of `--help`, in this order. The last two appear in `fleetrun help`."""

    JOB = "What to run"
    PROCESSES = "Processes and devices"
    MACHINES = "Nodes"
    FAILURE = "Failures"
    OUTPUT = "Output"
    SERVERS = "Parameter servers"
    ENGINES = "Schedulers"
    OTHER = "Other"
    PADDLE = "As in Paddle"
    TORCHRUN = "As in torchrun"


PET = "PET_"
"""Prefix of torchrun's environment variables for its options."""


class Takes(Enum):
    """How an option uses the next word of the command line."""

    VALUE = 1
    NOTHING = 2
    # Takes only true, false, 1, 0, ... Both `--sort_ip x.py` and Paddle's `--sort_ip 1 x.py` therefore work.
    BOOLEAN = 3


@frozen_by_name
class Option:
    """One option, with its spellings, its environment variables, and the parser from text to value.

    `paddle` holds older spellings of Paddle, which `fleetrun help paddle` lists. `brief` describes the option
    in the short help, and is empty for options that the short help omits. `modes` are the modes in which the
    option has an effect. `makes` is the mode of a job that has the option and does not set a mode. `joint`
    joins the texts of an option that `repeats`. The value of a `secret` option is never shown, recorded, or
    passed on a command line. `plugs` is the kind of plug-ins whose names are also valid choices.
    """

    name: str = ""
    default: object = None
    parse: Parser
    group: Group
    help: str
    metavar: str = ""
    shown_default: str | None = None
    choices: Strings = ()
    aliases: Strings = ()
    paddle: Strings = ()
    short: str = ""
    brief: str = ""
    env: Strings = ()
    modes: frozenset[Mode] = ANY
    makes: Mode | None = None
    takes: Takes = Takes.VALUE
    repeats: bool = False
    joint: str = "+"
    secret: bool = False
    plugs: str = ""

    @property
    def all_choices(self) -> Strings:
        """The choices, with the names of installed plug-ins."""
        return (*self.choices, *plugins.others(self.plugs)) if self.plugs else self.choices

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def spellings(self) -> Strings:
        """All long spellings, without dashes."""
        return (self.name, *self.aliases, *self.paddle)

    @property
    def default_text(self) -> str:
        """The default as `--help` and the documentation write it."""
        if self.shown_default is not None:
            return self.shown_default
        return "none" if self.default in (None, ()) else str(self.default)


def option(default: object, parse: Parser | Strings, metavar: str, **rest: Any) -> Any:
    """Declare an option as a field, which also names it. `parse` may be a tuple of words to choose from."""
    if isinstance(parse, tuple):
        parse, rest = choice(*parse), {"choices": parse, **rest}
    described = Option(default=default, parse=parse, metavar=metavar, **rest)
    return field(default=default, metadata={"option": described})


def switch(group: Group, default: bool = False, **rest: Any) -> Any:
    """Declare an option that is true when given. `takes=Takes.BOOLEAN` also accepts a word."""
    return option(default, boolean, "", group=group, **({"takes": Takes.NOTHING} | rest))


def options_of(settings: type[object]) -> dict[str, Option]:
    """Return the options among the fields of a dataclass by name, in field order."""
    return {
        name: replace(arguments["metadata"]["option"], name=name)
        for name, arguments in field_arguments(settings).items()
        if "metadata" in arguments
    }


def _named(*options: Option) -> Mapping[str, Option]:
    return {each.name: each for each in options}


_bare = partial(Option, parse=boolean, takes=Takes.NOTHING)
ACTIONS = _named(
    _bare(
        name="help",
        short="-h",
        group=Group.OTHER,
        help="Show all options and commands; -h: the most common ones.",
    ),
    _bare(name="version", group=Group.OTHER, help="Show the version."),
    Option(
        name="show_completion",
        parse=choice("bash", "zsh", "fish"),
        group=Group.OTHER,
        metavar="SHELL",
        choices=("bash", "zsh", "fish"),
        help="Print the completion script of a shell.",
    ),
)
"""Options that replace the run by another action."""

SHORTHANDS = _named(
    _bare(
        name="verbose",
        short="-v",
        group=Group.OUTPUT,
        help="Short for --log_level DEBUG: also show all settings, environments and pids.",
    ),
    _bare(
        name="quiet",
        short="-q",
        group=Group.OUTPUT,
        help="Short for --log_level ERROR --display plain: show only the output of the script, and errors.",
    ),
    _bare(
        name="debug_on_error",
        group=Group.FAILURE,
        help="Short for --debug error: keep a failed process at its traceback, for `fleetrun debug`.",
    ),
    _bare(name="no_debug", group=Group.FAILURE, help="Short for --debug off: let `breakpoint()` fail."),
)
SHORT_FOR = {
    "verbose": {"log_level": "DEBUG"},
    "quiet": {"log_level": "ERROR", "display": "plain"},
    "debug_on_error": {"debug": "error"},
    "no_debug": {"debug": "off"},
}
"""The options that each shorthand sets. An option on the command line has priority."""


def by_spelling(options: Iterable[Option]) -> dict[str, Option]:
    """Return every spelling of each option: `two_words` for long ones (see `normal`), `-x` for short ones."""
    return {
        spelling: option for option in options for spelling in (*option.spellings, option.short) if spelling
    }


def normal(word: str) -> str:
    """Return `two_words` for both `--two-words` and `--two_words`."""
    return word.removeprefix("--").replace("-", "_")


_AUTO_PARALLEL = "is for Paddle's auto parallel mode, which fleetrun does not have. Remove it"

RETIRED: Texts = {
    "auto_tuner_json": "is for Paddle's auto tuner, which fleetrun does not have. Start a job per trial",
    "auto_parallel_config": _AUTO_PARALLEL,
    "auto_cluster_config": _AUTO_PARALLEL,
    "cluster_topo_path": _AUTO_PARALLEL,
    "rank_mapping_path": _AUTO_PARALLEL,
    "enable_auto_mapping": _AUTO_PARALLEL,
    "scale": "had no effect in Paddle either; use --nnodes MIN:MAX",
    "force": "had no effect in Paddle either. Remove it",
    "use_env": "is what fleetrun always does. Remove it",
}
"""Options of other launchers, each with the second half of a sentence about it."""

RETIRED_SCRIPTS: Texts = {
    "ipu": "'ipu' selects Graphcore devices in Paddle; fleetrun does not support them",
    "run_check": "'run_check' is Paddle's self-test; run fleetrun -m trainers.examples.collective_trainer",
}
"""Words that Paddle accepts in place of a script."""


# ---- Settings of a job file besides options

EnvironmentItems = tuple[tuple[str, str], ...]
"""Names and values, in the order of the file."""


def table_of(role: Role) -> str:
    return "roles.server" if role is Role.SERVER else f"roles.{role}"


@frozen_by_name
class RoleSettings:
    """The settings that differ for the processes of one role.

    If `script` is None, the role runs the job's script. If `args` is None too, the script gets the job's
    arguments. `threads` is OMP_NUM_THREADS.

    The remaining fields apply only to evaluators. `count` is their number, on every node (`each`) or on the
    first. `devices` are the devices of each node for evaluators.
    """

    role: Role
    where: str = ""
    script: str | None = None
    args: Strings | None = None
    module: bool = False
    no_python: bool = False
    environment: EnvironmentItems = ()
    threads: int | None = None
    count: int = 0
    each: bool = False
    devices: Strings = ()

    @property
    def table(self) -> str:
        """The name of the role's table in a job file, such as `roles.server`."""
        return table_of(self.role)


@frozen
class FileOption:
    """One option of a job file. `alias` is its name in the file, and `where` is file and line.

    An option that repeats has several texts.
    """

    option: Option
    alias: str
    texts: Strings
    where: str


@frozen_by_name
class JobFile:
    """The content of a job file, with its variables filled in.

    `places` maps every setting that is not an option to its file and line.
    """

    options: tuple[FileOption, ...] = ()
    script: str | None = None
    args: Strings = ()
    environment: EnvironmentItems = ()
    roles: tuple[RoleSettings, ...] = ()
    places: Texts = field(default_factory=dict)

    @property
    def typable(self) -> bool:
        """True if a command line can express the whole file."""
        return not self.environment and all(
            each == RoleSettings(role=each.role, where=each.where) for each in self.roles
        )


NOTHING = JobFile()


# ---- The options

DEVICE_KINDS = {"gpus": "gpu", "selected_gpus": "gpu", "xpus": "xpu", "selected_xpus": "xpu", "npus": "npu"}
"""The spellings of --devices that also name the kind of device."""

NOTIFY = "FLEETRUN_NOTIFY"
"""The environment variable of --notify."""

PREFIXES = {"elastic_server": "etcd://", "PADDLE_ELASTIC_SERVER": "etcd://"}
"""Spellings whose values lack a prefix of the option, and this prefix."""

_LOSS_VARIABLES = (
    "FLEETRUN_ON_NODE_LOSS",
    "PADDLE_ELASTIC_LEVEL",
    "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL",
)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
DISPLAYS = ("auto", "live", "plain", "json", "quiet")
_BACKENDS = ("auto", "nccl", "gloo", "mpi", "ucc", "xccl", "hccl")

_job = partial(option, group=Group.JOB)
_process = partial(option, group=Group.PROCESSES)
_machine = partial(option, group=Group.MACHINES)
_failure = partial(option, group=Group.FAILURE)
_output = partial(option, group=Group.OUTPUT)
_servers = partial(option, group=Group.SERVERS, modes=SERVERS, makes=Mode.PS)
_engine = partial(option, group=Group.ENGINES)
_paddle = partial(option, group=Group.PADDLE)
_heter = partial(_paddle, modes=HETER, makes=Mode.PS_HETER)


@frozen_by_name
class LaunchSettings:
    """Every option under its own name, typed and checked. `None` and empty tuples mean "not given".

    Times are in seconds, and sizes in bytes. Endpoints are `host:port`. In ps modes without endpoint lists,
    `server_num` and `trainer_num` are numbers. In ps-heter, `heter_devices` has an entry for each stage after
    the trainers. `environment` and `roles` come from a job file, because options cannot express them. If
    `script_in_job_file` is True, the job file also names the script, and other nodes get a copy of the file.
    """

    script: str
    script_args: Strings = ()
    script_in_job_file: bool = False
    environment: EnvironmentItems = ()
    roles: tuple[RoleSettings, ...] = ()

    # A table, set by hand, because one argument per line would triple its length.
    # fmt: off
    module: bool = switch(
        Group.JOB, short="-m", env=("PET_MODULE",), help="SCRIPT is a module, as in python -m.")
    no_python: bool = switch(
        Group.JOB, env=("PET_NO_PYTHON",),
        help="SCRIPT is a program, even if its name ends in .py.")
    config: str | None = _job(
        None, parsing.nonempty, "FILE",
        help="Job file. The command line and environment variables override it. See `fleetrun init`.")
    run_mode: Mode = _job(
        Mode.COLLECTIVE, parsing.run_mode, "MODE", choices=tuple(map(str, Mode)), env=("PADDLE_RUN_MODE",),
        help="How the processes exchange gradients.",
        shown_default="ps when servers or trainers are given, else collective")
    job_id: str = _job(
        "default", parsing.job_id, "NAME", env=("PADDLE_JOB_ID", "PADDLE_ELASTIC_JOB_ID"),
        help="Name of the job. The names of its log files start with it.")
    env: Strings = _job(
        (), parsing.variables, "NAME[=VALUE]", repeats=True,
        help="Set an environment variable for all processes: NAME=VALUE. NAME, or a pattern such as "
             "'NCCL_*', passes on variables of this shell. Patterns skip secrets, so give their NAME.")
    timeout: float | None = _job(
        None, parsing.seconds, "TIME", env=("FLEETRUN_TIMEOUT",),
        help="Stop the job after this time, with exit code 124.")
    watch: bool = switch(
        Group.JOB, modes=PROCESSES,
        help="Start all processes again when the script or one of its own modules changes on any node. A job "
             "that ends or fails waits for the next change. --max_restart is then 0 by default.")
    dry_run: bool = switch(
        Group.JOB, brief="print the plan, and start nothing",
        help="Print the commands, environments and ports of all processes, and start nothing.")
    json: bool = switch(
        Group.JOB,
        help="Print JSON: one document with --dry_run, else one event per line, like --display json.")
    save: str | None = _job(
        None, parsing.nonempty, "FILE", help="Save the settings as a job file for `fleetrun up`.")

    nproc_per_node: int | str | None = _process(
        None, parsing.count_or_word("auto", "gpu", "xpu", "cpu"), "N",
        env=("PADDLE_NPROC_PER_NODE", "PET_NPROC_PER_NODE"),
        modes=PROCESSES, brief="processes on this node [one per device, else 1]",
        help="Number of processes on this node. gpu, xpu: one per device; cpu: one per core; auto: gpu "
             "if the node has one, else cpu.",
        shown_default="one per device, or 1")
    devices: Strings = _process(
        (), parsing.device_list, "LIST", aliases=("gpus",),
        paddle=("selected_gpus", "xpus", "selected_xpus", "npus"), env=("PADDLE_DEVICES",),
        brief="devices to use, such as 0,1 [all visible]",
        help="Devices to use: 0,1 or UUIDs. Numbers are positions in CUDA_VISIBLE_DEVICES.",
        shown_default="all visible devices")
    device_kind: str = "gpu"
    visible_devices: str = _process(
        "node", ("node", "process"), "WHOSE",
        env=("FLEETRUN_VISIBLE_DEVICES",),
        help="Devices that each process sees. node: all devices of the job on this node, with "
             "LOCAL_RANK as index; process: only its own.")
    backend: str = _process(
        "auto", _BACKENDS, "NAME", env=("PADDLE_DISTRI_BACKEND",),
        modes=COLLECTIVE,
        help="Backend of collectives. auto: nccl on GPUs, else gloo.")
    numa_binding: str = _process(
        "off", ("off", "node", "socket", "exclusive", "core-complex"), "HOW", modes=COLLECTIVE,
        help="Bind each process to CPU cores near its GPU. node: cores of the NUMA node; socket: cores "
             "of the socket; exclusive: its share of the NUMA node; core-complex: cores that share a cache.")

    nnodes: tuple[int, int] = _machine(
        (1, 1), parsing.node_range, "N|MIN:MAX", paddle=("np",), brief="nodes; MIN:MAX: as many as join",
        env=("PADDLE_NNODES", "PADDLE_ELASTIC_NP", "PET_NNODES"),
        help="Number of nodes. MIN:MAX: elastic, nodes may join and leave.", shown_default="1")
    master: str | None = _machine(
        None, parsing.rendezvous_address, "ADDRESS", paddle=("elastic_server",),
        env=("PADDLE_MASTER", "PADDLE_ELASTIC_SERVER"), brief="where nodes join: host:port of one node",
        help="Where nodes join: host:port of one node; H1,H2,H3 for three nodes, of which any one may "
             "fail; embedded:3 for the first three of --ips; or etcd://host:port,...",
        shown_default="this node, which prints it")
    ips: Strings = _machine(
        (), parsing.host_list, "LIST", env=("PADDLE_IPS",),
        help="The nodes in order of rank. They join at the first one.", shown_default="this node")
    rank: int = _machine(
        -1, parsing.whole(-1, 65534), "N", aliases=("node_rank",), env=("PADDLE_RANK", "PET_NODE_RANK"),
        help="Rank of this node. -1: any.")
    token_file: str | None = _machine(
        None, parsing.nonempty, "FILE", env=("FLEETRUN_TOKEN_FILE",),
        help="File with the token of the job, 16 characters or more. Only nodes with this token can "
             "join, and their traffic is encrypted. FLEETRUN_TOKEN can hold the token itself.")
    on_node_loss: NodeLoss = _machine(
        NodeLoss.FAIL, parsing.node_loss, "WHAT", choices=tuple(map(str, NodeLoss)),
        paddle=("elastic_level",), env=_LOSS_VARIABLES,
        help="After a node is lost: end the job; wait for a replacement, also after a failed process; "
             "or continue with the remaining nodes, if there are enough.",
        shown_default="fail, or shrink with MIN:MAX")
    elastic_timeout: float = _machine(
        30.0, parsing.seconds, "TIME", env=("PADDLE_ELASTIC_TIMEOUT",),
        help="How long to wait for more nodes, or for a replacement.",
        shown_default="30s")
    spares: int = _machine(
        0, parsing.whole(0, 65534), "N", env=("FLEETRUN_SPARES",),
        help="Number of spares: nodes beyond --nnodes that wait, and replace lost nodes.")
    exclude_after: int = _machine(
        2, parsing.whole(0, 1_000), "N", env=("FLEETRUN_EXCLUDE_AFTER",),
        help="Exclude a node after this many faults, if enough other nodes remain. 0: never. See "
             "`fleetrun nodes`.")
    check: str = _machine(
        "off", ("off", "fast", "full"), "HOW",
        env=("FLEETRUN_CHECK",),
        help="Test CPU, memory and network before each start, in a few seconds. full: also test GPUs, "
             "which takes longer. A slow or broken node gets a fault.")
    rdzv_timeout: float = _machine(
        600.0, parsing.seconds, "TIME", env=("FLEETRUN_RDZV_TIMEOUT",),
        help="How long to wait for all nodes at the start.", shown_default="10m")
    heartbeat_timeout: float = _machine(
        10.0, parsing.seconds_from(2.0), "TIME", env=("FLEETRUN_HEARTBEAT_TIMEOUT",),
        help="A node without a heartbeat for this long is lost. At least 2 s.", shown_default="10s")
    host: str | None = _machine(
        None, parsing.host, "ADDRESS", env=("POD_IP",),
        help="Address of this node.",
        shown_default="127.0.0.1; on several nodes, the address that reaches --master")
    nic: str | None = _machine(
        None, parsing.nonempty, "NAME", env=("FLEETRUN_NIC",),
        help="Network interface whose address this node uses.",
        shown_default="the interface that reaches --master")
    sort_ip: bool = switch(
        Group.MACHINES, takes=Takes.BOOLEAN, env=("PADDLE_SORT_IP",),
        help="Rank nodes by address.")
    start_port: int | None = _machine(
        None, parsing.port, "PORT", env=("PADDLE_START_PORT", "FLAGS_START_PORT"),
        help="First port to use. The other ports follow it.", shown_default="free ports")
    port_range: tuple[int, int] | None = _machine(
        None, parsing.port_range, "LOW:HIGH", env=("PORT_RANGE",),
        help="Range of ports to choose from.", shown_default="any")
    master_addr: str | None = _machine(
        None, parsing.host, "ADDRESS", modes=COLLECTIVE, env=("PET_MASTER_ADDR",),
        help="MASTER_ADDR of the trainers. Nodes also join at this address, as in torchrun.",
        shown_default="address of the first node")
    master_port: int | None = _machine(
        None, parsing.port, "PORT", modes=COLLECTIVE, env=("PET_MASTER_PORT",),
        help="MASTER_PORT of the trainers. With --master_addr, nodes join 1000 ports below it.",
        shown_default="a free port; 29500 with --master_addr on several nodes")

    max_restart: int = _failure(
        3, parsing.whole(0, 1_000_000), "N", aliases=("max_restarts",),
        env=("PADDLE_MAX_RESTART", "PET_MAX_RESTARTS"), brief="restarts after failures [3]",
        help="Number of restarts after failures. Each step that is new to the job resets the count.")
    restart_window: float | None = _failure(
        None, parsing.seconds, "TIME", env=("FLEETRUN_RESTART_WINDOW",),
        help="Count only restarts within this time against --max_restart.", shown_default="all")
    stop_timeout: float = _failure(
        30.0, parsing.seconds, "TIME",
        env=("FLEETRUN_STOP_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        help="Time between SIGTERM and SIGKILL.", shown_default="30s")
    hang_timeout: float | None = _failure(
        None, parsing.seconds, "TIME", env=("FLEETRUN_HANG_TIMEOUT",),
        help="Treat this time without output or progress of any trainer as a hang: write the stacks of "
             "all processes to their logs, then restart the job, or end it with code 124.",
        shown_default="never")
    warm: bool = switch(
        Group.FAILURE, env=("FLEETRUN_WARM",),
        help="Import once for all Python processes of a node, and fork them from there: starts use less CPU "
             "time and memory, and restarts take tenths of a second.")
    probe: str = _failure(
        "on", ("on", "off"), "WHEN", env=("FLEETRUN_PROBE",),
        help="Load fleetrun's probe into each Python process, through PYTHONPATH. `fleetrun why`, "
             "--warm, --watch, `fleetrun debug` and automatic step counts need it.")
    debug: str = _failure(
        "auto", ("auto", "on", "error", "off"), "WHEN", env=("FLEETRUN_DEBUG",),
        help="Choose when `breakpoint()` waits for `fleetrun debug`: auto (if fleetrun has a terminal, but "
             "not in CI), on (always), error (also if an exception ends a process) or off (it fails).")
    elastic_pre_hook: str | None = _failure(
        None, parsing.shell_words, "COMMAND", help="Command to run before each start, without a shell.")

    log_dir: str = _output(
        "log", parsing.nonempty, "DIR", env=("PADDLE_LOG_DIR", "PET_LOG_DIR"),
        brief="directory for the output of the processes [log]",
        help="Directory for the output of the processes.")
    follow: tuple[parsing.FollowRule, ...] = _output(
        ((Role.TRAINER, (0,)),), parsing.follow, "WHAT", env=("FLEETRUN_FOLLOW",), repeats=True,
        brief="output to show: all, none, trainer:0,1+ps [trainer:0]",
        help="Output to show: all, none, or roles (trainer, ps, heter, coordinator, evaluator), "
             "optionally with numbers, such as trainer:0,1+ps.",
        shown_default="trainer:0")
    display: str = _output(
        "auto", DISPLAYS, "HOW", env=("FLEETRUN_DISPLAY",),
        help="live: a status line at the bottom of the terminal; plain: lines only; json: one event per "
             "line on stdout; quiet: like -q --follow none; auto: live on a terminal, else plain.")
    log_level: str = _output(
        "INFO", parsing.choice(*_LEVELS, also={"warn": "WARNING", "fatal": "CRITICAL"}), "LEVEL",
        choices=_LEVELS, env=("PADDLE_LOG_LEVEL",),
        help="Lowest level of fleetrun's own messages that are shown.")
    log_overwrite: bool = switch(
        Group.OUTPUT, takes=Takes.BOOLEAN, env=("PADDLE_LOG_OVERWRITE",),
        help="Delete the logs of earlier runs of this job first.")
    log_rotate: int | None = _output(
        None, parsing.size, "SIZE", env=("FLEETRUN_LOG_ROTATE",),
        help="Keep only the newest output of each process, about this much, such as 100M.",
        shown_default="all")
    enable_gpu_log: bool = switch(
        Group.OUTPUT, True, takes=Takes.BOOLEAN,
        help="Log the state of the GPUs. --enable_gpu_log=0 turns it off.", shown_default="on")
    tensorboard: str | None = _output(
        None, parsing.nonempty, "DIR", env=("FLEETRUN_TENSORBOARD",),
        help="Write the progress of trainers as TensorBoard event files.")
    metrics_port: int | None = _output(
        None, parsing.whole(0, 65535), "PORT", env=("FLEETRUN_METRICS_PORT",),
        help="Serve Prometheus metrics of the job on this port. 0: a free port, which fleetrun prints.")
    metrics_host: str = _output(
        "127.0.0.1", parsing.host, "ADDRESS", env=("FLEETRUN_METRICS_HOST",),
        help="Address that --metrics_port listens on.")
    export: tuple[parsing.Addressed, ...] = _output(
        (), parsing.exports, "NAME=ARGUMENT", env=("FLEETRUN_EXPORT",), repeats=True, joint="\n",
        help="Export progress and events with an exporter of another package. See `fleetrun help plugins`.")
    notify: tuple[parsing.Addressed, ...] = _output(
        (), parsing.notifiers, "URL|command:WORDS", env=(NOTIFY,), repeats=True, joint="\n",
        secret=True,
        help="Report failures, restarts, hangs and the end: POST JSON to a URL (Slack and others), or "
             "run a command. Put a secret URL into FLEETRUN_NOTIFY. See `fleetrun help notify`.")
    notify_on: Strings = _output(
        parsing.MOMENTS, parsing.moments, "LIST", env=("FLEETRUN_NOTIFY_ON",),
        help="Events that send a notification.", shown_default=",".join(parsing.MOMENTS))

    server_num: int | None = _servers(
        None, parsing.count_or_none, "N", env=("PADDLE_SERVER_NUM",),
        brief="parameter servers on this node",
        help="Number of parameter servers on this node.", shown_default="1 in ps modes")
    trainer_num: int | None = _servers(
        None, parsing.count_or_none, "N", aliases=("worker_num",), env=("PADDLE_TRAINER_NUM",),
        brief="their trainers on this node",
        help="Number of trainers on this node.", shown_default="1 in ps modes")
    servers: Strings = _servers(
        (), parsing.endpoint_list, "LIST", env=("PADDLE_SERVERS_ENDPOINTS",),
        help="Endpoints of the servers, such as host:port,host:port. Needs --trainers.")
    trainers: Strings = _servers(
        (), parsing.trainer_list, "LIST", paddle=("workers",), env=("PADDLE_TRAINERS_ENDPOINTS",),
        help="Endpoints of the trainers. Hosts without a port get ports from 6170 + number of servers on.")

    scheduler: str = _engine(
        "local", parsing.engine, "SCHEDULER", choices=parsing.ENGINES, plugs="schedulers",
        env=("FLEETRUN_SCHEDULER",),
        help="Submit the job to a scheduler, which starts fleetrun on the nodes.")
    scheduler_option: Strings = _engine(
        (), parsing.assignment, "NAME=VALUE", repeats=True,
        help="An option of the scheduler, such as partition=gpu for slurm.")
    sync: str | None = _engine(
        None, parsing.nonempty, "DIR",
        help="Copy this directory to each node, without the files that .gitignore names, and run the "
             "job in the copy. '.' is the current directory.")
    image: str | None = _engine(
        None, parsing.nonempty, "IMAGE", env=("FLEETRUN_IMAGE",),
        help="Container image for --scheduler kubernetes.")

    coordinator_num: int | None = _paddle(
        None, parsing.count, "N", modes=SERVERS, makes=Mode.PS, help="Number of coordinators.")
    coordinators: Strings = _paddle(
        (), parsing.endpoint_list, "LIST", modes=SERVERS, makes=Mode.PS,
        help="Endpoints of the coordinators.")
    heter_worker_num: Integers = _heter(
        (), parsing.stage_counts, "N;N",
        help="Number of heter workers, by stage after the trainers. Makes the mode ps-heter.")
    heter_workers: tuple[Strings, ...] = _heter(
        (), parsing.stage_endpoints, "LIST;LIST", help="Endpoints of the heter workers, by stage.")
    heter_devices: Strings = _heter(
        (), parsing.stage_devices, "KIND;KIND",
        help="Device of each stage of heter workers: cpu, gpu, xpu or npu.", shown_default="gpu")
    with_gloo: int = _paddle(
        1, parsing.whole(0, 2), "0|1|2", modes=SERVERS, env=("PADDLE_WITH_GLOO",),
        help="Value of PADDLE_WITH_GLOO for the processes.")
    gloo_port: int = _paddle(
        6767, parsing.port, "PORT", modes=SERVERS, env=("PADDLE_GLOO_PORT",),
        help="Port of the Gloo service with --servers.")
    http_port: int | None = _paddle(
        None, parsing.port, "PORT", modes=SERVERS,
        help="Port of the Gloo service with --server_num.", shown_default="a free port")
    legacy: bool = switch(
        Group.PADDLE, takes=Takes.BOOLEAN,
        help="Accepts only 0, because fleetrun has only one launcher.")

    standalone: bool = switch(
        Group.TORCHRUN, env=("PET_STANDALONE",),
        help="Run on one node, which is the default.")
    role: str = option(
        "default", parsing.nonempty, "NAME", group=Group.TORCHRUN, modes=PROCESSES, env=("PET_ROLE",),
        help="ROLE_NAME of the trainers.")
    run_path: bool = switch(
        Group.TORCHRUN, env=("PET_RUN_PATH",),
        help="SCRIPT is a Python file with any name, even with --no_python.")
    virtual_local_rank: bool = switch(
        Group.TORCHRUN, modes=COLLECTIVE, env=("PET_VIRTUAL_LOCAL_RANK",),
        help="LOCAL_RANK is 0 in all processes, and each process sees only its own devices.")
    # fmt: on

    def role_settings(self, role: Role) -> RoleSettings:
        """Return the settings of a job file for the processes of this role."""
        return next((each for each in self.roles if each.role is role), RoleSettings(role=role))


OPTIONS = options_of(LaunchSettings)

BY_VARIABLE = {name: option.name for option in OPTIONS.values() for name in option.env}
"""Maps each environment variable to the option that it sets."""


# ---- Options that only torchrun has, which `torchrun.translated` converts

_METHODS = ("spawn", "fork", "forkserver")
_RENDEZVOUS_BACKENDS = ("static", "c10d", "etcd", "etcd-v2")
_FILTERS = "has no effect: `fleetrun logs --grep` filters the output"
_SHOWN = "selects the shown output together with --redirects, --tee and --local_ranks_filter, like --follow"


def _torchrun(name: str, help: str, parse: Parser = parsing.anything, short: str = "") -> Option:
    return Option(
        name=name,
        parse=parse,
        short=short,
        help=help,
        metavar="VALUE",
        group=Group.TORCHRUN,
        env=(f"{PET}{name.upper()}",),
    )


TORCHRUN = _named(
    _torchrun("rdzv_backend", "sets the kind of --rdzv_endpoint", choice(*_RENDEZVOUS_BACKENDS)),
    _torchrun("rdzv_endpoint", "sets --master"),
    _torchrun("rdzv_id", "sets --job_id"),
    _torchrun("rdzv_conf", "sets --rdzv_timeout and --elastic_timeout", parsing.assignments),
    _torchrun("local_addr", "sets --host"),
    _torchrun("shutdown_timeout", "sets --stop_timeout"),
    _torchrun("redirects", _SHOWN, parsing.streams, "-r"),
    _torchrun("tee", _SHOWN, parsing.streams, "-t"),
    _torchrun("local_ranks_filter", _SHOWN, parsing.number_list),
    _torchrun("monitor_interval", "has no effect, because fleetrun does not poll"),
    _torchrun("start_method", "has no effect, because every process is a new one", choice(*_METHODS)),
    _torchrun("event_log_handler", "has no effect; --display json prints the events"),
    _torchrun("logs_specs", "has no effect; output goes to the files in --log_dir"),
    _torchrun(
        "signals_to_handle",
        "has no effect; fleetrun stops the job at SIGTERM, SIGINT, SIGHUP and SIGQUIT and passes on "
        "SIGUSR1 and SIGUSR2",
    ),
    _torchrun("duplicate_stdout_filters", _FILTERS),
    _torchrun("duplicate_stderr_filters", _FILTERS),
)
"""The help of each option is the second half of a sentence about it."""

OF_JOBS = (*OPTIONS.values(), *TORCHRUN.values())
"""All options that describe a job."""

OWN = (*OPTIONS.values(), *SHORTHANDS.values(), *ACTIONS.values())
"""All options of fleetrun, without the ones that only torchrun has."""


@frozen_by_name
class Resolved:
    """Settings, with their origins and remarks.

    `origins` maps an option to its origin, such as `--trainer_num` as on the command line, or
    `PADDLE_NNODES`. Options with their default are absent. `notices` are one-line remarks for the console.
    `words` holds each option as one word of a command line. `engine` names the options that a scheduler set.
    """

    settings: LaunchSettings
    origins: Texts
    notices: Strings = ()
    words: Texts = field(default_factory=dict)
    engine: frozenset[str] = frozenset()
