"""Send commands to the nodes of a running job.

Other nodes are reached through the job's store, also from a host outside the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shlex
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

import click

from fleetrun.aliases import Document, Fields, Integers
from fleetrun.commands.find import EndedJob
from fleetrun.commands.output import remark
from fleetrun.console.text import printable
from fleetrun.control.client import NoAnswer, Running, ask
from fleetrun.elastic.ask import ANSWER_WITHIN, Address, Guest, Received, read_address
from fleetrun.elastic.ask_wire import Request
from fleetrun.envs.contract import TOKEN, token_flaw
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen
from fleetrun.record.history import names
from fleetrun.record.journal import objects_in

NO_SUCH_PROCESS = 4
"""Exit code of a command on a node (`--here`) that has no process with these roles and ranks."""

_TIMEOUT = 5.0
_LONGEST_NAME = 512
MOST_OF_RECORD = 64 << 20
"""Most bytes of an event log that a node sends. A longer event log is reduced to its start and its end."""

_LONGEST_DOCUMENT = 64 << 20
_PASSWORD = "FLEETRUN_ETCD_PASSWORD"

Decorated = TypeVar("Decorated", bound=Callable[..., object])


@frozen
class Where:
    """The nodes that a command addresses."""

    node: int | None = None
    """Rank of the only node to address. None: all nodes."""
    url: str | None = None
    """URL of a job that may run on another host."""
    token_file: str | None = None
    """File with the token of the job at `url`."""
    here: bool = False
    """Another host asks this node for its part."""

    def includes_own(self, found: EndedJob | Running) -> bool:
        """Return True if the command addresses this node."""
        return self.node in (None, own_rank(found) or 0)


def node_options(command: Decorated) -> Decorated:
    """Add `--node`, `--job` and `--token_file` to a command, as the parameters `node`, `url`, `token_file`
    and `here`.
    """
    node = click.option(
        "--node", type=click.IntRange(min=0), metavar="N", help="Only node N, in a job on several nodes."
    )
    return node(job_options(command))


def job_options(command: Decorated) -> Decorated:
    """Add the options of `node_options` except `--node`, for a command about all nodes."""
    options = (
        click.option(
            "--job", "url", metavar="URL",
            help="Address of a job on other hosts: HOST:PORT/JOB or etcd://HOST:PORT/JOB.",
        ),
        click.option(
            "--token_file", "--token-file", metavar="FILE",
            help="File with the job's token, for --job.  [default: FLEETRUN_TOKEN]",
        ),
        click.option("--here", is_flag=True, hidden=True),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


class Nodes:
    """The nodes of one job, reached through the job's store. A context manager."""

    def __init__(self, address: Address, where: Where, own: int | None) -> None:
        """`own`: the rank of this node, which is skipped."""
        self._where = where
        self._own = own
        self._address = address
        self._guest = Guest(address)
        self.ranks: Integers = ()
        self.trouble: dict[int, str] = {}
        """Nodes whose answers are incomplete, and why."""
        self._wrong: set[int] = set()
        """Nodes that rejected an option."""
        self.nowhere: set[int] = set()
        """Nodes that have no such process."""
        self._waiting: dict[int, list[Received]] = {}

    def __enter__(self) -> Nodes:
        """Connect to the store and choose the nodes. Raises LaunchError."""
        self._guest.__enter__()
        count = len(self._guest.nodes)
        node = self._where.node
        if node is not None and node >= count:
            self.__exit__()
            known = f"nodes 0 to {count - 1}" if count > 1 else "one node, 0"
            raise UsageError(f"no node {node}: this job has {known}")
        chosen = range(count) if node is None else (node,)
        self.ranks = tuple(rank for rank in chosen if rank != self._own)
        return self

    def __exit__(self, *_: object) -> None:
        self._guest.__exit__()

    close = __exit__

    def reached(self, *, alone: bool) -> bool:
        """Enter the context and return True if the other nodes can be reached.

        With `alone`, the answer of this node is enough. A failure then only prints a remark on stderr and
        returns False. Raises LaunchError otherwise.
        """
        try:
            self.__enter__()
        except UsageError:
            raise
        except LaunchError as error:
            if not alone:
                raise
            remark(f"fleetrun: cannot ask the other nodes: {printable(error.message)}")
            return False
        return True

    def host(self, rank: int) -> str:
        """`h2 (10.0.0.2)`"""
        return printable(self._guest.nodes[rank].title)

    def title(self, rank: int) -> str:
        """`node 1, h2 (10.0.0.2)`"""
        return f"node {rank}, {self.host(rank)}"

    def ask(self, verb: str, options: Fields, patience: float = ANSWER_WITHIN) -> None:
        """Send a request to all chosen nodes. A node may be silent for `patience` seconds. Options that are
        None or False are not sent.
        """
        given = {name: value for name, value in options.items() if value not in (None, False)}
        request = Request(verb=verb, options=given, by=f"{_user()} on {os.uname().nodename}")
        self._waiting = {rank: [] for rank in self.ranks}
        self.trouble.clear()
        self._wrong.clear()
        self._guest.ask(request, self.ranks, patience)

    def wait_for_end(self, but: Container[int]) -> None:
        """Wait until all nodes except `but` have left the job."""
        self._guest.wait_for_end([rank for rank in self.ranks if rank not in but])

    def pieces(self, rank: int) -> Iterator[bytes]:
        """Yield the output of node `rank`. Meanwhile each of the other nodes waits with one piece."""
        while rank in self._waiting:
            if not self._waiting[rank]:
                self._receive(None)
                continue
            received = self._waiting[rank].pop(0)
            try:
                if received.data:
                    yield received.data
            finally:  # also if the caller stops reading early
                self._settle(received)

    def documents(self, rank: int) -> Iterator[object]:
        """Yield the JSON documents that node `rank` prints, one per line."""
        lines = Documents()
        for data in self.pieces(rank):
            yield from lines.of(data)

    def answer(self, rank: int) -> Document | None:
        """Return the last JSON object that node `rank` prints."""
        found = [each for each in self.documents(rank) if isinstance(each, dict)]
        return found[-1] if found else None

    def settle(self) -> None:
        """Wait until all nodes have answered, and drop their output."""
        for rank in self.ranks:
            for _ in self.pieces(rank):
                pass

    def arrived(self, within: float) -> list[tuple[int, bytes]]:
        """Return and remove the output that arrives from any node within `within` seconds."""
        if not any(self._waiting.values()):
            self._receive(within)
        found = []
        for rank, there in list(self._waiting.items()):
            self._waiting[rank] = []
            for received in there:
                if received.data:
                    found.append((rank, received.data))
                self._settle(received)
        return found

    @contextlib.contextmanager
    def typing(self) -> Iterator[tuple[Callable[[], bytes], Callable[[bytes], None]]]:
        """Yield a call that reads a line of the output, and a call that writes a line to the stdin of the
        commands. Each connection has one request, so this opens another.
        """
        rest = b""

        def read() -> bytes:
            nonlocal rest
            while b"\n" not in rest and self.open:
                rest += b"".join(data for _, data in self.arrived(1.0))
            line, newline, rest = rest.partition(b"\n")
            return line + newline

        def write(line: bytes) -> None:
            typed.ask("type", {"into": self._guest.asking, "line": line.decode().rstrip("\n")})
            typed.settle()
            if typed.report():
                raise ConnectionError

        with Nodes(self._address, self._where, self._own) as typed:
            yield read, write

    def whole(self, rank: int, file: IO[bytes], most: int) -> None:
        """Write the output of node `rank` to the file.

        Drop output beyond `most` bytes, and note that in `trouble`.
        """
        written = 0
        for data in self.pieces(rank):
            if written + len(data) > most:
                self.trouble[rank] = f"it sends more than {most >> 20} MiB"
                return
            written += file.write(data)

    def records(self, folder: Path) -> dict[int, Path]:
        """Fetch the event logs of the nodes into files below `folder`. Return their paths by node rank."""
        self.ask("report", {"record": True})
        found = {}
        for rank in self.ranks:
            place = folder / str(rank)
            place.mkdir()
            with (place / "record").open("w+b") as file:
                self.whole(rank, file, MOST_OF_RECORD + (1 << 20))
            with (place / "record").open("rb") as file:
                name = Path(file.readline(_LONGEST_NAME).decode(errors="replace").strip()).name
                if rank in self.trouble or names(Path(name)) is None:
                    continue
                found[rank] = place / name
                with found[rank].open("wb") as record:
                    shutil.copyfileobj(file, record)
        return found

    @property
    def open(self) -> bool:
        """True while a node may send more output."""
        return bool(self._waiting)

    def report(self) -> int:
        """Report on stderr which nodes are missing. Return the exit code: 0 if all nodes answered, 2 if all
        missing nodes rejected an option, else 1.
        """
        for rank, why in sorted(self.trouble.items()):
            remark(f"fleetrun: {self.title(rank)}: {printable(why)}")
        if self.trouble.keys() - self._wrong:
            return 1
        return UsageError.exit_code if self.trouble else 0

    def _receive(self, within: float | None) -> None:
        received = self._guest.receive(within)
        while received is not None:
            if received.rank in self._waiting:
                self._waiting[received.rank].append(received)
            received = self._guest.receive(0.0)

    def _settle(self, received: Received) -> None:
        """Acknowledge one piece of output, and note how the command of its node ended."""
        self._guest.take(received)
        piece = received.piece
        if received.ended:
            self.trouble[received.rank] = received.ended
        elif piece is not None and piece.code == NO_SUCH_PROCESS:
            self.nowhere.add(received.rank)
        elif piece is not None and piece.code:
            self.trouble[received.rank] = (
                _one_line(piece.error) or f"its command ended with exit code {piece.code}"
            )
            if piece.code == UsageError.exit_code:
                self._wrong.add(received.rank)
        if received.last:
            self._waiting.pop(received.rank, None)


