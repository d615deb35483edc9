"""Run a member of an etcd that nodes of a job run together (`--master H1,H2,H3`).

This module has the launcher's part of a member. As `python -m fleetrun.elastic.etcd.member`, it is also the
process that starts etcd and lets it enter the cluster.

    launcher --(one line of JSON, then the end of its input)--> this process --> etcd
             <--(lines for the user)---------------------------

The cluster is etcd's own. It elects a leader, and a majority of its members decides. Three rules surround it.

1. The first node of the list starts a cluster, and the others enter it. Nodes use a cluster only after all
   listed nodes have been in it at the same time (`complete`).
2. A node is in one cluster at a time, because the port of its member is reserved.
3. The data of a member end with its launcher, or when it has had no leader for longer than a lease. The node
   then enters again: its old member is removed, and a new, empty one is added with another id.

By rules 1 and 2, a second cluster can be used only after every node has left the first one, so at most one is
in use. By rule 3, every member remembers its votes. Without a majority, the cluster decides nothing and the
nodes end (`fenced` in `EtcdStore`).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO
from urllib.parse import quote

from fleetrun.aliases import Fields, ShowText
from fleetrun.decoding import BadRecordError
from fleetrun.elastic.etcd import wire
from fleetrun.elastic.etcd.client import Access, Client, Rejected, Unreachable
from fleetrun.elastic.etcd.threads import Backoff
from fleetrun.elastic.etcd.tls import Certificate
from fleetrun.elastic.etcd.wire import Body, EtcdAddress
from fleetrun.elastic.rendezvous import records
from fleetrun.envs.contract import join_endpoint, split_endpoint
from fleetrun.errors import LaunchError, NotSupportedError, PortError, ReservedPortError
from fleetrun.host.interpreter import helper_command
from fleetrun.host.network import Ports, is_this_host
from fleetrun.pod.companion import Companion
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.process import Exit

PROGRAM = "etcd"
_FOLDER = "fleetrun-etcd-"
_LEAVE = 3.0
"""Seconds that a member waits at the end of the job for the other nodes to read how the job ended."""
_STOP = 2.0
"""Seconds that etcd has to hand over the leadership of its cluster."""
_AGAIN = 0.5
"""Seconds until this process is restarted."""

# ---- The choice of this node's member


def own_member(endpoints: Sequence[str], ports: Ports) -> str | None:
    """Return the endpoint of the member that this launcher runs, and reserve its ports from now on.

    Return None if this node is not in the list, or if other launchers on this node run its members. Raises
    PortError if another program has a port.
    """
    for each in endpoints:
        host, port = split_endpoint(each)
        if not is_this_host(host):
            continue
        try:
            ports.fixed(port)
            ports.fixed(port + 1)  # for the other members
        except ReservedPortError:
            continue
        except PortError as error:
            raise PortError(f"nodes cannot join at {each}: {error.message}", hint=error.hint) from None
        return each
    return None


# ---- In the launcher


class Member:
    """A member that runs from its creation until `close`. `report` shows a text to the user. Raises
    LaunchError if the member cannot be started.
    """

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        endpoints: Sequence[str],
        own: str,
        job_id: str,
        lease: float,
        certificate: Certificate | None,
        report: ShowText,
    ) -> None:
        if shutil.which(PROGRAM) is None:
            raise NotSupportedError(
                f"{own} in --master is this node, but its PATH has no program {PROGRAM}",
                hint="Run apt-get install etcd-server, or name a single node in --master.",
            )
        _remove_left_folders()
        self._loop = loop
        self._companions = companions
        self._report = report
        self._reported = ""
        try:
            self._folder, self._lock = _locked_folder()
        except OSError as error:
            raise LaunchError(
                f"cannot create a directory for this node's part of the store: {error}"
            ) from None
        settings = {
            "endpoints": list(endpoints),
            "own": own,
            "job": job_id,
            "lease": lease,
            "folder": str(self._folder),
            "certificate": [certificate.certificate, certificate.key] if certificate is not None else [],
        }
        self._keep = certificate.fds if certificate is not None else ()
        self._settings = json.dumps(settings)
        self._companion: Companion | None = None
        self._timer = Timer()
        self._closing = False
        self._start()

    def _start(self) -> None:
        self._companion = Companion(
            self._loop, self._companions, helper_command("fleetrun.elastic.etcd.member"),
            received=self._received, ended=self._ended, keep=self._keep,
        )  # fmt: skip
        self._companion.write(self._settings.encode() + b"\n")

    def _received(self, line: bytes) -> None:
        self._report_new(line.decode(errors="replace"))

    def _report_new(self, text: str) -> None:
        """Show a text, unless it repeats the previous one, such as that the disk is full."""
        if text != self._reported:
            self._reported = text
            self._report(text)

    def _ended(self, exit: Exit) -> None:
        """Handle the end of the process. Its etcd was in its process group and has ended too. The data
        remain.
        """
        if self._closing:
            self._loop.stop()
            return
        self._report(
            f"the process that runs this node's part of the store {exit}; starting the process again"
        )
        self._timer = self._loop.after(_AGAIN, self._restart)

    def _restart(self) -> None:
        try:
            self._start()
        except LaunchError as error:
            self._report_new(f"cannot start this node's part of the store yet: {error.message}")
            self._timer = self._loop.after(_AGAIN, self._restart)

    def close(self) -> None:
        """Close the member after the other nodes have read the end of the job. May be called twice.

        The wait is short, and a signal ends it by stopping the loop.
        """
        self._timer.cancel()
        if self._companion is not None:
            companion, self._companion = self._companion, None
            self._closing = True
            companion.close_input()
            if companion.alive:
                limit = self._loop.after(_LEAVE + _STOP + 1.0, self._loop.stop)
                self._loop.run()
                limit.cancel()
            companion.close()
            self._lock.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _locked_folder() -> tuple[Path, TextIO]:
    """Create a directory and lock it. The lock is held before the directory gets the name by which other
    launchers look for leftovers.
    """
    made = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}"))
    lock = (made / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return made.rename(made.with_name(made.name[1:])), lock


def _remove_left_folders() -> None:
    """Remove the directories of launchers that were killed. Their locks are free."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                with (folder / "lock").open() as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)


