"""A real Slurm on this machine: munged, slurmctld and two slurmd, in a folder, on free ports, as one context.

Debian's packages are enough (`PACKAGES`); no service of the system is touched. Ends with everything that it
started: daemons, step daemons and whatever jobs were left.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command import environment
from tests.support.ports import free_port
from tests.support.waiting import eventually

PACKAGES = "slurmctld slurmd slurm-client munge"
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "setpriv")
_CONF = """
ClusterName={name}
SlurmctldHost={host}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdParameters=config_overrides
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
KillWait=5
MinJobAge=300
SlurmdTimeout={slurmd_timeout}
InactiveLimit=0
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
_NODE = "NodeName={node} NodeHostname={host} NodeAddr={address} Port={port} CPUs=8 RealMemory=1000"


def missing() -> str:
    """Why there can be no Slurm here; empty when there can."""
    if os.getuid() != 0:
        return "only root can run slurmd"
    lacking = [program for program in _PROGRAMS if shutil.which(program, path=_path()) is None]
    return f"not installed: {', '.join(lacking)} (packages {PACKAGES})" if lacking else ""


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a node's daemon runs. `enter` is a command that runs another there."""

    host: str = field(default_factory=socket.gethostname)
    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


class Slurm:
    """A running cluster of nodes, in the default partition. The controller is beside the first of them."""

    def __init__(self, folder: Path, nodes: Mapping[str, Machine], *, slurmd_timeout: int = 10) -> None:
        self.folder = folder
        self.nodes = nodes
        self.first = next(iter(nodes.values()))
        self.conf = folder / "slurm.conf"
        self.env = {
            "SLURM_CONF": str(self.conf),
            "PATH": _path(),
            "XDG_CACHE_HOME": str(folder / "cache"),  # of --sync; the nodes share it, as a home
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._write_conf(slurmd_timeout)

    def _write_conf(self, slurmd_timeout: int) -> None:
        controller, *ports = (free_port() for _ in range(1 + len(self.nodes)))
        lines = [
            _NODE.format(node=node, host=machine.host, address=machine.address, port=port)
            for (node, machine), port in zip(self.nodes.items(), ports, strict=True)
        ]
        for name in ("state", "munge", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        self.conf.write_text(
            _CONF.format(
                name=f"test{os.getpid()}",
                host=self.first.host,
                address=self.first.address,
                folder=self.folder,
                controller=controller,
                slurmd_timeout=slurmd_timeout,
                nodes="\n".join(lines),
            )
        )

    def start(self) -> None:
        """Until every node is idle."""
        self._start_munge()
        self._start("slurmctld", *self.first.enter, "slurmctld", "-D", "-f", str(self.conf))
        for node in self.nodes:
            self.start_node(node)
        eventually(lambda: self.idle() == len(self.nodes))

    def start_node(self, node: str) -> None:
        self._start(node, *self.nodes[node].enter, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(1024))
        owner = pwd.getpwnam("munge")
        for path in (folder, folder / "key"):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        (folder / "key").chmod(0o400)
        folder.chmod(0o755)
        files = {
            "key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed",
        }  # fmt: skip
        options = [f"--{option}={folder / name}" for option, name in files.items()]
        # setpriv and not runuser: it becomes the daemon, so that its end is the daemon's.
        user = ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]
        self._start("munge", *user, "munged", "--foreground", "--force", *options)
        eventually((folder / "socket").exists)

    def _start(self, name: str, *argv: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                argv, env=environment(self.env), stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def idle(self) -> int:
        """How many nodes wait for work."""
        done = self.call("sinfo", "-h", "-N", "-o", "%T", check=False)
        return done.stdout.split().count("idle")

    def call(self, *argv: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        """A Slurm command to its end."""
        return subprocess.run(
            [*self.first.enter, *argv],
            env=environment(self.env),
            capture_output=True,
            text=True,
            timeout=60,
            check=check,
            **options,
        )  # type: ignore[call-overload,no-any-return]

    def states(self) -> Mapping[str, str]:
        """Job id to state, of all jobs that the controller remembers."""
        done = self.call("squeue", "-h", "-t", "all", "-o", "%i %T")
        return dict(line.split() for line in done.stdout.splitlines())

    def lose(self, node: str) -> None:
        """The node vanishes: its daemon and all below it are killed at once."""
        daemon = self.daemons.pop(node)
        for pid in [daemon.pid, *self._steps(node)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def _steps(self, node: str) -> list[int]:
        """What runs on a node for jobs, the step daemons too."""
        mark = {f"SLURM_CONF={self.conf}", f"SLURMD_NODENAME={node}"}
        tasks = {pid: parent for pid, _, parent in _processes() if mark <= set(_environ(pid).split("\0"))}
        daemons = {pid for pid, words, _ in _processes() if words[0].startswith("slurmstepd")}
        return [*(daemons & set(tasks.values())), *tasks]

    def close(self) -> None:
        if "slurmctld" in self.daemons:
            self.call("scancel", "--signal=KILL", "--user=root", check=False)
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self._own_steps(), within=5)
        for name, daemon in reversed(self.daemons.items()):
            daemon.send_signal(signal.SIGTERM if name == "slurmctld" else signal.SIGKILL)  # it has a helper
            daemon.wait()
        for pid in self._own_steps():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _own_steps(self) -> list[int]:
        """The step daemons of this cluster, and what runs below them."""
        mark = f"SLURM_CONF={self.conf}"
        return [
            pid
            for pid, words, _ in _processes()
            if ("slurmstepd" in words[0] and str(self.folder) in " ".join(words) + _environ(pid))
            or {mark, "SLURM_JOB_ID"} <= {*_environ(pid).split("\0"), *_names(pid)}
        ]


def _processes() -> Iterator[tuple[int, list[str], int]]:
    """Pid, words, and parent of every process, by pid."""
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError, IndexError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid, words, parent


def _environ(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return ""


def _names(pid: int) -> list[str]:
    return [word.partition("=")[0] for word in _environ(pid).split("\0")]


@contextlib.contextmanager
def slurm(nodes: Mapping[str, Machine] | None = None, **options: int) -> Iterator[Slurm]:
    """A cluster with all its nodes idle, n1 and n2 if nothing is said; everything of it has ended
    afterwards.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged is another user
    cluster = Slurm(folder, nodes or {"n1": Machine(), "n2": Machine()}, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