@dataclass(slots=True)
class Documents:
    """Splits the output of one node, in pieces of any length, into JSON documents, one per line."""

    _rest: bytes = field(default=b"")

    def of(self, data: bytes) -> Iterator[object]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest if len(self._rest) < _LONGEST_DOCUMENT else b""
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


def _one_line(error: str) -> str:
    """Join the lines of a command's standard error."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    return "; ".join(line.removeprefix("fleetrun: ").removeprefix("error: ") for line in lines)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container
        return f"user {os.getuid()}"


def own_rank(found: EndedJob | Running) -> int | None:
    """Return the rank of this node. Return None if the job runs on one node or has ended."""
    if isinstance(found, EndedJob):
        return None
    nodes = objects_in(found.status, "nodes")
    ranks = [each.get("rank") for each in nodes if each.get("this") is True]
    return ranks[0] if len(nodes) > 1 and ranks and isinstance(ranks[0], int) else None


def nodes_of(found: EndedJob | Running, where: Where, *, secret: bool = False) -> Nodes | None:
    """Return the other nodes of a job that runs here, or None if the command addresses only this node.

    `secret`: other nodes answer the request only in a job with a token. Raises LaunchError.
    """
    own = own_rank(found)
    if own is None:
        if where.node:
            raise UsageError(f"no node {where.node}: this job has only node 0, or does not run")
        return None
    if where.here or where.node == own:
        return None
    assert isinstance(found, Running)
    try:
        store = ask(found.socket, {"ask": "store"}, _TIMEOUT)
    except NoAnswer as silence:
        raise LaunchError(f"cannot ask the other nodes: {silence}") from None
    if store.get("password"):
        os.environ[_PASSWORD] = str(store["password"])
    address = Address(**{name: str(store[name]) for name in ("master", "job", "token")})
    if secret and not address.token and where.node is None:
        return None
    return Nodes(address, where, own)


def nodes_at(where: Where) -> Nodes:
    """Return all nodes of the job at `where.url`. Raises LaunchError."""
    assert where.url is not None
    return Nodes(read_address(where.url, _token(where.token_file)), where, None)


def _token(file: str | None) -> str:
    source, token = TOKEN, os.environ.get(TOKEN, "")
    if file is not None:
        source = f"--token_file {shlex.quote(file)}"
        try:
            token = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {source}: {error}") from None
    flaw = token_flaw(token, source) if token or file is not None else None
    if flaw is not None:
        raise UsageError(flaw)
    return token


def read_where(options: Fields, others: Mapping[str, object]) -> Where:
    """Read the options of `node_options`. `others`: values by name that --job excludes. Raises UsageError."""
    where = Where(**options)
    given = [name for name, value in others.items() if value is not None]
    if where.url is not None and given:
        raise UsageError(f"--job already names the job. Leave out {given[0]}")
    if where.url is None and where.token_file is not None:
        raise UsageError(
            "--token_file is for --job only. A job that runs here passes its token to your commands"
        )
    return where
