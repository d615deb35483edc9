"""Accelerators of this host: how many there are (counted without torch), which of them a job gets, and how
they are divided among its processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleetrun.aliases import Environ, Integers, Strings
from fleetrun.envs.contract import VISIBLE_VARIABLE
from fleetrun.errors import UsageError

# ---- Accelerators of this host, counted without torch

_DEVICE_FILES = {"gpu": "nvidia", "xpu": "xpu", "npu": "davinci"}
"""How their files in /dev begin, ahead of a number."""


def count_devices(kind: str) -> int:
    """How many there are. NVIDIA's are counted by NVML, which knows what a container may use; the others by
    their files.
    """
    start = _DEVICE_FILES[kind]
    behind = [each.name.removeprefix(start) for each in Path("/dev").iterdir() if each.name.startswith(start)]
    files = sum(each[:1].isdecimal() for each in behind)
    return _count_nvidia(files) if kind == "gpu" and files else files


def _count_nvidia(files: int) -> int:
    try:
        import pynvml
    except ImportError:
        return files
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return files
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def detect(kind: str, environ: Environ, count: Callable[[str], int] = count_devices) -> Strings:
    """The devices that this launcher may use, as the visibility variable names them (numbers, GPU-... or
    MIG-...): all, or those that the variable leaves.
    """
    value = environ.get(VISIBLE_VARIABLE[kind])
    if value is None:
        return tuple(map(str, range(count(kind))))
    present = count(kind)
    ids: list[str] = []
    for entry in filter(None, (part.strip() for part in value.split(","))):
        if entry.startswith("-") or (entry.isdecimal() and int(entry) >= present):
            break  # CUDA: a number without a device hides itself and all after it
        ids.append(entry)
    return tuple(ids) if present else ()


def choose(
    wanted: Strings,
    ids: Strings,
    kind: str,
    environ: Environ,
    origin: str = "--devices",
) -> Strings:
    """The ids of `--devices`, checked against those that `detect` found; all of them when none was named.

    Ids are those of the visibility variable where there is one (`CUDA_VISIBLE_DEVICES=4,5 --gpus 5`); with
    names there, numbers are positions. Raises UsageError that shows both lists.
    """
    if not wanted:
        return ids
    variable = VISIBLE_VARIABLE[kind]
    named = variable in environ and not all(each.isdigit() for each in ids)
    chosen = tuple(
        ids[int(each)] if named and each.isdigit() and int(each) < len(ids) else each for each in wanted
    )
    missing = [each for each in chosen if each not in ids]
    if missing:
        several = f"are {kind} 0 to {len(ids) - 1}" if len(ids) > 1 else f"is {kind} 0 only"
        there = f"is {variable}={','.join(ids)}" if variable in environ else several
        raise UsageError(
            f"{origin} {','.join(wanted)}: there is no {kind} {', '.join(missing)}; there {there}"
        )
    return chosen


# ---- Division among processes


def share(ids: Strings, index: int, size: int, *, whole_node: bool) -> tuple[Strings, Integers]:
    """The share of process `index` of `size`: the ids that it may see, and which of those are its own, by
    position.

    One device each, seen among all of the node's, so that LOCAL_RANK is its index (torchrun's custom);
    several each, or with `whole_node` off, each process sees its own slice only. Devices that do not divide
    evenly: as many as there are processes are used (Paddle). More processes than devices: none is bound.
    """
    if size > len(ids) or not ids:
        return (), ()
    width = len(ids) // size if len(ids) % size == 0 else 1
    slice_ = ids[index * width : (index + 1) * width]
    if width == 1 and whole_node:
        return ids[:size], (index,)
    return slice_, tuple(range(width))
