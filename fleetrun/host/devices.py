"""Count the accelerators of this host without torch, choose the devices of a job, and divide them among its
processes.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from fleetrun.aliases import Environ, Integers, Strings
from fleetrun.envs.contract import VISIBLE_VARIABLE
from fleetrun.errors import UsageError

# ---- Accelerators of this host, counted without torch

_DEVICE_FILES = {"gpu": "nvidia", "xpu": "xpu", "npu": "davinci"}
"""The start of the names of their files in /dev, before a number."""


def count_devices(kind: str) -> int:
    """Return the number of devices of this kind.

    NVML counts NVIDIA's devices, because it respects the limits of a container. Other devices are counted by
    their files in /dev.
    """
    start = _DEVICE_FILES[kind]
    behind = [each.name.removeprefix(start) for each in Path("/dev").iterdir() if each.name.startswith(start)]
    files = sum(each[:1].isdecimal() for each in behind)
    return _count_nvidia(files) if kind == "gpu" and files else files


def _count_nvidia(files: int) -> int:
    module = nvml()
    if module is None:
        return files
    try:
        return int(module.nvmlDeviceGetCount())
    finally:
        module.nvmlShutdown()


def nvml() -> ModuleType | None:
    """Return NVML, which is ready for calls, or None if this node lacks it."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return None
    except pynvml.NVMLError:
        return None
    module: ModuleType = pynvml
    return module


def detect(kind: str, environ: Environ) -> Strings:
    """Return the devices that this launcher may use: all, or those in the visibility variable.

    Devices are named as in the variable: numbers, GPU-... or MIG-....
    """
    value = environ.get(VISIBLE_VARIABLE[kind])
    if value is None:
        return tuple(map(str, range(count_devices(kind))))
    present = count_devices(kind)
    ids: list[str] = []
    for entry in filter(None, (part.strip() for part in value.split(","))):
        if entry.startswith("-") or (entry.isdecimal() and int(entry) >= present):
            break  # CUDA: a number without a device hides itself and all devices after it
        ids.append(entry)
    return tuple(ids) if present else ()


def choose(
    wanted: Strings,
    ids: Strings,
    kind: str,
    environ: Environ,
    origin: str = "--devices",
) -> Strings:
    """Return the ids of `--devices` after checking them against `ids` from `detect`. Without names, return
    all.

    If the visibility variable is set, ids are the ids in it (`CUDA_VISIBLE_DEVICES=4,5 --gpus 5`). If the
    variable holds names, numbers are positions in it. Raises UsageError, which shows both lists.
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
        several = f"{kind} 0 to {len(ids) - 1}" if len(ids) > 1 else f"only {kind} 0"
        there = f"{variable}={','.join(ids)}" if variable in environ else several
        raise UsageError(
            f"{origin} {','.join(wanted)}: {kind} {', '.join(missing)} does not exist; this node has {there}"
        )
    return chosen


# ---- Division among processes


def share(ids: Strings, index: int, size: int, *, whole_node: bool) -> tuple[Strings, Integers]:
    """Return the share of process `index` of `size`: the ids that it may see, and the positions of its own
    ids among them.

    With one device each, a process sees all devices of the node, so that LOCAL_RANK is its index, as with
    torchrun. With several each, or with `whole_node` off, a process sees only its own slice. If the devices
    cannot be divided evenly, each process uses one (Paddle). With more processes than devices, no device is
    assigned.
    """
    if size > len(ids) or not ids:
        return (), ()
    width = len(ids) // size if len(ids) % size == 0 else 1
    slice_ = ids[index * width : (index + 1) * width]
    if width == 1 and whole_node:
        return ids[:size], (index,)
    return slice_, tuple(range(width))
