"""Python, torch, drivers and devices: from facts to findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fleetrun.doctor.facts import Driver, Gpu, Machine, Torch, Wanted
from fleetrun.doctor.finding import Finding, failed, passed, plural, size, warned

SLOW_IMPORT = 30.0
MUCH_USED = 0.1
"""Of a device's memory, by others."""

_WHERE = "See pytorch.org/get-started for the build that fits this driver."


def python(facts: Machine) -> Finding:
    return passed("python", f"{facts.python}, fleetrun {facts.fleetrun}")


def torch(facts: Torch, wanted: Wanted) -> Iterator[Finding]:
    if facts.error:
        yield failed("torch", facts.error, "pip install torch, into the Python that runs fleetrun.")
        return
    parts = [facts.version, f"CUDA {facts.cuda}" if facts.cuda else "without CUDA"]
    if facts.nccl:
        parts.append(f"NCCL {facts.nccl}")
    found = f"{', '.join(parts)}, imported in {facts.seconds:.1f} s"
    if facts.seconds > SLOW_IMPORT:
        mend = "Every start and restart waits so long. Put the Python environment on a disk of this machine."
        yield warned("torch", found, mend)
    else:
        yield passed("torch", found)
    if wanted.backend in ("nccl", "gloo", "mpi", "ucc") and wanted.backend not in facts.backends:
        have = ", ".join(facts.backends) or "none"
        yield failed("backend", f"torch has no {wanted.backend}; it has {have}", "Choose another --backend.")


def devices(driver: Driver | None, torch: Torch | None, wanted: Wanted) -> Iterator[Finding]:
    if not wanted.devices:
        if wanted.named:
            kind = wanted.device_kind.upper()
            found = f"{plural(wanted.named, kind)} asked for, and none here: computing on CPUs"
            yield warned("devices", found, "Leave the option out, or see `nvidia-smi`.")
        else:
            yield passed("devices", f"no {wanted.device_kind.upper()} here: computing on CPUs")
        return
    yield _chosen(driver, wanted)
    if wanted.trainers > len(wanted.devices) and not wanted.servers:
        found = f"{plural(wanted.trainers, 'process')} for {plural(len(wanted.devices), 'device')}"
        yield warned("devices", f"{found}: none is bound to a process", "Start one process for each device.")
    if driver is not None:
        yield from _in_use(driver, wanted)
    if torch is not None and not torch.error and wanted.device_kind == "gpu":
        yield from _kernels(driver, torch, wanted)


def _chosen(driver: Driver | None, wanted: Wanted) -> Finding:
    found = f"{wanted.device_kind.upper()} {', '.join(wanted.devices)}"
    if driver is None:
        return passed("devices", found)
    if driver.error:
        mend = "See `nvidia-smi`; in a container, start it with the NVIDIA runtime."
        return failed("devices", f"{found}: the driver does not answer: {driver.error}", mend)
    names = list(dict.fromkeys(gpu.name for gpu in _mine(driver, wanted)))
    kinds = f" ({', '.join(names)})" if names else ""
    found += f"{kinds}, driver {driver.version}, CUDA up to {driver.cuda}"
    if len(names) > 1:
        return warned("devices", found, "Devices of several kinds: the slowest sets the pace.")
    return passed("devices", found)


def _mine(driver: Driver, wanted: Wanted) -> list[Gpu]:
    return [gpu for gpu in driver.gpus if gpu.id in wanted.devices]


def _in_use(driver: Driver, wanted: Wanted) -> Iterator[Finding]:
    for gpu in _mine(driver, wanted):
        if gpu.memory and gpu.used > MUCH_USED * gpu.memory:
            found = f"GPU {gpu.id}: {size(gpu.used)} of {size(gpu.memory)} are in use already"
            yield warned("device memory", found, "See who uses it: `nvidia-smi`.")
        if gpu.ecc:
            found = f"GPU {gpu.id}: {plural(gpu.ecc, 'memory error')} could not be corrected"
            yield warned("device memory", found, "Reset or replace the device.")


def _kernels(driver: Driver | None, torch: Torch, wanted: Wanted) -> Iterator[Finding]:
    """`kernels` are in the order of what torch sees, which is what the visibility variable leaves."""
    if not torch.kernels:
        why = "was built without CUDA" if not torch.cuda else "sees none"
        found = f"{plural(len(wanted.devices), 'GPU')} here, and torch {why}"
        yield failed("torch on GPUs", found, _mend(driver, torch, ""))
        return
    wrong = [(number, text) for number, text in enumerate(torch.kernels) if text]
    for number, text in wrong:
        yield failed("torch on GPUs", f"device {number}: {text}", _mend(driver, torch, text))
    if not wrong:
        yield passed("torch on GPUs", f"a kernel ran on {plural(len(torch.kernels), 'device')}")


def _mend(driver: Driver | None, torch: Torch, text: str) -> str:
    if driver is not None and _major(torch.cuda) > _major(driver.cuda) > 0:
        return (
            f"The driver runs CUDA up to {driver.cuda}, torch is for {torch.cuda}: update the driver, or "
            f"install torch for CUDA {_major(driver.cuda)}. {_WHERE}"
        )
    if not torch.cuda or "no kernel image" in text:
        return f"Install another build of torch. {_WHERE}"
    return "See `nvidia-smi` and the kernel's messages."


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0
