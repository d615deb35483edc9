"""The kernel's OOM killer, for real where this user may bound some memory; and what the kernel's log says of
GPUs, with lines of our own in the real log.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetrun.pod.kernel_log import OomWatch, gpu_errors
from tests.support.isolated import isolated

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_BOUND = 32 << 20
_GREEDY = "data = bytearray(256 << 20); data[::4096] = b'x' * len(data[::4096])"


def bounded_group():
    """A new group with little memory, of whichever version; None where that may not be."""
    if (_V1 / "memory.limit_in_bytes").exists():
        group, limits = (
            _V1 / f"fleetrun-test-{os.getpid()}",
            ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
        )
    else:
        group, limits = _V2 / f"fleetrun-test-{os.getpid()}", ("memory.max", "memory.swap.max")
    try:
        group.mkdir()
        (group / limits[0]).write_text(str(_BOUND))
    except OSError:
        return None
    if (group / limits[1]).exists():
        (group / limits[1]).write_text(str(_BOUND if "memsw" in limits[1] else 0))
    return group


def killed_for_memory():
    group = bounded_group()
    if group is None:
        print("skipped")
        return
    home = next(
        (
            line.split(":")[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if ":memory:" in line
        ),
        "/",
    )
    root = group.parent
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        watch = OomWatch()
        plain = subprocess.Popen(["sleep", "100"])
        plain.kill()
        plain.wait()
        assert not watch.killed(plain.pid), "a SIGKILL of somebody else"
        greedy = subprocess.Popen([sys.executable, "-c", _GREEDY])
        assert greedy.wait() == -signal.SIGKILL
        assert watch.killed(greedy.pid)
        assert not watch.killed(plain.pid), "each kill of the kernel counts once"
    finally:
        (root / home.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@pytest.mark.slow
def test_a_process_that_the_kernel_killed_for_memory():
    if "skipped" in isolated(killed_for_memory):
        pytest.skip("this user may not bound memory")


def test_a_process_that_nobody_killed():
    watch = OomWatch()
    child = subprocess.Popen(["true"])
    child.wait()
    assert not watch.killed(child.pid)


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
    say(f"NVRM: Xid ({device}): 43, pid=7, name=python3, channel 0x0000000a")
    say(f"NVRM: GPU at {device} is well")
    assert [each for each in gpu_errors(began) if device[4:] in each] == [
        f"GPU {device[4:]}: Xid 79, pid=7, GPU has fallen off the bus."
    ]
