"""The job file to begin with: every option with its meaning, commented out. Text only."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from fleetrun.envs.options import Group, Option, Takes
from fleetrun.envs.settings import OPTIONS
from fleetrun.jobfile import toml
from fleetrun.jobfile.filling import escaped
from fleetrun.usage import default

NOT_HERE = frozenset({"config", "save", "dry_run", "json", "legacy", "standalone"})
"""Options that are for the command line."""

EXAMPLES: Mapping[str, str] = {
    "timeout": '"12h"',
    "nproc_per_node": "2",
    "devices": "[0, 1]",
    "server_num": "1",
    "trainer_num": "2",
    "servers": '["10.0.0.1:6170", "10.0.0.2:6170"]',
    "trainers": '["10.0.0.1:6180", "10.0.0.2:6180"]',
    "coordinator_num": "1",
    "coordinators": '["10.0.0.1:6190"]',
    "heter_worker_num": "[1, 2]",
    "heter_workers": '[["10.0.0.1:6200"], ["10.0.0.1:6201", "10.0.0.2:6201"]]',
    "heter_devices": '["gpu", "cpu"]',
    "http_port": "6768",
    "host": '"10.0.0.1"',
    "start_port": "6170",
    "port_range": "[35100, 36000]",
    "master_addr": '"10.0.0.1"',
    "master_port": "29500",
    "hang_timeout": '"10m"',
    "elastic_pre_hook": '"./prepare.sh --quick"',
    "log_rotate": '"100M"',
    "follow": '["trainer:0", "ps"]',
    "tensorboard": '"runs"',
    "metrics_port": "9400",
    "nnodes": "[2, 4]",
    "ips": '["10.0.0.1", "10.0.0.2"]',
    "master": '"10.0.0.1:6768"',
    "nic": '"eth0"',
    "token_file": '"secret.txt"',
    "scheduler_option": '{partition = "gpu", time = "1:00:00"}',
    "image": '"registry/train:1"',
}
"""Values of options that have no default, or one that shows nothing of how it is written."""

_HEAD = """\
# A job file of fleetrun. Start it with:  fleetrun up FILE [OPTIONS]
#
# What is typed wins over variables of the environment, these win over this file, and this file over defaults.
# ${NAME} in a text is a variable of the environment, or of [variables]; ${here} is the folder of this file.
# Relative paths count from the directory in which fleetrun is started.

# Other job files, whose values count less than those here:
# include = ["common.toml"]
"""

_TABLES = """

# ---- Variables for ${NAME}, where the environment has none of that name

# [variables]
# LR = 0.1

# ---- What all processes find in their environment, whatever the shell has

# [environment]
# NCCL_DEBUG = "WARN"

# ---- Roles: trainer, server, coordinator, heter, evaluator. Each may have a script, arguments, an
# environment and threads (OMP_NUM_THREADS) of its own.

# [roles.trainer]
# count = 2
# [roles.trainer.resources]
# devices = [0, 1]
# threads = 4

# [roles.server]
# count = 1
# script = "server.py"
# args = ["--tables", "${here}/tables"]

# Evaluators look at a training from beside it: one that fails is started again alone, and when the trainers
# have ended they are asked to end too. on = "first": on the first machine; "each": on every machine.

# [roles.evaluator]
# count = 1
# on = "first"
# script = "evaluate.py"
# [roles.evaluator.environment]
# CUDA_VISIBLE_DEVICES = ""
"""


def template(script: str) -> str:
    """For a job that runs this script."""
    lines = [_HEAD, f"script = {toml.text(escaped(script))}", 'args = []  # such as ["--lr", "0.1"]']
    for group in Group:
        options = [each for each in OPTIONS.values() if each.group is group and each.name not in NOT_HERE]
        if options:
            lines += ["", f"# ---- {group}", *(line for option in options for line in _entry(option))]
    return "\n".join(lines) + _TABLES


def _entry(option: Option) -> list[str]:
    choices = f" One of {', '.join(option.choices)}." if option.choices else ""
    shown = toml.value(option.default) if isinstance(option.default, bool) else default(option)
    text = f"{option.help}{choices} Default: {shown}."
    return ["", *(f"# {line}" for line in textwrap.wrap(text, 100)), f"# {option.name} = {example(option)}"]


def example(option: Option) -> str:
    """A value as it is written: the default where it shows how."""
    if option.name in EXAMPLES:
        return EXAMPLES[option.name]
    if option.takes is not Takes.VALUE:
        return toml.value(not option.default if option.name == "module" else bool(option.default))
    return toml.value(option.default)
