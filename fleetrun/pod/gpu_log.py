"""Log the use, memory, temperature and power of each GPU every five seconds.

The file is `<job>.<pod>.gpu.log`. The log needs NVML.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from fleetrun.host.devices import nvml
from fleetrun.pod.logs import open_log
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import PodSpec

_PERIOD = 5.0

Sample = Callable[[], list[str]]


class GpuLog:
    def __init__(self, path: Path, loop: Loop, sample: Sample) -> None:
        self._fd = open_log(path)
        self._loop = loop
        self._sample = sample

    @classmethod
    def start(cls, spec: PodSpec, loop: Loop) -> None:
        """Start logging, if NVML is available."""
        sample = nvml_sample()
        if sample is not None:
            cls(spec.log_dir / f"{spec.job_id}.{spec.name}.gpu.log", loop, sample).write()

    def write(self) -> None:
        """Write one line per GPU now, and again after each period. A full disk must not end a job."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError):
            os.write(self._fd, "".join(f"{stamp} {row}\n" for row in self._sample()).encode())
        self._loop.after(_PERIOD, self.write)


def nvml_sample() -> Sample | None:
    """Return a function that reads all GPUs, or None without NVML."""
    module = nvml()
    if module is None:
        return None
    try:
        handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]
    except module.NVMLError:
        return None
    return lambda: [_row(module, number, handle) for number, handle in enumerate(handles)]


def _row(nvml: ModuleType, number: int, handle: object) -> str:
    try:
        use = nvml.nvmlDeviceGetUtilizationRates(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        heat = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        power = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    except nvml.NVMLError as error:
        return f"gpu {number}: {error}"
    used = f"{use.gpu} % used, {memory.used >> 20} of {memory.total >> 20} MiB"
    return f"gpu {number}: {used}, {heat} C, {power:.0f} W"
