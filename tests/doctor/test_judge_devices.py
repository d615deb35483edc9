"""Torch, drivers and devices: tables of facts."""

from dataclasses import replace

import pytest

from fleetrun.doctor import judge_machine
from fleetrun.doctor.facts import Driver, Gpu, Torch, Verdict, Wanted

GIB = 1 << 30
PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL

GPUS = tuple(Gpu(id=id_, name="H100", memory=80 * GIB) for id_ in ("0", "1"))
DRIVER = Driver(version="550.54", cuda="12.4", gpus=GPUS)
TORCH = Torch(version="2.6.0", cuda="12.6", nccl="2.21.5", backends=("gloo", "nccl"), kernels=("", ""))
TWO = Wanted(processes=2, trainers=2, devices=("0", "1"))


def verdicts(findings: object) -> list[tuple[str, Verdict]]:
    return [(each.check, each.verdict) for each in findings]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("facts", "wanted", "expected"),
    [
        (TORCH, TWO, [("torch", PASS)]),
        (replace(TORCH, error="ModuleNotFoundError: no torch"), TWO, [("torch", FAIL)]),
        (replace(TORCH, seconds=90.0), TWO, [("torch", WARN)]),
        (TORCH, replace(TWO, backend="nccl"), [("torch", PASS)]),
        (
            replace(TORCH, backends=("gloo",)),
            replace(TWO, backend="nccl"),
            [("torch", PASS), ("backend", FAIL)],
        ),
        (replace(TORCH, backends=("gloo",)), replace(TWO, backend="hccl"), [("torch", PASS)]),
    ],
)
def test_torch(facts: Torch, wanted: Wanted, expected: list[tuple[str, Verdict]]) -> None:
    assert verdicts(judge_machine.torch(facts, wanted)) == expected


ON_GPUS = "torch on GPUs"


@pytest.mark.parametrize(
    ("driver", "torch", "wanted", "expected"),
    [
        (None, TORCH, Wanted(), [("devices", PASS)]),
        (None, TORCH, Wanted(named=2), [("devices", WARN)]),
        (DRIVER, TORCH, TWO, [("devices", PASS), (ON_GPUS, PASS)]),
        (DRIVER, None, TWO, [("devices", PASS)]),
        (Driver(error="Driver/library version mismatch"), None, TWO, [("devices", FAIL)]),
        (DRIVER, replace(TORCH, kernels=()), TWO, [("devices", PASS), (ON_GPUS, FAIL)]),
        (DRIVER, replace(TORCH, kernels=("", "bad")), TWO, [("devices", PASS), (ON_GPUS, FAIL)]),
        (DRIVER, replace(TORCH, error="no torch", kernels=()), TWO, [("devices", PASS)]),
        (DRIVER, None, replace(TWO, trainers=4), [("devices", PASS), ("devices", WARN)]),
        (DRIVER, None, replace(TWO, trainers=4, servers=True), [("devices", PASS)]),
        (
            replace(DRIVER, gpus=(GPUS[0], replace(GPUS[1], used=40 * GIB))), None, TWO,
            [("devices", PASS), ("device memory", WARN)],
        ),
        (
            replace(DRIVER, gpus=(GPUS[0], replace(GPUS[1], ecc=1))), None, TWO,
            [("devices", PASS), ("device memory", WARN)],
        ),
        (replace(DRIVER, gpus=(GPUS[0], replace(GPUS[1], name="A100"))), None, TWO, [("devices", WARN)]),
        (replace(DRIVER, gpus=(replace(GPUS[0], used=40 * GIB),)), None, replace(TWO, devices=("1", "2")),
         [("devices", PASS)]),
        (None, TORCH, replace(TWO, device_kind="npu"), [("devices", PASS)]),
    ],
)  # fmt: skip
def test_devices(
    driver: Driver | None, torch: Torch | None, wanted: Wanted, expected: list[tuple[str, Verdict]]
) -> None:
    assert verdicts(judge_machine.devices(driver, torch, wanted)) == expected


@pytest.mark.parametrize(
    ("torch", "mend"),
    [
        (replace(TORCH, cuda="13.0", kernels=()), "update the driver, or install torch for CUDA 12"),
        (replace(TORCH, cuda="", kernels=()), "another build of torch"),
        (replace(TORCH, kernels=("CUDA error: no kernel image is available", "")), "another build of torch"),
        (replace(TORCH, kernels=("CUDA error: out of memory", "")), "nvidia-smi"),
    ],
)
def test_the_mend_follows_from_the_error(torch: Torch, mend: str) -> None:
    *_, last = judge_machine.devices(DRIVER, torch, TWO)
    assert last.verdict is FAIL
    assert mend in last.mend
