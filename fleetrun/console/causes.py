"""Hints for known causes of failures. They explain the last output and the end of a process, and suggest a
fix.

All functions are pure. Causes that the message itself explains, such as a script's own mistakes, need no
hint.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from fleetrun.pod.policy import BROKEN_GPU

_CAUSES = (
    # Memory, of the GPU and of the host
    (
        r"(?:CUDA|HIP) out of memory\. Tried to allocate ([\d.]+ \w+)",
        "The memory of the GPU had no room for {} more. Use fewer processes per GPU (--gpus), a smaller "
        "batch or activation checkpointing. `nvidia-smi` shows other programs on the GPU.",
    ),
    (
        r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "The memory of the GPU is full. Use fewer processes per GPU (--gpus), a smaller batch or activation "
        "checkpointing. `nvidia-smi` shows other programs on the GPU.",
    ),
    (
        r"DataLoader worker[^\n]*(?:Bus error|shared memory)"
        r"|unable to (?:allocate shared memory|write to file </torch)"
        r"|Unexpected bus error encountered in worker|No space left on device: '?/dev/shm",
        "/dev/shm is full: data loader workers pass batches through it. Make it larger (docker run "
        "--shm-size=8g, or --ipc=host; an emptyDir with medium Memory on Kubernetes), or use fewer "
        "workers.",
    ),
    (
        r"DataLoader worker[^\n]*killed by signal: Killed",
        "A data loader worker got SIGKILL, probably for lack of memory; see `dmesg`. Each worker has a "
        "copy of the data set's Python objects: use fewer workers, or keep the data in arrays.",
    ),
    (
        r"can't allocate memory: you tried to allocate (\d+) bytes",
        "{} bytes are more than this node has free, or than its limit allows (`ulimit -v`, the memory limit "
        "of the container). Often the script computed a wrong size.",
    ),
    (
        r"Cannot allocate memory|MemoryError|std::bad_alloc",
        "The memory of this node, or its limit (`ulimit -v`, the container), is used up. Every process of a "
        "node loads its own copy of the data.",
    ),
    # Limits and disks
    (
        r"Too many open files|received 0 items of ancdata",
        "The limit of open files is reached. Run `ulimit -n 65536` before fleetrun, or for data loaders "
        "call torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    (
        r"can't start new thread|pthread_create failed|blas_thread_init"
        r"|fork: [^\n]*Resource temporarily"
        r"|BlockingIOError: \[Errno 11\] Resource temporarily unavailable",
        "The limit of processes and threads is reached: `ulimit -u`, or pids.max of the container. "
        "OMP_NUM_THREADS=1 and fewer data loader workers need fewer.",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "A disk or a quota is full; see `df -h`, `df -i`, `quota`.",
    ),
    (
        r"File too large",
        "The file would be larger than `ulimit -f` or the file system allows.",
    ),
    (
        r"Read-only file system",
        "Containers mount volumes read-only on purpose, and the kernel does so after errors of a disk "
        "(`dmesg`).",
    ),
    (
        r"Stale file handle|Input/output error|Transport endpoint is not connected",
        "A disk or a network file system has failed. See `dmesg`, and check that this node has the mount.",
    ),
    (
        r"No usable temporary directory found",
        "Python can write into none of the temporary directories: set TMPDIR to one with room.",
    ),
    # Network
    (
        r"Address already in use|EADDRINUSE",
        "Another process has the port, perhaps of an earlier job; see `ss -ltnp`. fleetrun holds the "
        "ports that it gives out until a process binds them, with SO_REUSEADDR: use MASTER_PORT or "
        "PADDLE_CURRENT_ENDPOINT instead of a port of your own.",
    ),
    (
        r"Cannot assign requested address|EADDRNOTAVAIL",
        "The address does not belong to this node: see `ip addr`, --host and the order of --ips.",
    ),
    (
        r"Name or service not known|Temporary failure in name resolution"
        r"|No address associated with hostname",
        "A host name cannot be resolved on this node: use an address, or see /etc/hosts and "
        "/etc/resolv.conf.",
    ),
    (
        r"Duplicate GPU detected",
        "Two ranks use one GPU: call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first "
        "collective, and give every rank its own GPU (--gpus).",
    ),
    (
        r"[Nn]o socket interface found|socketStartConnect[^\n]*failed|No route to host"
        r"|Network is unreachable",
        "The nodes cannot reach each other on the chosen network: name the interface that leads to the "
        "others with NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (`ip route get ADDRESS`), and open the "
        "firewall between the nodes. `fleetrun doctor` with the same --master measures the links.",
    ),
    (
        r"connectFullMesh failed[^\n]*remote=\[127\.",
        "Gloo received a loopback address for a rank. On several nodes, the host name of one node means "
        "127.0.0.1 there: name the interface with GLOO_SOCKET_IFNAME, or give the name its address in "
        "/etc/hosts (`fleetrun doctor` with the same --master shows which). On one node, this rank has "
        "ended.",
    ),
    (
        r"ncclSystemError|ncclInternalError|ncclUnhandledCudaError|unhandled (?:cuda|system) error",
        "NCCL could not continue; NCCL_DEBUG=WARN shows why, which is often a full /dev/shm,"
        " a network interface, or a GPU that has failed.",
    ),
    (
        r"client socket has timed out after \d+\s?ms while trying to connect to \(([^,)]+), (\d+)\)",
        "No process listens at {}:{}: rank 0 has not started to listen, has ended, or is behind a firewall.",
    ),
    # GPUs and their driver
    (
        BROKEN_GPU + r"|Unable to determine the device handle",
        "The GPU has failed: `nvidia-smi -q` and `dmesg | grep Xid` name it. Reset it, or avoid this node.",
    ),
    (
        r"device-side assert triggered",
        "An index was out of range on the GPU, often a label or a token beyond the classes. The line above "
        "is a later line. CUDA_LAUNCH_BLOCKING=1 shows the call, and a run on the CPU shows the value.",
    ),
    (
        r"no kernel image is available for execution",
        "This torch was not built for this GPU: install the build for its architecture "
        "(torch.cuda.get_arch_list()).",
    ),
    (
        r"driver version is insufficient|NVIDIA driver on your system is too old",
        "The NVIDIA driver is older than this torch needs: update it, or install the torch build of an "
        "older CUDA.",
    ),
    (
        r"Torch not compiled with CUDA enabled",
        "This torch is a build without CUDA: install the CUDA build, or run on the CPU.",
    ),
    (
        r"Found no NVIDIA driver|No CUDA GPUs are available|no CUDA-capable device is detected",
        "This process sees no GPU: see `nvidia-smi` here, CUDA_VISIBLE_DEVICES, and whether the "
        "container was started with GPUs (docker run --gpus all).",
    ),
    (
        r"invalid device ordinal",
        "The script asks for a GPU that the process does not see: use LOCAL_RANK, not RANK, for the "
        "device; CUDA_VISIBLE_DEVICES of the process is in its environment (`fleetrun --dry_run`).",
    ),
    (
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA does not survive a fork: start the workers with multiprocessing_context='spawn', or touch"
        " CUDA only after they have started.",
    ),
    (
        r"on a CUDA device but torch\.cuda\.is_available\(\) is False",
        "The checkpoint was written on a GPU: torch.load(..., map_location='cpu').",
    ),
    # Installations
    (
        r"version `(GLIBC\w*_[\d.]+)' not found",
        "A library was built for a newer system with {}: install conda's `libstdcxx-ng`, or another build.",
    ),
    (
        r"(lib[\w+.-]+\.so[\w.]*): cannot open shared object file",
        "The library {} is not installed on this node, or not in LD_LIBRARY_PATH. `ldd` shows its user.",
    ),
    (
        r"undefined symbol: (\S+)",
        "An extension was built for another version of the library that it uses (torch, most often): "
        "install both from one source, and the same on every node.",
    ),
    (
        r"compiled using NumPy 1\.x|numpy\.dtype size changed|numpy\.core\.multiarray failed to import",
        "An extension was built for another NumPy: `pip install 'numpy<2'`, or a newer version of the "
        "extension.",
    ),
    (
        r"partially initialized module '([\w.]+)' [^\n]*circular import",
        "A file of yours may have the name of the module {}, which Python then imports instead: rename "
        "it.",
    ),
    (r"No module named '(?:numba|llvmlite)'", "Parameter servers need it: pip install 'fleetrun[ps]'."),
    (r"No module named 'pkg_resources'", "Newer setuptools lack this module: pip install 'setuptools<81'."),
    (
        r"No module named 'paddle\b",
        "fleetrun does not contain paddle: `from trainers import fleet` has the same calls, for torch. See "
        "`fleetrun help paddle`.",
    ),
    (
        r"No module named '([\w.]+)'",
        "The Python of this node does not find {}. fleetrun starts the Python in which fleetrun is "
        "installed. Run `python -m pip install` with this Python, or activate the right environment first.",
    ),
    (
        r"certificate is not yet valid|certificate has expired",
        "Either the certificate or the clock of this node is wrong; see `date`.",
    ),
    # Processes
    (
        r"finished its\s+bootstrapping phase",
        'The script has no `if __name__ == "__main__":` around its start: every worker that is spawned '
        "imports it again.",
    ),
    (
        r"what \S+ returned cannot be pickled",
        "What a trainer returns is pickled for the caller: return numbers, arrays or state_dict(), and no "
        "locks, generators or open files.",
    ),
    (
        r"[Cc]an't pickle|cannot pickle '|Can't get local object",
        "What goes to a spawned process must be pickled: no lambdas, local classes or open files in "
        "data sets and collate functions.",
    ),
    (
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) exited unexpectedly",
        "A data loader worker died without a message: num_workers=0 shows its error.",
    ),
    (
        r"bdb\.BdbQuit",
        "pdb needs a terminal, and fleetrun's processes have none. `fleetrun debug` needs --probe on, and a "
        "breakpoint in the process of the rank itself.",
    ),
    # Checkpoints
    (
        r"failed finding central directory|PytorchStreamReader failed|EOFError: Ran out of input"
        r"|invalid header or archive is corrupted|HeaderTooSmall|MetadataIncompleteBuffer",
        "A checkpoint is cut short: it was being written when a job was stopped, or is still being "
        "written by another rank. Load the one before it; write to a temporary name and rename.",
    ),
    (
        r"Weights only load failed",
        "The checkpoint holds more than tensors: torch.load(..., weights_only=False) if you trust the "
        "file.",
    ),
    (
        r'Error\(s\) in loading state_dict.*"module\.',
        "Names with `module.` come from a model in DistributedDataParallel: save "
        "model.module.state_dict(), or load before wrapping, with the prefix removed.",
    ),
    (
        r"Error\(s\) in loading state_dict",
        "The checkpoint is of another model: other layers, sizes, or a newer version of the script.",
    ),
    # Collectives and training
    (
        r"Expected to have finished reduction in the prior iteration",
        "Some parameters get no gradient in some steps: DistributedDataParallel(..., "
        "find_unused_parameters=True), or use all of them.",
    ),
    (
        r"Default process group has not been initialized",
        "torch.distributed.init_process_group() must come first in every process, data loader workers "
        "too.",
    ),
    (
        r"returned nan values in its|[Ll]oss is (?:nan|inf)|(?:nan|NaN|inf) (?:loss|gradient)",
        "The training has diverged, and a restart from the same checkpoint repeats this. Try a smaller "
        "learning rate or gradient clipping, or look at the batch of this step. "
        "torch.autograd.set_detect_anomaly names the operation.",
    ),
    # Errors after another rank has ended
    (
        r"[Cc]onnection (?:closed|reset) by (?:remote )?peer|Broken pipe|Socket closed|recvValue failed",
        "The rank at the other end has ended or has closed its connections: look at how it ended.",
    ),
    (
        r"Timed out after \d+ seconds waiting for clients\. (\d+/\d+) clients joined",
        "Only {} ranks reached init_process_group within its timeout. The others have ended, or cannot "
        "reach MASTER_ADDR and MASTER_PORT of rank 0; their logs show which.",
    ),
    (
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for|timed out waiting for",
        "A collective waited longer than the timeout of its process group for a rank that never arrived. "
        "`fleetrun why` names this rank while the job waits.",
    ),
)  # fmt: skip
"""Patterns with their hints, specific patterns first. Each `{}` is replaced by a group of the pattern."""

_SIGNALS: dict[int, str] = {
    signal.SIGSEGV: "A segmentation fault is in native code, or a stack that is too deep (`ulimit -s`). "
    "PYTHONFAULTHANDLER=1 writes the Python stack into the log.",
    signal.SIGBUS: "A bus error comes from /dev/shm or a mapped file that was full or became shorter: see "
    "`df -h /dev/shm`.",
    signal.SIGILL: "An illegal instruction comes from a library that was built for a newer CPU than this "
    "node has (`lscpu`).",
    signal.SIGFPE: "Native code divided an integer by zero: an empty batch, or a length of 0.",
    signal.SIGXCPU: "The limit of CPU time is used up: `ulimit -t`, or that of the batch system.",
    signal.SIGXFSZ: "A file would have become larger than `ulimit -f` allows.",
}


def known_cause(evidence: Sequence[str], ended_by: int | None) -> str:
    """Return the probable cause of a failure with a fix, or an empty string.

    `evidence`: texts of the process, the most useful first (its exception, then its last lines). The first
    text that matches a pattern counts. `ended_by`: the signal that ended the process.
    """
    for text in evidence:
        for pattern, hint in _CAUSES:
            if (found := re.search(pattern, text, re.DOTALL)) is not None:
                return hint.format(*found.groups())
    return _SIGNALS.get(ended_by or 0, "")
