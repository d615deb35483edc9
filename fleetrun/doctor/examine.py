"""One machine from beginning to end: every measurement at once, each with a bound, then what they mean. Knows
neither what is measured nor what is thought of it.
"""

from __future__ import annotations

import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fleetrun import files
from fleetrun.doctor import drivers, judge_devices, judge_host, judge_network, measure, torchasked
from fleetrun.doctor.facts import Machine, Wanted
from fleetrun.doctor.finding import Finding, warned
from fleetrun.doctor.plan import Plan
from fleetrun.envs.contract import TOKEN, VISIBLE_VARIABLE, without_contract
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.pod.job import command

PATIENCE = 20.0
"""Seconds for a measurement. A file system over a network that is gone answers never."""


def examine(settings: LaunchSettings, plan: Plan, environ: Mapping[str, str]) -> Machine:
    """Measure this machine. Torch is asked where trainers run Python."""
    wanted = plan.wanted
    tasks: dict[str, Callable[[], Any]] = {
        "cores": measure.cores,
        "memory": measure.memory,
        "shm": measure.shm,
        "limits": measure.limits,
        "logs": lambda: measure.folder(Path(settings.log_dir)),
        "network": lambda: measure.network(wanted.address),
        "runtime_error": lambda: _runtime_error(environ),
    }
    if settings.tensorboard is not None:
        boards = Path(settings.tensorboard)
        tasks["boards"] = lambda: measure.unwritable(boards)
    if wanted.devices and wanted.device_kind == "gpu":
        tasks["driver"] = lambda: drivers.ask(wanted.devices)
    if command(settings)[0] == sys.executable:
        own = {**environ, **dict(settings.environment)}
        tasks["torch"] = lambda: torchasked.ask(_environment(plan, own))
    found = at_once(tasks, {"torch": torchasked.PATIENCE + PATIENCE})
    late = tuple(name for name in tasks if name not in found)
    return Machine(python=platform.python_version(), fleetrun=version("fleetrun"), **found, late=late)


def _environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """As a process of the job would have it: the devices chosen, and no secret."""
    values = without_contract(environ)
    values.pop(TOKEN, None)
    if plan.wanted.devices:
        values[VISIBLE_VARIABLE[plan.wanted.device_kind]] = ",".join(plan.wanted.devices)
    return values


def _runtime_error(environ: Mapping[str, str]) -> str:
    """Why sockets of launches cannot be made; makes the folder, as a launch would."""
    try:
        files.make_run_folder(files.run_folder(environ))
    except OSError as error:
        return f"{files.run_folder(environ)}: {error.strerror}" if error.strerror else str(error)
    return ""


def at_once(tasks: Mapping[str, Callable[[], Any]], patience: Mapping[str, float]) -> dict[str, Any]:
    """What each gives, by name; without those that take longer than `PATIENCE` or what `patience` says of
    them. They are left to themselves: a call that the kernel does not let return can only be waited for.

    """
    found: dict[str, Any] = {}

    def run(name: str, act: Callable[[], Any]) -> None:
        found[name] = act()

    threads = {
        name: threading.Thread(target=run, args=(name, act), daemon=True) for name, act in tasks.items()
    }
    for thread in threads.values():
        thread.start()
    began = time.monotonic()
    for name, thread in sorted(threads.items(), key=lambda item: patience.get(item[0], PATIENCE)):
        thread.join(max(0.0, began + patience.get(name, PATIENCE) - time.monotonic()))
        assert thread.is_alive() or name in found, f"{name} has failed: see above"
    return dict(found)


def judge(machine: Machine, plan: Plan) -> Iterator[Finding]:
    """What the facts mean for this job, in the order in which they are shown."""
    yield judge_devices.python(machine)
    if machine.torch is not None:
        yield from judge_devices.torch(machine.torch, plan.wanted)
    if plan.host is not None:
        yield from judge_devices.devices(machine.driver, machine.torch, plan.wanted)
    yield from _host(machine, plan.wanted)
    if machine.network is not None:
        yield from judge_network.network(machine.network, plan.wanted)
    if plan.offer is not None:
        yield judge_network.ports(machine.network, plan.wanted)
    for name in machine.late:
        yield warned(_NAMES.get(name, name), f"no answer within {PATIENCE:g} s", _LATE)


def _host(machine: Machine, wanted: Wanted) -> Iterator[Finding]:
    if machine.cores is not None:
        yield from judge_host.cores(machine.cores, wanted)
    if machine.memory is not None:
        yield from judge_host.memory(machine.memory, wanted)
    if "shm" not in machine.late:
        yield judge_host.shm(machine.shm)
    if machine.limits is not None:
        yield from judge_host.limits(machine.limits, wanted)
    if machine.logs is not None:
        yield from judge_host.logs(machine.logs)
    if machine.boards is not None:
        yield judge_host.boards(machine.boards)
    if "runtime_error" not in machine.late:
        yield judge_host.runtime(machine.runtime_error)


_NAMES = {
    "logs": "log dir",
    "boards": "tensorboard",
    "network": "host name",
    "runtime_error": "runtime folder",
    "shm": "/dev/shm",
}
_LATE = "A file system or a name server does not answer: look there first."