# ---- In the separate process

_ASK = 1.0
"""Seconds until another member counts as missing."""
_SOON = 10.0
"""Seconds. An etcd that ran for less may be unable to use its data."""
_LOOK, _LOOK_COMPLETE = 0.2, 2.0
"""Seconds between two looks at this node's member. etcd does not report the loss of its leader."""
_STRANDED = 3.0
"""Seconds without a leader until the node enters again. A cluster that was complete gets a lease more."""
_MOST_BYTES = 64 << 20  # of a request: the topology of a large job
_TUNING = (
    "--logger", "zap", "--log-level", "warn",
    "--heartbeat-interval", "100", "--election-timeout", "500",
    "--max-request-bytes", str(_MOST_BYTES),
    "--auto-compaction-mode", "revision", "--auto-compaction-retention", "1000",
    # The check requires that all members are healthy for five seconds before another enters. Here the place
    # of the entering member is empty.
    "--strict-reconfig-check=false",
)  # fmt: skip
_NO_FSYNC = "--unsafe-no-fsync"


class _ForeignClusterError(Exception):
    """A listed node is in a cluster that this node must not enter: a cluster of another job, or of other
    nodes.
    """


class Runner:
    """Run one member until the input ends."""

    def __init__(self, settings: Fields) -> None:
        self._endpoints: list[str] = settings["endpoints"]
        self._own: str = settings["own"]
        self._job: str = settings["job"]
        self._job_name = f"{quote(self._job, safe='')}/"
        self._lease: float = settings["lease"]
        self._certificate: list[str] = settings["certificate"]
        self._folder = Path(settings["folder"])
        self._data = self._folder / "data"
        self._log = self._folder / "etcd.log"
        asked = subprocess.run([PROGRAM, _NO_FSYNC, "--version"], check=False, capture_output=True)
        self._no_fsync = asked.returncode == 0
        self._entered_complete = True
        self._clients: dict[str, Client] = {}

    def run(self) -> None:
        """Start etcd, and restart it whenever it ends or is stranded outside of the majority."""
        backoff, early = Backoff(), 0
        while True:
            started = time.monotonic()
            try:
                etcd = self._start()
            except (_ForeignClusterError, Unreachable, Rejected, LaunchError) as error:
                if isinstance(error, _ForeignClusterError):
                    _write_line(str(error))
                if _input_ends(None, backoff.next()):
                    return
                continue
            if self._watch(etcd):
                self._leave(etcd)
                return
            early = early + 1 if time.monotonic() - started < _SOON else 0
            if stranded := etcd.poll() is None:
                _write_line("this node's part of the store lost the majority, and joins it again")
                etcd.kill()
            else:
                _write_line(
                    f"etcd ended with code {etcd.returncode}; starting etcd again: {self._last_words()}"
                )
            etcd.wait()
            if stranded or early > 1:
                shutil.rmtree(self._data, ignore_errors=True)
            if _input_ends(None, backoff.next()):
                return

    # ---- Starting

    def _start(self) -> subprocess.Popen[bytes]:
        """Start etcd. Raises Unreachable, Rejected and LaunchError if it cannot enter the cluster yet."""
        clients, peers = self._url(_bound(self._own)), self._url(_bound(_peer(self._own)))
        command = [
            PROGRAM, "--name", self._name(self._own), "--data-dir", str(self._data), *_TUNING,
            "--listen-client-urls", clients, "--advertise-client-urls", self._url(self._own),
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", self._peer_url(self._own),
        ]  # fmt: skip
        # a crash of the node loses unsynced writes, but these data end with the node anyway
        if self._no_fsync:
            command.append(_NO_FSYNC)
        if self._certificate:
            command += _secured(*self._certificate)
        if not any(self._data.glob("member/wal/*.wal")):
            # An etcd that could not enter may leave a directory, and would start its own cluster with it.
            shutil.rmtree(self._data, ignore_errors=True)
            command += self._entry()
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        with self._log.open("wb") as log:
            fds = [int(path.rpartition("/")[2]) for path in self._certificate]
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=fds
            )

    def _entry(self) -> list[str]:
        """Return the options with which an etcd without data starts."""
        others = [each for each in self._endpoints if each != self._own]
        found = {each: complete for each in others if (complete := self._complete(each)) is not None}
        self._entered_complete = any(found.values())
        for each, complete in found.items():
            if complete or each == self._endpoints[0]:
                members = self._entered(self._client(each))
                return ["--initial-cluster", self._written(members), "--initial-cluster-state", "existing"]
        if self._own != self._endpoints[0]:
            raise Unreachable(f"{self._endpoints[0]} has not started the cluster yet")
        alone = f"{self._name(self._own)}={self._peer_url(self._own)}"
        return ["--initial-cluster", alone, "--initial-cluster-token", secrets.token_hex(16)]

    def _entered(self, client: Client) -> list[Body]:
        """Enter this member under a new id, and return the members with it."""
        mine = self._peer_url(self._own)
        present: list[Body] = client.ask("/cluster/member/list", {})["members"]
        names = [name for each in present if (name := each.get("name"))]
        if not all(name.startswith(self._job_name) for name in names):
            raise _ForeignClusterError(
                f"{client.name} serves the store of another job ({', '.join(names)}): use other ports "
                "in --master, or end this job"
            )
        self._check_listed(client, present)
        for each in present:
            if mine in each.get("peerURLs", ()):
                client.ask("/cluster/member/remove", {"ID": each["ID"]})
        members: list[Body] = client.ask("/cluster/member/add", {"peerURLs": [mine]})["members"]
        return members

    def _check_listed(self, client: Client, present: Sequence[Body]) -> None:
        """Check the list of nodes before any change. A member that never starts costs the cluster a part of
        its majority.
        """
        listed = {self._peer_url(each) for each in self._endpoints}
        found = [url for each in present for url in each.get("peerURLs", ())]
        if not listed.issuperset(found):
            theirs = ",".join(self._endpoint(url) for url in found)
            raise _ForeignClusterError(
                f"--master is {','.join(self._endpoints)} here, but {theirs} run the store at "
                f"{client.name}, so this node does not join it. Start this node again with the same "
                "--master as the other nodes, and write each node in the same way (name or address)"
            )

    def _url(self, endpoint: str) -> str:
        return f"{'https' if self._certificate else 'http'}://{endpoint}"

    def _peer_url(self, endpoint: str) -> str:
        return self._url(_peer(endpoint))

    def _endpoint(self, peer_url: str) -> str:
        """Reverse `_peer_url`."""
        host, port = split_endpoint(peer_url.partition("://")[2])
        return join_endpoint(host, port - 1)

    def _name(self, endpoint: str) -> str:
        """Return the name of a member. It contains the job, which keeps nodes out of other jobs' clusters."""
        return f"{self._job_name}{endpoint}"

    def _written(self, members: Sequence[Body]) -> str:
        """Return the members for `--initial-cluster`. A member that was added gets its name at its first
        start.
        """
        names = {self._peer_url(each): self._name(each) for each in self._endpoints}
        return ",".join(f"{names[url]}={url}" for each in members for url in each["peerURLs"])

    # ---- Running

    def _watch(self, etcd: subprocess.Popen[bytes]) -> bool:
        """Wait, and return True when the input ends.

        Return False when etcd has ended or was without a leader for too long, or when another, complete
        cluster exists.
        """
        last_seen, complete = time.monotonic(), self._entered_complete
        while not _input_ends(etcd, _LOOK_COMPLETE if complete else _LOOK):
            if etcd.poll() is not None:
                return False
            found = self._complete(self._own)
            if found is False:
                # Mark the cluster complete if each listed node has a member that has started.
                client = self._client(self._own)
                with suppress(Unreachable, Rejected, LaunchError):
                    members = client.ask("/cluster/member/list", {})["members"]
                    listed = {self._name(each) for each in self._endpoints}
                    if {each.get("name") for each in members} == listed:
                        client.ask("/kv/put", wire.complete(self._job))
                # The other cluster had not answered when this one started. Check this cluster again, because
                # another member may have marked it complete meanwhile.
                others = (each for each in self._endpoints if each != self._own)
                if any(map(self._complete, others)) and self._complete(self._own) is False:
                    return False
            if found is not None:
                last_seen, complete = time.monotonic(), found
            elif time.monotonic() - last_seen > _STRANDED + (self._lease if complete else 0.0):
                return False
        return True

    def _complete(self, member: str) -> bool | None:
        """Return True if the member's cluster is complete, or None if the member is missing or without a
        leader.
        """
        try:
            return wire.completed_for(self._client(member).ask("/kv/range", wire.COMPLETE)) is not None
        except (Unreachable, Rejected, LaunchError):
            return None

    def _client(self, member: str) -> Client:
        """Return the client of a member. It is made once, because each client loads the certificates of all
        authorities, which takes 30 ms.
        """
        if member not in self._clients:
            certificate, key = self._certificate or ("", "")
            address = EtcdAddress((member,), cacert=certificate, cert=certificate, key=key)
            self._clients[member] = Client(Access(address, "", timeout=_ASK), 0)
        return self._clients[member]

    # ---- The end

    def _leave(self, etcd: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + _LEAVE
        while time.monotonic() < until and etcd.poll() is None and self._is_needed():
            time.sleep(_LOOK)
        etcd.terminate()
        try:
            etcd.wait(_STOP)
        except subprocess.TimeoutExpired:
            etcd.kill()
            etcd.wait()

    def _is_needed(self) -> bool:
        """Return True if the job has ended and other nodes may not have read it yet.

        In a job that continues, the other members are a majority.
        """
        client = self._client(self._own)
        keys = wire.Keys(self._job)
        try:
            answer = client.ask("/kv/txn", wire.read_one(keys, records.ROUND_KEY))
            entry = wire.entries(keys, answer).get(records.ROUND_KEY)
            if entry is not None and records.read_round(entry.value).state is not records.State.ENDED:
                return False
            return bool(client.ask("/lease/leases", {}).get("leases"))
        except (Unreachable, Rejected, LaunchError, BadRecordError):
            return False

    def _last_words(self) -> str:
        """Return the last message in etcd's log."""
        with suppress(OSError, IndexError, ValueError, AttributeError):
            last = json.loads(self._log.read_bytes().splitlines()[-1])
            return " ".join(str(last[name]) for name in ("msg", "error") if name in last)
        return "it printed nothing"


def _secured(certificate: str, key: str) -> list[str]:
    """Return the options that admit only nodes and members with the job's certificate, from any address."""
    found = [
        "--client-cert-auth",
        "--peer-client-cert-auth",
        "--experimental-peer-skip-client-san-verification",
    ]
    for peer in ("", "peer-"):
        found += [f"--{peer}cert-file", certificate, f"--{peer}key-file", key]
        found += [f"--{peer}trusted-ca-file", certificate]
    return found


def _peer(endpoint: str) -> str:
    """Return the endpoint where members reach each other, on the next port."""
    host, port = split_endpoint(endpoint)
    return join_endpoint(host, port + 1)


def _bound(endpoint: str) -> str:
    """Return the endpoint for etcd to bind.

    etcd binds addresses only. On the node itself, its name may lead to a loopback address, so a name binds
    all addresses.
    """
    host, port = split_endpoint(endpoint)
    literal = host.replace(".", "").isdecimal() or ":" in host
    return endpoint if literal else f"0.0.0.0:{port}"


def _write_line(text: str) -> None:
    sys.stdout.write(" ".join(text.split()) + "\n")
    sys.stdout.flush()


def _input_ends(etcd: subprocess.Popen[bytes] | None, seconds: float) -> bool:
    """Wait, and return True when the input ends. Return False when etcd ends, or after `seconds`."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    fd = os.pidfd_open(etcd.pid) if etcd is not None and etcd.returncode is None else -1
    if fd >= 0:
        poll.register(fd, select.POLLIN)
    ready = [which for which, _ in poll.poll(seconds * 1000)]
    if fd >= 0:
        os.close(fd)
    return sys.stdin.fileno() in ready


def main() -> None:
    """Read the settings from the first line of the input, and run the member."""
    line = b""
    while not line.endswith(b"\n"):  # without a buffer, which would hide the end of the input from poll
        piece = os.read(sys.stdin.fileno(), 1)
        if not piece:
            return
        line += piece
    Runner(json.loads(line)).run()


if __name__ == "__main__":
    main()
