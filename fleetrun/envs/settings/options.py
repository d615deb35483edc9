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
    MACHINES = "Machines"
    FAILURE = "Failures"
    OUTPUT = "Output"
    SERVERS = "Parameter servers"
    ENGINES = "Engines of clusters"
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
    default: Any = None
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


def option(default: Any, parse: Parser | Strings, metavar: str, **rest: Any) -> Any:
    """Declare an option as a field, which also names it. `parse` may be a tuple of words to choose from."""
    if isinstance(parse, tuple):
        parse, rest = choice(*parse), {"choices": parse, **rest}
    described = Option(default=default, parse=parse, metavar=metavar, **rest)
    return field(default=default, metadata={"option": described})


def switch(default: bool, **rest: Any) -> Any:
    """Declare an option that is true when given. `takes=Takes.BOOLEAN` also accepts a word."""
    return option(default, boolean, "", **({"takes": Takes.NOTHING} | rest))


def options_of(settings: type[Any]) -> dict[str, Option]:
    """Return the options among the fields of a dataclass by name, in field order."""
    return {
        name: replace(said["metadata"]["option"], name=name)
        for name, said in field_arguments(settings).items()
        if "metadata" in said
    }


def _named(*options: Option) -> Mapping[str, Option]:
    return {each.name: each for each in options}


