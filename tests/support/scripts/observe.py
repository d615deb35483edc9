# ruff: noqa: E501, PTH109, PTH115, PTH208
"""Write everything that a process can observe of its start into the file OBSERVED, for tests/e2e/test_warm.py."""

import asyncio
import atexit
import faulthandler
import fcntl
import gc
import json
import locale
import logging
import multiprocessing
import os
import random
import re
import resource
import select
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import __main__

POD = os.environ["FLEETRUN_CONTAINER"].partition(".")[0]
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
STATUS = (
    "Umask", "Uid", "Gid", "Groups", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm",
    "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed", "Threads", "TracerPid",
    "CoreDumping", "THP_enabled",
)  # fmt: skip


def neutral(text):
    """Names and ports of a launch differ."""
    return re.sub(r"\b\d{4,}\b", "N", text.replace(POD, "POD"))


def environ(pairs):
    kept = {name: neutral(value) for name, value in pairs if not name.startswith(("FLEETTEST_", "NSYS_"))}
    return {name: value for name, value in kept.items() if name not in ("FLEETRUN_PROBE_SOCKET",)}


def child(method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        return pool.apply(abs, (-3,))


def failing():
    return subprocess.run([sys.executable, "-c", "import sys; sys.exit(3)"]).returncode


def proc(name):
    return Path("/proc/self", name).read_text(errors="replace")


def pending():
    return sorted(map(int, signal.sigpending()))


def observed():
    own = proc("stat").rpartition(")")[2].split()
    status = dict(line.split(":\t", 1) for line in proc("status").splitlines() if ":\t" in line)
    here = os.environ
    return {
        **{f"status {name}": status.get(name) for name in STATUS},
        **{f"limit {name}": resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "environ": environ(here.items()),
        "order of environ": list(environ(here.items())),
        "environ in C": environ(
            line.split("=", 1) for line in subprocess.run("env", text=True, stdout=-1).stdout.splitlines() if "=" in line
        ),
        "environ in proc": environ(
            each.split("=", 1) for each in proc("environ").split("\0") if "=" in each
        ),
        "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": str(sys.flags), "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions, "filters": str(warnings.filters), "path": sys.path,
        "prefix": [sys.prefix, sys.base_prefix, sys.executable], "pycache": sys.pycache_prefix,
        "bytecode": sys.dont_write_bytecode, "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(), "hooks": [str(hook.__name__) for hook in (sys.excepthook, sys.displayhook)],
        "trace": [sys.gettrace(), sys.getprofile()], "encodings": [sys.getfilesystemencoding(), locale.getlocale()],
        "importers": [getattr(each, "__name__", str(each)) for each in sys.path_hooks],
        "finders": [type(each).__name__ for each in sys.meta_path if type(each).__name__ != "Watch"],
        "main": [__main__.__name__, getattr(__main__, "__file__", None), __main__.__spec__ is None, __main__.__package__],
        "names of main": sorted(name for name in vars(__main__) if name.startswith("__")),
        "user site": [site.ENABLE_USER_SITE], "cwd": os.getcwd(), "umask": [os.umask(0o22), os.umask(0o22)],
        "comm": proc("comm"), "cmdline": proc("cmdline"), "exe": str(Path("/proc/self/exe").readlink()),
        "root": str(Path("/proc/self/root").readlink()), "cgroup": re.sub(r"/?fleetrun-\d+", "", proc("cgroup")),
        "oom": proc("oom_score_adj"), "personality": proc("personality"), "timer slack": proc("timerslack_ns"),
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "main thread": threading.main_thread().native_id == os.getpid() == threading.get_native_id(),
        "leader": os.getsid(0) == os.getpgrp() == os.getpid(), "tty": own[4], "nice": [os.nice(0), own[16]],
        "affinity": sorted(os.sched_getaffinity(0)), "scheduler": os.sched_getscheduler(0),
        "io": [stream.line_buffering for stream in (sys.stdout, sys.stderr)],
        "through": [stream.write_through for stream in (sys.stdout, sys.stderr)],
        "errors": [stream.errors for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "streams": [neutral(os.readlink(f"/proc/self/fd/{number}")) for number in (0, 1, 2)],
        "flags of streams": [fcntl.fcntl(number, fcntl.F_GETFL) for number in (0, 1, 2)],
        "inheritable": [os.get_inheritable(number) for number in (0, 1, 2)],
        "descriptors": sorted(os.listdir("/proc/self/fd"), key=int), "stdin": sys.stdin.read(),
        "handlers": {int(n): getattr(h := signal.getsignal(n), "__name__", str(h)) for n in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "pending": pending(),
        "wakeup": signal.set_wakeup_fd(-1), "alarm": signal.getitimer(signal.ITIMER_REAL),
        "faulthandler": faulthandler.is_enabled(), "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
        "garbage": len(gc.garbage), "log started now": abs(logging._startTime - time.time()) < 600,
        "loggers": [logging.root.level, len(logging.root.handlers)], "policy": str(asyncio._get_running_loop()),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
        "children": multiprocessing.active_children(), "temporary": tempfile.gettempdir(),
        "waits": select.select([], [], [], 0)[0], "exit code of a child": failing(),
        **{f"pool by {method}": child(method) for method in ("fork", "spawn", "forkserver")},
        "memory is counted": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 1000,
        "atexit": callable(atexit.register), "usable random": 0 <= random.random() < 1,
    }  # fmt: skip


if __name__ == "__main__":
    Path(os.environ["OBSERVED"]).write_text(json.dumps(observed(), indent=1))
