"""The launchers under measurement: how each is called for the same job, and how its report names a rank."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

OURS = "fleetrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a launcher is asked to start."""

    script: Path
    folder: Path
    processes: int
    to_files: bool = False  # output to files only, where the launcher can
    restarts: int = 0
    stop_timeout: int | None = None  # seconds; only ours takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    name: str
    program: list[str]
    python: str  # what workers run under; torchrun and Paddle choose it themselves
    arguments: Callable[[Peer, Job], list[str]]
    version: str = ""
    usage_error: tuple[str, ...] = ("--no-such-option",)
    named_rank: str = ""  # finds the rank that the report blames
    first_rank: int = 0
    restarts: bool = False
    to_files: bool = True
    cli: bool = True
    in_python: bool = True
    slow: bool = False

    def command(self, job: Job) -> list[str]:
        return [*self.program, *self.arguments(self, job)]


def _fleetrun(peer: Peer, job: Job) -> list[str]:
    options = ["--nproc_per_node", str(job.processes), "--log_dir", str(job.folder / "log")]
    options += ["--max_restart", str(job.restarts)]
    options += ["--follow", "none"] if job.to_files else []
    options += ["--stop_timeout", str(job.stop_timeout)] if job.stop_timeout else []
    return [*options, str(job.script)]


def _torchrun(peer: Peer, job: Job) -> list[str]:
    options = ["--standalone", "--nproc-per-node", str(job.processes), "--max-restarts", str(job.restarts)]
    options += ["--log-dir", str(job.folder / "log"), "--redirects", "3"] if job.to_files else []
    return [*options, str(job.script)]


def _paddle(peer: Peer, job: Job) -> list[str]:
    options = ["--nproc_per_node", str(job.processes), "--log_dir", str(job.folder / "log")]
    options += ["--max_restart", str(job.restarts), "--elastic_level", "1"] if job.restarts else []
    return [*options, str(job.script)]


def _mpirun(peer: Peer, job: Job) -> list[str]:
    options = ["--oversubscribe", "--allow-run-as-root", "-n", str(job.processes)]
    options += ["--output-filename", f"{job.folder / 'log'}:nocopy"] if job.to_files else []
    return [*options, peer.python, str(job.script)]


def _honcho(peer: Peer, job: Job) -> list[str]:
    procfile = job.folder / "Procfile"
    procfile.write_text(f"w: {shlex.quote(peer.python)} {shlex.quote(str(job.script))}\n")
    return ["-f", str(procfile), "start", "-c", f"w={job.processes}"]


_LOOP = 'for ((i = 0; i < n; i++)); do RANK=$i "$@" & done; wait'
_LOOP_TO_FILES = 'mkdir "$d"; for ((i = 0; i < n; i++)); do RANK=$i "$@" >"$d/$i" 2>&1 & done; wait'


def _bash(peer: Peer, job: Job) -> list[str]:
    loop = _LOOP_TO_FILES if job.to_files else _LOOP
    parameters = [str(job.processes), str(job.folder / "log"), peer.python, str(job.script)]
    return ["-c", f"n=$1; d=$2; shift 2; {loop}", "loop", *parameters]


def ours(command: str) -> Peer:
    """The launcher given by --fleetrun. Raises FileNotFoundError when it is not there."""
    program = shlex.split(command)
    found = shutil.which(program[0])
    if found is None:
        raise FileNotFoundError(f"{program[0]} does not exist. Pass --fleetrun COMMAND.")
    beside = Path(found).absolute().with_name("python")
    python = str(beside) if beside.exists() else sys.executable
    return Peer(
        name=OURS,
        program=[found, *program[1:]],
        python=python,
        arguments=_fleetrun,
        version=_distribution(python, "fleetrun"),
        named_rank=r"First failure: trainer (\d+)",
        restarts=True,
    )


def installed(python: str) -> tuple[list[Peer], list[str]]:
    """The peers found on this machine, and a line for each that is not. `python` is for the workers of those
    that leave the choice."""
    wanted: list[tuple[str, str | None, Callable[[str, str], Peer]]] = [
        ("torchrun", _beside("TORCH_BIN", "torchrun"), _torchrun_peer),
        ("Paddle", _beside("PADDLE_BIN", "fleetrun", "paddle"), _paddle_peer),
        ("mpirun", shutil.which("mpirun"), _mpirun_peer),
        ("honcho", _honcho_path(), _honcho_peer),
        ("bash", shutil.which("bash"), _bash_peer),
    ]
    peers = [make(path, python) for _, path, make in wanted if path is not None]
    missing = [f"{name} is not installed, so it is not measured" for name, path, _ in wanted if path is None]
    return peers, missing


def _beside(variable: str, program: str, sign: str | None = None) -> str | None:
    """`program` in the folder that `variable` names, by default that of this interpreter. Where `sign` is
    given that must be there too: our command has the name of Paddle's."""
    folder = Path(os.environ.get(variable) or Path(sys.executable).parent)
    if sign is not None and not (folder / sign).exists():
        return None
    return shutil.which(program, path=str(folder))


def _honcho_path() -> str | None:
    folder = os.environ.get("HONCHO_BIN")
    return shutil.which("honcho", path=folder) if folder else shutil.which("honcho")


def _torchrun_peer(path: str, _: str) -> Peer:
    python = str(Path(path).with_name("python"))
    return Peer(
        name="torchrun",
        program=[path],
        python=python,
        arguments=_torchrun,
        version=_distribution(python, "torch"),
        named_rank=r"Root Cause.*?\n\s*rank\s*:\s*(\d+)",
        restarts=True,
        slow=True,
    )


def _paddle_peer(path: str, _: str) -> Peer:
    python = str(Path(path).with_name("python"))
    return Peer(
        name="Paddle",
        program=[path],
        python=python,
        arguments=_paddle,
        version=_distribution(python, "paddlepaddle"),
        usage_error=("--max_restart", "many"),  # it takes unknown options in silence
        named_rank=r"Container rank (\d+) status failed",
        restarts=True,
        slow=True,
    )


def _mpirun_peer(path: str, python: str) -> Peer:
    return Peer(
        name="mpirun",
        program=[path],
        python=python,
        arguments=_mpirun,
        version=_first_line(path, "--version").rpartition(" ")[2],
        named_rank=r"Process name: \[\[\d+,\d+\],(\d+)\]",
        in_python=False,
    )


def _honcho_peer(path: str, python: str) -> Peer:
    own = str(Path(path).with_name("python"))
    return Peer(
        name="honcho",
        program=[path],
        python=python,
        arguments=_honcho,
        version=_distribution(own if Path(own).exists() else sys.executable, "honcho"),
        named_rank=r"system\s+\| w\.(\d+) stopped \(rc=1\)",
        first_rank=1,
        to_files=False,
    )


def _bash_peer(path: str, python: str) -> Peer:
    version = _first_line(path, "-c", "echo ${BASH_VERSION%%(*}")
    return Peer(
        name="bash",
        program=[path],
        python=python,
        arguments=_bash,
        version=version,
        cli=False,
        in_python=False,
    )


def _distribution(python: str, name: str) -> str:
    return _first_line(python, "-c", f"from importlib.metadata import version; print(version({name!r}))")


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "?"
    return (done.stdout.splitlines() or ["?"])[0]
