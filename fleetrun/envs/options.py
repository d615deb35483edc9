"""What an option is. The options themselves are the fields of `settings.LaunchSettings`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from typing import Any

from fleetrun.envs.contract import Mode
from fleetrun.envs.values import Parser, boolean, choice
from fleetrun.frozen import dataclass, field, replace, said_of

COLLECTIVE = frozenset({Mode.COLLECTIVE})
PROCESSES = frozenset({Mode.COLLECTIVE, Mode.RPC})
SERVERS = frozenset({Mode.PS, Mode.PS_HETER})
HETER = frozenset({Mode.PS_HETER})
ANY = frozenset(Mode)


class Group(StrEnum):
    """The sections of `--help`, in their order."""

    JOB = "Job"
    PROCESSES = "Processes"
    SERVERS = "Parameter server"
    NETWORK = "Network and ports"
    FAILURE = "Failure and restart"
    LOGS = "Logs and output"
    MONITORING = "Monitoring"
    MACHINES = "Many machines"
    ENGINES = "Engines of clusters"
    COMPATIBLE = "Kept for compatibility"
    OTHER = "Other"


class Takes(Enum):
    """Whether an option takes the next word of the command line."""

    VALUE = 1
    NOTHING = 2
    BOOLEAN = 3  # only true, false, 1, 0, ...: `--sort_ip x.py` works, and Paddle's `--sort_ip 1 x.py` too


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: how it is written, where else it is looked for, how its text becomes a value.

    `modes` are those in which it means something, `makes` the mode of a job that does not state one.
    """

    name: str = ""
    default: Any = None
    parse: Parser
    group: Group
    help: str
    metavar: str = ""
    shown_default: str | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    short: str = ""
    env: tuple[str, ...] = ()
    modes: frozenset[Mode] = ANY
    makes: Mode | None = None
    takes: Takes = Takes.VALUE
    repeats: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name}"


def option(default: Any, parse: Parser, metavar: str, **rest: Any) -> Any:
    """A dataclass field that is an option; its name is the field's."""
    described = Option(default=default, parse=parse, metavar=metavar, **rest)
    return field(default=default, metadata={"option": described})


def switch(default: bool, **rest: Any) -> Any:
    """An option that is true when given; `takes=Takes.BOOLEAN` lets it take a word too."""
    return option(default, boolean, "", **({"takes": Takes.NOTHING} | rest))


def of(settings: type[Any]) -> dict[str, Option]:
    """The options among the fields of a dataclass, by name, in their order."""
    return {
        name: replace(said["metadata"]["option"], name=name)
        for name, said in said_of(settings).items()
        if "metadata" in said
    }


ACTIONS: Mapping[str, Option] = {
    action.name: action
    for action in (
        Option(
            name="help",
            short="-h",
            parse=boolean,
            group=Group.OTHER,
            takes=Takes.NOTHING,
            help="Show this help.",
        ),
        Option(
            name="version",
            parse=boolean,
            group=Group.OTHER,
            takes=Takes.NOTHING,
            help="Show the version.",
        ),
        Option(
            name="show_completion",
            parse=choice("bash", "zsh", "fish"),
            group=Group.OTHER,
            metavar="SHELL",
            choices=("bash", "zsh", "fish"),
            help="Print the completion script of a shell.",
        ),
    )
}
"""Options that do something else instead of launching."""


def by_spelling(options: Iterable[Option]) -> dict[str, Option]:
    """Every way to write an option: `two_words` for long ones (see `normal`), `-x` for short ones."""
    return {
        spelling: option
        for option in options
        for spelling in (option.name, *option.aliases, option.short)
        if spelling
    }


def normal(word: str) -> str:
    """`--two-words` and `--two_words` are the same option: `two_words`."""
    return word.removeprefix("--").replace("-", "_")


_AUTO_PARALLEL = "belongs to Paddle's auto parallel mode, which fleetrun does not have: leave it out"
_RENDEZVOUS = "is torchrun's; in fleetrun --master says where machines meet"

RETIRED: Mapping[str, str] = {
    "auto_tuner_json": "and the auto tuner are not part of fleetrun; start each trial as a job of its own",
    "auto_parallel_config": _AUTO_PARALLEL,
    "auto_cluster_config": _AUTO_PARALLEL,
    "cluster_topo_path": _AUTO_PARALLEL,
    "rank_mapping_path": _AUTO_PARALLEL,
    "enable_auto_mapping": _AUTO_PARALLEL,
    "scale": "had no effect in Paddle either; use --nnodes MIN:MAX",
    "force": "had no effect in Paddle either: leave it out",
    "rdzv_backend": _RENDEZVOUS,
    "rdzv_endpoint": _RENDEZVOUS,
    "rdzv_conf": "is torchrun's; in fleetrun --rdzv_timeout and --heartbeat_timeout say how long to wait",
    "rdzv_id": "is torchrun's; in fleetrun --job_id names the job",
    "local_addr": "is torchrun's; in fleetrun --host gives this machine's address",
    "tee": "is torchrun's; in fleetrun output goes to files and --follow chooses what to show",
    "redirects": "is torchrun's; in fleetrun output goes to files and --follow chooses what to show",
    "-t": "is torchrun's; in fleetrun output goes to files and --follow chooses what to show",
    "-r": "is torchrun's; in fleetrun output goes to files and --follow chooses what to show",
    "local_ranks_filter": "is torchrun's; in fleetrun --follow trainer:0,1 chooses what to show",
    "monitor_interval": "is torchrun's; fleetrun does not poll: leave it out",
    "start_method": "is torchrun's; fleetrun always starts new processes: leave it out",
    "role": "is torchrun's; in fleetrun --job_id names the job",
    "use_env": "is what fleetrun always does: leave it out",
    "run_path": "is torchrun's; in fleetrun a script runs by its path alone",
}
"""Options that made sense elsewhere: what to say instead of "no such option"."""

RETIRED_SCRIPTS: Mapping[str, str] = {
    "ipu": "'ipu' asks Paddle for Graphcore devices; fleetrun does not drive them",
    "run_check": "'run_check' is Paddle's self-test; run fleetrun -m trainers.examples.collective_trainer",
}
"""Words that Paddle takes in place of a script."""
