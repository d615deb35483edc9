"""What a report says of failures with known causes: the messages are made by the real causes where a machine
without GPUs can make them, else they are the words of CUDA, NCCL or the kernel.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleetrun.console.causes import known_cause

FAILED = None
LIMIT = """import os, resource, socket, threading
def limit(name, soft, hard=None):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard or soft))
"""
SPAWNED = """from multiprocessing import get_context
worker = get_context("spawn").Process()
worker.start()
worker.join()
exit(worker.exitcode)"""
SHORTENED = """import mmap
with open("data", "w+b") as file:
    file.truncate(9)
    mapped = mmap.mmap(file.fileno(), 9)
    file.truncate(0)
    mapped[0]"""
TOO_LARGE = "import signal; signal.signal(25, signal.SIG_DFL); limit('FSIZE', 1); open('f', 'w').write('xx')"
REAL = {
    "bytearray(1 << 60)": "memory of this node",
    "limit('AS', 1 << 28); bytearray(1 << 29)": "ulimit -v",
    "limit('NOFILE', 20); held = [open('/dev/null') for _ in range(20)]": "ulimit -n",
    "limit('AS', 1 << 28); threading.stack_size(1 << 29); threading.Thread(target=id).start()": "ulimit -u",
    "os.write(os.open('/dev/full', os.O_WRONLY), b'x')": "df -h",
    "limit('FSIZE', 1); open('file', 'wb', 0).write(b'x'); open('file', 'ab', 0).write(b'x')": "ulimit -f",
    "import tempfile; limit('FSIZE', 0); tempfile.mkstemp()": "TMPDIR",
    "raise OSError(30, os.strerror(30))": "read-only",
    "raise OSError(5, os.strerror(5))": "dmesg",
    "raise OSError(116, os.strerror(116))": "mount",
    "raise OSError(122, os.strerror(122))": "quota",
    "a = socket.create_server(('127.0.0.1', 0)); socket.create_server(a.getsockname())": "ss -ltnp",
    "socket.create_server(('192.0.2.1', 0))": "--host",
    "socket.getaddrinfo('node7', 1, flags=socket.AI_NUMERICHOST)": "/etc/hosts",
    "raise OSError(113, os.strerror(113))": "NCCL_SOCKET_IFNAME",
    "r, w = os.pipe(); os.close(r); os.write(w, b'x')": "other end",
    "import ctypes; ctypes.CDLL('libcudart.so.12')": "libcudart.so.12",
    "import ctypes; ctypes.CDLL(None).of_another_version": "another version",
    "import none_of_this_name.part": "does not find none_of_this_name",
    "import pkg_resources": "setuptools<81",
    "import paddle": "fleetrun help paddle",
    "raise ModuleNotFoundError(\"No module named 'llvmlite'\")": "'fleetrun[ps]'",
    "breakpoint()": "fleetrun debug",
    "import pickle; pickle.loads(b'')": "cut short",
    "import pickle; pickle.dumps(lambda: 0)": "lambdas",
    SPAWNED: "__main__",
}


def failure_of(text: str, folder: Path) -> tuple[str, int | None]:
    (folder / "train.py").write_text(LIMIT + text)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stderr, -done.returncode if done.returncode < 0 else None


@pytest.mark.parametrize(("text", "noun"), REAL.items())
def test_of_python_and_the_system(text: str, noun: str, tmp_path: Path):
    said, ended_by = failure_of(text, tmp_path)
    assert noun in known_cause([said], ended_by), said


def test_a_file_with_the_name_of_a_module(tmp_path: Path):
    (tmp_path / "json.py").write_text("import json\njson.loads('1')")
    said, ended_by = failure_of("import json", tmp_path)
    assert "module json" in known_cause([said], ended_by), said


@pytest.mark.parametrize(
    ("text", "noun"),
    [
        ("import ctypes; ctypes.string_at(0)", "segmentation"),
        (SHORTENED, "/dev/shm"),
        (TOO_LARGE, "ulimit -f"),
        ("limit('CPU', 1, 9)\nwhile True: pass", "ulimit -t"),
        ("os.kill(os.getpid(), 4)", "CPU"),
        ("os.kill(os.getpid(), 8)", "zero"),
    ],
)  # fmt: skip
def test_of_signals(text: str, noun: str, tmp_path: Path):
    said, ended_by = failure_of(text, tmp_path)
    assert ended_by is not None, said
    assert noun in known_cause([said], ended_by)


OF_TORCH = {
    "memory": "4503599627370496 bytes",
    "shared_memory": "--shm-size",
    "worker_killed": "SIGKILL",
    "other_model": "another model",
    "wrapped_model": "DistributedDataParallel",
    "cut_short": "cut short",
    "more_than_tensors": "weights_only",
    "no_group": "init_process_group",
    "no_cuda": "without CUDA",
    "unused_parameters": "find_unused_parameters",
    "not_a_number": "diverged",
    "nobody_listens": "listens at 127.0.0.1:",
    "port_taken": "ss -ltnp",
    "from_a_gpu": "map_location",
}


@pytest.mark.slow
def test_of_torch(tmp_path: Path):
    script = Path(__file__).parents[1] / "support" / "scripts" / "causes_of_torch.py"
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec"
    command = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        f'{small} "$0" "$@"',
        sys.executable,
        script,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = json.loads(done.stdout)
    assert said.keys() == OF_TORCH.keys()
    for name, noun in OF_TORCH.items():
        assert noun in known_cause([said[name]], FAILED), said[name]


WORDS = {
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB": "2.50 GiB",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling": "nvidia-smi",
    "RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error.": "--shm-size",
    "RuntimeError: DataLoader worker (pid 71) exited unexpectedly": "num_workers=0",
    "RuntimeError: received 0 items of ancdata": "ulimit -n",
    "OpenBLAS blas_thread_init: pthread_create failed for thread 7 of 64": "ulimit -u",
    "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 3b000": "LOCAL_RANK",
    "Last error:\nsocketStartConnect: Connect to 192.0.2.14<52> failed : No route": "NCCL_SOCKET_IFNAME",
    "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: "
    "Connection refused, remote=[127.0.0.1]:7065$0": "/etc/hosts",
    "ncclInternalError: \nBootstrap : no socket interface found": "GLOO_SOCKET_IFNAME",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed": "NCCL_DEBUG",
    "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered": "Xid",
    "RuntimeError: CUDA error: device-side assert triggered": "CUDA_LAUNCH_BLOCKING",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device": "architecture",
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": "driver",
    "RuntimeError: Found no NVIDIA driver on your system.": "docker",
    "RuntimeError: CUDA error: invalid device ordinal": "LOCAL_RANK",
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess.": "spawn",
    "ImportError: /lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found": "GLIBCXX_3.4.32",
    "ValueError: numpy.dtype size changed, may indicate binary incompatibility.": "numpy<2",
    "ssl.SSLCertVerificationError: certificate verify failed: certificate is not yet valid": "clock",
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4567": "other end",
    "RuntimeError: Timed out waiting 8000ms for send operation to complete": "fleetrun why",
    "DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.": "1/2 ranks",
    "Loss is nan, stopping training": "diverged",
}


@pytest.mark.parametrize(("said", "noun"), WORDS.items())
def test_of_gpus_and_others(said: str, noun: str):
    assert noun in known_cause([said], FAILED)


def test_the_exception_counts_before_what_was_printed_earlier():
    printed = "OSError: [Errno 28] No space left on device"
    assert "ulimit -n" in known_cause(["OSError: [Errno 24] Too many open files", printed], FAILED)
    assert "df -h" in known_cause(["ValueError: a mistake of the script", printed], FAILED)


@pytest.mark.parametrize("ended_by", [None, signal.SIGKILL, signal.SIGRTMIN])
def test_what_is_not_known(ended_by: int | None):
    assert known_cause(["", "AssertionError: loss went up", "epoch 3"], ended_by) == ""
