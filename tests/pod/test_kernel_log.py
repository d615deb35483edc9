"""What the kernel's log says of GPUs, with lines of our own in the real log."""

import os
import time
from pathlib import Path

import pytest

from fleetrun.pod.kernel_log import gpu_errors


@pytest.fixture
def say():
    """Writes a line into the kernel's log, as its drivers do."""
    try:
        with Path("/dev/kmsg").open("w") as log:
            yield lambda line: (log.write(f"<3>{line}\n"), log.flush())
    except PermissionError:
        pytest.skip("this user may not write into the kernel's log")


def test_errors_of_gpus_since_a_moment(say):
    device = f"PCI:0000:{os.getpid() % 256:02x}:00"
    say(f"NVRM: Xid ({device}): 48, an older one")
    time.sleep(0.05)
    began = time.time()
    time.sleep(0.05)
    for _ in range(2):
        say(f"NVRM: Xid ({device}): 79, pid=7, GPU has fallen off the bus.")
    say(f"NVRM: GPU at {device} is well")
    assert [each for each in gpu_errors(began) if device[4:] in each] == [
        f"GPU {device[4:]}: Xid 79, pid=7, GPU has fallen off the bus."
    ]