_bare = partial(Option, parse=boolean, takes=Takes.NOTHING)
ACTIONS = _named(
    _bare(name="help", short="-h", group=Group.OTHER, help="Show this help; -h: the most used part of it."),
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
        help="As --log_level DEBUG: the settings, the variables of processes, their pids.",
    ),
    _bare(
        name="quiet",
        short="-q",
        group=Group.OUTPUT,
        help="As --log_level ERROR --display plain: the script's output, and errors.",
    ),
)
SHORT_FOR: Mapping[str, tuple[tuple[str, str], ...]] = {
    "verbose": (("log_level", "DEBUG"),),
    "quiet": (("log_level", "ERROR"), ("display", "plain")),
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


_AUTO_PARALLEL = "is for Paddle's auto parallel mode, which fleetrun does not have: leave it out"

RETIRED: Texts = {
    "auto_tuner_json": "is for Paddle's auto tuner, which fleetrun does not have: start a job per trial",
    "auto_parallel_config": _AUTO_PARALLEL,
    "auto_cluster_config": _AUTO_PARALLEL,
    "cluster_topo_path": _AUTO_PARALLEL,
    "rank_mapping_path": _AUTO_PARALLEL,
    "enable_auto_mapping": _AUTO_PARALLEL,
    "scale": "had no effect in Paddle either; use --nnodes MIN:MAX",
    "force": "had no effect in Paddle either: leave it out",
    "use_env": "is what fleetrun always does: leave it out",
}
"""Options of other launchers, each with the second half of a sentence about it."""

RETIRED_SCRIPTS: Texts = {
    "ipu": "'ipu' asks Paddle for Graphcore devices; fleetrun does not support them",
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
        False, group=Group.JOB, short="-m", env=("PET_MODULE",), help="SCRIPT is a module, as in python -m.")
    no_python: bool = switch(
        False, group=Group.JOB, env=("PET_NO_PYTHON",),
        help="SCRIPT is a program, even if its name ends in .py.")
    config: str | None = _job(
        None, parsing.nonempty, "FILE",
        help="Job file; what is typed or set by a variable wins over it. See `fleetrun init`.")
    run_mode: Mode = _job(
        Mode.COLLECTIVE, parsing.run_mode, "MODE", choices=tuple(map(str, Mode)), env=("PADDLE_RUN_MODE",),
        help="How the processes work together.",
        shown_default="ps when servers or trainers are given, else collective")
    job_id: str = _job(
        "default", parsing.job_id, "NAME", env=("PADDLE_JOB_ID", "PADDLE_ELASTIC_JOB_ID"),
        help="Name of the job; the names of its log files begin with it.")
    env: Strings = _job(
        (), parsing.variables, "NAME[=VALUE]", repeats=True,
        help="A variable for all processes: NAME=VALUE; NAME or a pattern such as 'NCCL_*' passes on those "
             "of this environment, secrets by NAME only.")
    timeout: float | None = _job(
        None, parsing.seconds, "TIME", env=("FLEETRUN_TIMEOUT",),
        help="Stop a job that runs longer than this, with exit code 124.")
    dry_run: bool = switch(
        False, group=Group.JOB, brief="print what would be started; start nothing",
        help="Print what would be started; start nothing.")
    json: bool = switch(
        False, group=Group.JOB,
        help="Print JSON: the plan of --dry_run as one document, else events, as --display json does.")
    save: str | None = _job(
        None, parsing.nonempty, "FILE", help="Write the settings to a job file, for `fleetrun up`.")

    nproc_per_node: int | str | None = _process(
        None, parsing.count_or_word("auto", "gpu", "xpu", "cpu"), "N",
        env=("PADDLE_NPROC_PER_NODE", "PET_NPROC_PER_NODE"),
        modes=PROCESSES, brief="processes on this machine [one per device, else 1]",
        help="Number of processes on this machine. gpu, xpu: one per device; cpu: one per core; auto: gpu if "
             "there is one, else cpu.",
        shown_default="one per device, 1 without devices")
    devices: Strings = _process(
        (), parsing.device_list, "LIST", aliases=("gpus",),
        paddle=("selected_gpus", "xpus", "selected_xpus", "npus"), env=("PADDLE_DEVICES",),
        brief="devices to use, as 0,1 [all visible ones]",
        help="Devices to use, as 0,1 or by UUID. Numbers count within CUDA_VISIBLE_DEVICES.",
        shown_default="all visible ones")
    device_kind: str = "gpu"
    visible_devices: str = _process(
        "node", ("node", "process"), "WHOSE",
        env=("FLEETRUN_VISIBLE_DEVICES",),
        help="Devices that a process sees: all of its node, with LOCAL_RANK as index, or only its own.")
    backend: str = _process(
        "auto", _BACKENDS, "NAME", env=("PADDLE_DISTRI_BACKEND",),
        modes=COLLECTIVE,
        help="Backend of collectives; auto: nccl on GPUs, else gloo.")
    numa_binding: str = _process(
        "off", ("off", "node", "socket", "exclusive", "core-complex"), "HOW", modes=COLLECTIVE,
        help="Run each process on the cores of the NUMA node or socket of its GPU, on its share of the "
             "node's (exclusive), or on some that share a cache (core-complex); off: on any.")

    nnodes: tuple[int, int] = _machine(
        (1, 1), parsing.node_range, "N|MIN:MAX", paddle=("np",), brief="machines; MIN:MAX: as many as come",
        env=("PADDLE_NNODES", "PADDLE_ELASTIC_NP", "PET_NNODES"),
        help="Number of machines. MIN:MAX: elastic, machines may join and leave.", shown_default="1")
    master: str | None = _machine(
        None, parsing.rendezvous_address, "ADDRESS", paddle=("elastic_server",),
        env=("PADDLE_MASTER", "PADDLE_ELASTIC_SERVER"), brief="where they meet: host:port of one of them",
        help="Where machines meet: host:port (served by the launcher there), H1,H2,H3 (by those three, of "
             "which any one may be lost; embedded:3: the first three of --ips), or etcd://host:port,...",
        shown_default="this machine says")
    ips: Strings = _machine(
        (), parsing.host_list, "LIST", env=("PADDLE_IPS",),
        help="The machines in order of rank. They meet at the first.", shown_default="this one")
    rank: int = _machine(
        -1, parsing.whole(-1, 65534), "N", aliases=("node_rank",), env=("PADDLE_RANK", "PET_NODE_RANK"),
        help="Rank of this machine; -1: any.")
    token_file: str | None = _machine(
        None, parsing.nonempty, "FILE", env=("FLEETRUN_TOKEN_FILE",),
        help="File with the job's secret, 16 characters or more: only machines that have it can join, and "
             "their traffic is encrypted. FLEETRUN_TOKEN can hold the secret itself.")
    on_node_loss: NodeLoss = _machine(
        NodeLoss.FAIL, parsing.node_loss, "WHAT", choices=tuple(map(str, NodeLoss)),
        paddle=("elastic_level",), env=_LOSS_VARIABLES,
        help="When a machine is lost: end the job, wait for a replacement (also after a failed process), or "
             "continue with the remaining machines, if there are enough.",
        shown_default="fail; shrink with MIN:MAX")
    elastic_timeout: float = _machine(
        30.0, parsing.seconds, "TIME", env=("PADDLE_ELASTIC_TIMEOUT",),
        help="How long to wait for more machines, or for a replacement.",
        shown_default="30s")
    spares: int = _machine(
        0, parsing.whole(0, 65534), "N", env=("FLEETRUN_SPARES",),
        help="Machines beyond --nnodes that may wait: one takes the place of a machine that is lost.")
    exclude_after: int = _machine(
        2, parsing.whole(0, 1_000), "N", env=("FLEETRUN_EXCLUDE_AFTER",),
        help="Leave a machine out after so many faults, if there are enough others; 0: never. See "
             "`fleetrun nodes`.")
    check: str = _machine(
        "off", ("off", "fast", "full"), "HOW",
        env=("FLEETRUN_CHECK",),
        help="Before each start, measure processor, memory and the ways between machines, in a few seconds; "
             "full: also GPUs, which takes longer. What is slow or broken has a fault.")
    rdzv_timeout: float = _machine(
        600.0, parsing.seconds, "TIME", env=("FLEETRUN_RDZV_TIMEOUT",),
        help="How long to wait for all machines at the start.", shown_default="10m")
    heartbeat_timeout: float = _machine(
        10.0, parsing.seconds_from(2.0), "TIME", env=("FLEETRUN_HEARTBEAT_TIMEOUT",),
        help="A machine without a heartbeat for this long is lost; 2 s or more.", shown_default="10s")
    host: str | None = _machine(
        None, parsing.host, "ADDRESS", env=("POD_IP",),
        help="Address of this machine.",
        shown_default="127.0.0.1; with several machines the one that reaches --master")
    nic: str | None = _machine(
        None, parsing.nonempty, "NAME", env=("FLEETRUN_NIC",),
        help="Network interface that gives this machine's address.",
        shown_default="the one that reaches --master")
    sort_ip: bool = switch(
        False, group=Group.MACHINES, takes=Takes.BOOLEAN, env=("PADDLE_SORT_IP",),
        help="Rank machines by address.")
    start_port: int | None = _machine(
        None, parsing.port, "PORT", env=("PADDLE_START_PORT", "FLAGS_START_PORT"),
        help="First port to use; the others follow.", shown_default="free ports")
    port_range: tuple[int, int] | None = _machine(
        None, parsing.port_range, "LOW:HIGH", env=("PORT_RANGE",),
        help="Range to take free ports from.", shown_default="any")
    master_addr: str | None = _machine(
        None, parsing.host, "ADDRESS", modes=COLLECTIVE, env=("PET_MASTER_ADDR",),
        help="MASTER_ADDR of the trainers. With several machines, as in torchrun: where they meet.",
        shown_default="address of the first machine")
    master_port: int | None = _machine(
        None, parsing.port, "PORT", modes=COLLECTIVE, env=("PET_MASTER_PORT",),
        help="MASTER_PORT of the trainers; machines meet at --master_addr 1000 ports below.",
        shown_default="a free port; with --master_addr on several machines 29500")

    max_restart: int = _failure(
        3, parsing.whole(0, 1_000_000), "N", aliases=("max_restarts",),
        env=("PADDLE_MAX_RESTART", "PET_MAX_RESTARTS"), brief="restarts after failures [3]",
        help="Number of restarts after failures, since the last step that no attempt had made before; "
             "0: none.")
    restart_window: float | None = _failure(
        None, parsing.seconds, "TIME", env=("FLEETRUN_RESTART_WINDOW",),
        help="Only restarts in so much time count against --max_restart.", shown_default="all")
    stop_timeout: float = _failure(
        30.0, parsing.seconds, "TIME",
        env=("FLEETRUN_STOP_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        help="Time between SIGTERM and SIGKILL.", shown_default="30s")
    hang_timeout: float | None = _failure(
        None, parsing.seconds, "TIME", env=("FLEETRUN_HANG_TIMEOUT",),
        help="When no trainer prints or reports progress for this long, or a single one that used to hangs: "
             "write the stacks of all processes to their logs, then restart or fail (124).",
        shown_default="never")
    warm: bool = switch(
        False, group=Group.FAILURE, env=("FLEETRUN_WARM",),
        help="Keep a second interpreter for each Python process, with its imports done: restarts take tenths "
             "of a second.")
    probe: str = _failure(
        "on", ("on", "off"), "WHEN", env=("FLEETRUN_PROBE",),
        help="Whether Python processes of the job load fleetrun's probe (through PYTHONPATH), which tells "
             "where they are.")
    elastic_pre_hook: str | None = _failure(
        None, parsing.shell_words, "COMMAND", help="Command to run before each start, not in a shell.")

    log_dir: str = _output(
        "log", parsing.nonempty, "DIR", env=("PADDLE_LOG_DIR", "PET_LOG_DIR"),
        brief="directory for the output of the processes [log]",
        help="Directory for the output of the processes.")
    follow: tuple[parsing.FollowRule, ...] = _output(
        ((Role.TRAINER, (0,)),), parsing.follow, "WHAT", env=("FLEETRUN_FOLLOW",), repeats=True,
        brief="output to show: all, none, trainer:0,1+ps [trainer:0]",
        help="Output to show: all, none, or roles (trainer, ps, heter, coordinator, evaluator) with or "
             "without numbers, as trainer:0,1+ps.",
        shown_default="trainer:0")
    display: str = _output(
        "auto", DISPLAYS, "HOW", env=("FLEETRUN_DISPLAY",),
        help="live: a status line at the bottom of the terminal; plain: lines only; json: one event per line "
             "on stdout; quiet: as -q --follow none. auto: live on a terminal, else plain.")
    log_level: str = _output(
        "INFO", parsing.choice(*_LEVELS, also={"warn": "WARNING", "fatal": "CRITICAL"}), "LEVEL",
        choices=_LEVELS, env=("PADDLE_LOG_LEVEL",),
        help="Level of fleetrun's own messages.")
    log_overwrite: bool = switch(
        False, group=Group.OUTPUT, takes=Takes.BOOLEAN, env=("PADDLE_LOG_OVERWRITE",),
        help="First delete the logs of earlier runs of this job.")
    log_rotate: int | None = _output(
        None, parsing.size, "SIZE", env=("FLEETRUN_LOG_ROTATE",),
        help="Keep only the newest output of each process, about this much, as 100M.", shown_default="all")
    enable_gpu_log: bool = switch(
        True, group=Group.OUTPUT, takes=Takes.BOOLEAN,
        help="Log the state of the GPUs; --enable_gpu_log=0 turns it off.", shown_default="on")
    tensorboard: str | None = _output(
        None, parsing.nonempty, "DIR", env=("FLEETRUN_TENSORBOARD",),
        help="Write the progress of trainers as TensorBoard event files.")
    metrics_port: int | None = _output(
        None, parsing.whole(0, 65535), "PORT", env=("FLEETRUN_METRICS_PORT",),
        help="Serve Prometheus metrics of the job; 0: on a free port, which is printed.")
    metrics_host: str = _output(
        "127.0.0.1", parsing.host, "ADDRESS", env=("FLEETRUN_METRICS_HOST",),
        help="Address that --metrics_port listens on.")
    export: tuple[parsing.Addressed, ...] = _output(
        (), parsing.exports, "NAME=ARGUMENT", env=("FLEETRUN_EXPORT",), repeats=True, joint="\n",
        help="Export progress and events by an exporter of another package. See `fleetrun help plugins`.")
    notify: tuple[parsing.Addressed, ...] = _output(
        (), parsing.notifiers, "URL|command:WORDS", env=(NOTIFY,), repeats=True, joint="\n",
        secret=True,
        help="Notify of failures, restarts, hangs and the end: POST JSON to a URL (Slack and others), or run "
             "a command. Put a secret URL into FLEETRUN_NOTIFY instead. See `fleetrun help notify`.")
    notify_on: Strings = _output(
        parsing.MOMENTS, parsing.moments, "LIST", env=("FLEETRUN_NOTIFY_ON",),
        help="Of what --notify tells.", shown_default=",".join(parsing.MOMENTS))

    server_num: int | None = _servers(
        None, parsing.count_or_none, "N", env=("PADDLE_SERVER_NUM",),
        brief="parameter servers on this machine",
        help="Number of servers on this machine.", shown_default="1 in ps modes")
    trainer_num: int | None = _servers(
        None, parsing.count_or_none, "N", aliases=("worker_num",), env=("PADDLE_TRAINER_NUM",),
        brief="their trainers on this machine",
        help="Number of trainers on this machine.", shown_default="1 in ps modes")
    servers: Strings = _servers(
        (), parsing.endpoint_list, "LIST", env=("PADDLE_SERVERS_ENDPOINTS",),
        help="Endpoints of the servers, as host:port,host:port. Needs --trainers.")
    trainers: Strings = _servers(
        (), parsing.trainer_list, "LIST", paddle=("workers",), env=("PADDLE_TRAINERS_ENDPOINTS",),
        help="Endpoints of the trainers. Hosts without a port get ports from 6170 + number of servers.")

    scheduler: str = _engine(
        "local", parsing.engine, "ENGINE", choices=parsing.ENGINES, plugs="schedulers",
        env=("FLEETRUN_SCHEDULER",),
        help="Submit the job to an engine, which starts fleetrun on the machines.")
    scheduler_option: Strings = _engine(
        (), parsing.assignment, "NAME=VALUE", repeats=True,
        help="An option of the engine, as partition=gpu for slurm.")
    sync: str | None = _engine(
        None, parsing.nonempty, "DIR",
        help="Run in a copy of this folder on each machine, without what .gitignore names; '.' is the "
             "current folder.")
    image: str | None = _engine(
        None, parsing.nonempty, "IMAGE", env=("FLEETRUN_IMAGE",),
        help="Container image, for --scheduler kubernetes.")

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
        help="cpu, gpu, xpu or npu for each stage of heter workers.", shown_default="gpu")
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
        False, group=Group.PADDLE, takes=Takes.BOOLEAN,
        help="Only --legacy=0: there is only one launcher.")

    standalone: bool = switch(
        False, group=Group.TORCHRUN, env=("PET_STANDALONE",),
        help="One machine, which is the default.")
    role: str = option(
        "default", parsing.nonempty, "NAME", group=Group.TORCHRUN, modes=PROCESSES, env=("PET_ROLE",),
        help="ROLE_NAME of the trainers.")
    run_path: bool = switch(
        False, group=Group.TORCHRUN, env=("PET_RUN_PATH",),
        help="SCRIPT is a Python file, whatever its name, even with --no_python.")
    virtual_local_rank: bool = switch(
        False, group=Group.TORCHRUN, modes=COLLECTIVE, env=("PET_VIRTUAL_LOCAL_RANK",),
        help="LOCAL_RANK is 0 for all, and each process sees only its own devices.")
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
_SHOWN = "decides with --redirects, --tee and --local_ranks_filter what is shown, as --follow does"


def _torchrun(name: str, parse: Parser, help: str, short: str = "") -> Option:
    return Option(
        name=name,
        parse=parse,
        short=short,
        help=help,
        metavar="VALUE",
        group=Group.TORCHRUN,
        env=(f"{PET}{name.upper()}",),
    )


TORCHRUN: Mapping[str, Option] = {
    each.name: each
    for each in (
        _torchrun("rdzv_backend", choice(*_RENDEZVOUS_BACKENDS), "says how to read --rdzv_endpoint"),
        _torchrun("rdzv_endpoint", parsing.anything, "sets --master"),
        _torchrun("rdzv_id", parsing.anything, "sets --job_id"),
        _torchrun("rdzv_conf", parsing.assignments, "sets --rdzv_timeout and --elastic_timeout"),
        _torchrun("local_addr", parsing.anything, "sets --host"),
        _torchrun("shutdown_timeout", parsing.anything, "sets --stop_timeout"),
        _torchrun("redirects", parsing.streams, _SHOWN, "-r"),
        _torchrun("tee", parsing.streams, _SHOWN, "-t"),
        _torchrun("local_ranks_filter", parsing.number_list, _SHOWN),
        _torchrun("monitor_interval", parsing.anything, "has no effect: fleetrun does not poll"),
        _torchrun("start_method", choice(*_METHODS), "has no effect: every process is a new one"),
        _torchrun("event_log_handler", parsing.anything, "has no effect: --display json prints the events"),
        _torchrun("logs_specs", parsing.anything, "has no effect: output goes to the files in --log_dir"),
        _torchrun(
            "signals_to_handle",
            parsing.anything,
            "has no effect: fleetrun stops the job at SIGTERM, SIGINT, SIGHUP and SIGQUIT and passes on "
            "SIGUSR1 and SIGUSR2",
        ),
        _torchrun(
            "duplicate_stdout_filters",
            parsing.anything,
            "has no effect: `fleetrun logs --grep` filters the output",
        ),
        _torchrun(
            "duplicate_stderr_filters",
            parsing.anything,
            "has no effect: `fleetrun logs --grep` filters the output",
        ),
    )
}
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
