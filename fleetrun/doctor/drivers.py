"""What NVIDIA's driver says of its devices (NVML). Starts nothing on them."""

from __future__ import annotations

from collections.abc import Sequence

from fleetrun.doctor.facts import Driver, Gpu

_LONGEST_TEXT = 100


def ask(ids: Sequence[str]) -> Driver:
    """Of the devices with these ids (numbers or UUIDs, as the visibility variable has them)."""
    try:
        import pynvml
    except ImportError:
        return Driver(error="nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Driver(error=str(error)[:_LONGEST_TEXT])
    try:
        version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        gpus = [_gpu(each) for each in ids]
        return Driver(
            version=_text(pynvml.nvmlSystemGetDriverVersion()),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            gpus=tuple(gpu for gpu in gpus if gpu is not None),
        )
    except pynvml.NVMLError as error:
        return Driver(error=str(error)[:_LONGEST_TEXT])
    finally:
        pynvml.nvmlShutdown()


def _gpu(id_: str) -> Gpu | None:
    """None for what NVML does not find under this id (a MIG slice)."""
    import pynvml

    try:
        if id_.isdecimal():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(id_))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(id_)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = _text(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:
        return None
    try:
        ecc = pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        )
    except pynvml.NVMLError:  # memory without ECC
        ecc = 0
    return Gpu(id=id_, name=name, memory=int(memory.total), used=int(memory.used), ecc=int(ecc))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
