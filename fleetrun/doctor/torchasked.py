"""Asks torch, in a process of its own: what it was built for, and whether a kernel runs on each device.
fleetrun itself never imports torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from fleetrun.doctor.facts import Torch

PATIENCE = 180.0
_MOST_TEXT = 300
_MARK = "fleetrun-doctor "

_ASK = """
import ctypes, json, sys, time
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: nobody would hear the answer
began = time.perf_counter()
try:
    import torch
    import torch.distributed as dist
except Exception as error:
    found = {"error": f"{type(error).__name__}: {error}"}
else:
    found = {"version": torch.__version__, "seconds": time.perf_counter() - began, "cuda": torch.version.cuda}
    names = ("gloo", "nccl", "mpi", "ucc") if dist.is_available() else ()
    names = [name for name in names if getattr(dist, f"is_{name}_available")()]
    found["backends"] = names
    if "nccl" in names and torch.version.cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    kernels = []
    for number in range(torch.cuda.device_count()):
        try:
            torch.ones(8, device=f"cuda:{number}").sum().item()
            kernels.append("")
        except Exception as error:
            kernels.append(f"{type(error).__name__}: {error}")
    found["kernels"] = kernels
sys.stdout.write("\\n" + MARK + json.dumps(found) + "\\n")
"""


def ask(environ: Mapping[str, str], python: str = sys.executable, patience: float = PATIENCE) -> Torch:
    """Import torch in `python` and ask it. Whatever goes wrong is in `error`."""
    # -P: a json.py in the current directory is in the way of this program, but not of a script elsewhere.
    program = [python, "-P", "-c", _ASK.replace("MARK", repr(_MARK))]
    try:
        done = subprocess.run(
            program,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"`import torch` has not ended after {patience:g} s")
    except OSError as error:
        return Torch(error=f"{python} cannot be run: {error.strerror}")
    lines = done.stdout.decode(errors="replace").splitlines()
    told = [line for line in lines if line.startswith(_MARK)]
    if not told:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = f"exit code {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
        return Torch(error=_short(f"`import torch` ended with {how}: {''.join(last)}"))
    return read(told[-1].removeprefix(_MARK))


def read(text: str) -> Torch:
    """What the process told; whatever is on the path may call itself torch."""
    try:
        found = json.loads(text)
    except ValueError:
        return Torch(error=_short(f"what torch said cannot be read: {text}"))
    if not isinstance(found, dict):
        return Torch(error=_short(f"what torch said cannot be read: {text}"))
    seconds = found.get("seconds")
    return Torch(
        version=_text(found, "version"),
        cuda=_text(found, "cuda"),
        nccl=_text(found, "nccl"),
        backends=_texts(found, "backends"),
        kernels=_texts(found, "kernels"),
        seconds=float(seconds) if isinstance(seconds, int | float) else 0.0,
        error=_text(found, "error"),
    )


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    return _short(value) if isinstance(value, str) else ""


def _texts(found: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = found.get(name)
    return tuple(_short(str(each)) for each in value) if isinstance(value, list) else ()


def _short(text: str) -> str:
    """One line of it."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..."
