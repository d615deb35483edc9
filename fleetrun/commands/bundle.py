"""The `fleetrun bundle` command collects everything about a job into one file, for a bug report."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import click

from fleetrun import __version__
from fleetrun.aliases import Document
from fleetrun.commands.everywhere import Nodes, node_options, nodes_at, nodes_of, read_where
from fleetrun.commands.find import any_job, find_any, history_of, logs_of_job
from fleetrun.commands.output import output_path, print_file, remark
from fleetrun.commands.report import as_json, summary
from fleetrun.commands.stacks import targets
from fleetrun.commands.why import ask_why
from fleetrun.console.text import printable, without_secrets
from fleetrun.control.client import NoAnswer, Running
from fleetrun.errors import LaunchError
from fleetrun.files import end_of, new_file, replacing
from fleetrun.record.history import History
from fleetrun.record.journal import plain
from fleetrun.stacks.collect import collect, find_pyspy
from fleetrun.stacks.frames import groups
from fleetrun.stacks.text import grouped_lines

_TAIL = 1 << 20
"""Bytes from the end of each log and of the event log."""

_STACKS_WITHIN, _DOCTOR_WITHIN, _NODE_WITHIN = 20.0, 120.0, 240.0  # seconds
_MOST_OF_NODE = 256 << 20

_ABOUT = """Made by `fleetrun bundle` of fleetrun {version} on {host}, {date}: job {job}, pod {pod}.

report.txt, report.json   how the job ended, and why
record.jsonl              its events (docs/events.md), the last MiB
logs/                     the last MiB of each log on this node; less of the logs on other nodes, if the job
                          runs
status.json               the state of the job, if it runs
why.json                  the stacks and last collectives of all ranks, and the rank that the others wait for
stacks.txt                the stacks of the processes on this node
doctor.json               the checks of `fleetrun doctor` on this node; doctor.NODE.json: the checks of
another
                          node of a running job that take less than a second

Masked: passwords in URLs, values assigned to names such as API_KEY or TOKEN, and the values of such
environment variables of the shell that ran the command. The rest of the output of your scripts is unchanged:
read it before you share this file. node.N.tar.gz is the support bundle of another node. It needs a token of
the job. Without a token, run the same command on that node.
"""


@click.command()
@any_job
@click.option("-o", "--output", metavar="FILE", help="[default: JOB.POD.tar.gz]")
@logs_of_job
@node_options
def command(job: str | None, output: str | None, log_dir: Path | None, **options: object) -> int:
    """Collect everything about JOB into one file, for a bug report.

    JOB is a job's name, run ID (pod), script or directory. The default is the job that runs here, or else the
    newest job in --log_dir. The file contains the failure report, the event log, the end of each log, and the
    checks of `doctor` on this node. For a running job it also contains the status, and the stacks of all
    ranks (`why`, `stacks`). The job continues undisturbed.

    If a running job on several nodes has a token, the file contains a support bundle of each other node.
    --node chooses one node. --job works from a host outside of the job. Without a token, the file contains
    the ends of the logs on other nodes and their `doctor` checks, at most 32 KiB from each node.

    fleetrun masks values whose names look secret. Read the file before you share it.

    \b
    Examples:
      fleetrun bundle
      fleetrun bundle night --log_dir /data/log -o night.tar.gz
      fleetrun bundle --job h1:6768/night --token_file secret

    \b
    Exit codes:
      0    the file was written; it lists missing parts
      1    no such job exists, or its store does not answer
      2    the command line is wrong, or several jobs match JOB
      125  the file cannot be written
    """
    where = read_where(options, {"JOB": job, "--log_dir": log_dir})
    parts: Iterator[Part] = iter(())
    with contextlib.ExitStack() as stack:
        if where.url is not None:
            nodes: Nodes | None = nodes_at(where)
            name = _file_name(str(where.url).partition("?")[0].rpartition("/")[2])
        else:
            found = find_any(job, log_dir)
            history = history_of(found)
            nodes = nodes_of(found, where, secret=True)
            name = f"{history.job}.{history.pod}"
            if where.includes_own(found):
                parts = _parts(history, found, where.here, nodes is not None)
        if where.here:
            with tempfile.TemporaryDirectory() as folder:
                to = Path(folder) / "here.tar.gz"
                _write_bundle(to, name, parts)
                sys.stdout.buffer.write(to.read_bytes())
            return 0
        to = output_path(output or f"{name}.tar.gz", (".tar.gz", ".tgz"))
        if nodes is not None:
            stack.enter_context(nodes)
            nodes.ask("bundle", {}, _NODE_WITHIN)
            bundles = ((f"node.{rank}.tar.gz", partial(_bundle_of, nodes, rank)) for rank in nodes.ranks)
            parts = chain(parts, bundles)
        for line in _write_bundle(to, name, parts):
            remark(f"fleetrun: missing in the file: {printable(line)}")
    print_file(to, "A support bundle of the job, for a bug report. Read it before you send it:")
    return 0


Part = tuple[str, Callable[[], str | bytes]]
"""The name of a file, and a function that returns its text or its bytes."""


def _bundle_of(nodes: Nodes, rank: int) -> bytes:
    """Return the support bundle of node `rank`. Raises LaunchError."""
    file = io.BytesIO()
    nodes.whole(rank, file, _MOST_OF_NODE)
    if rank in nodes.trouble:
        raise LaunchError(f"{nodes.title(rank)}: {nodes.trouble[rank]}")
    return file.getvalue()


def _write_bundle(to: Path, folder: str, parts: Iterator[Part]) -> list[str]:
    """Write the support bundle, readable by its owner only. Return a line for each missing part.

    Raises LaunchError.
    """
    missing: list[str] = []
    try:
        with (
            replacing(to) as aside,
            os.fdopen(new_file(aside, 0o600), "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, make in parts:
                try:
                    text = make()
                except (LaunchError, NoAnswer, OSError, subprocess.SubprocessError) as error:
                    missing.append(f"{name}: {error}")
                else:
                    data = text if isinstance(text, bytes) else without_secrets(text, os.environ).encode()
                    _add(archive, f"{folder}/{name}", data)
            _add(archive, f"{folder}/missing.txt", "".join(f"{each}\n" for each in missing).encode())
    except OSError as error:
        raise LaunchError(f"cannot write {to}: {error.strerror}") from None
    return missing


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
    archive.addfile(info, io.BytesIO(data))


def _parts(history: History, found: object, here: bool, whole: bool) -> Iterator[Part]:
    """Yield the files of the support bundle.

    `here`: the bundle is a part of a bundle of several nodes, so the files about all nodes are left to the
    first node. `whole`: the other nodes send bundles too, so this bundle does not hold their logs and facts.
    """
    yield "README.txt", lambda: _about(history)
    yield "report.txt", lambda: "\n".join(summary(history, time.time())) + "\n"
    yield "report.json", lambda: _json(as_json(history))
    yield "record.jsonl", lambda: end_of(history.path, _TAIL)
    for each in history.containers:
        yield f"logs/{each.log.name}", lambda path=each.log: end_of(path, _TAIL)  # type: ignore[misc]
    if isinstance(found, Running):
        yield "status.json", lambda: _json(found.status)
        others: list[Part] = []
        if not here:
            yield "why.json", lambda: _json(_without_parts(ask_why(found, states=True), others))
        if not whole:
            yield from others
        yield "stacks.txt", lambda: _stacks(found)
    yield "doctor.json", _doctor


def _about(history: History) -> str:
    return _ABOUT.format(
        version=__version__,
        host=os.uname().nodename,
        date=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        job=history.job,
        pod=history.pod,
    )


def _json(value: object) -> str:
    return json.dumps(plain(value), indent=1) + "\n"


def _without_parts(answer: Document, parts: list[Part]) -> Document:
    """Move the log ends and the facts of other nodes out of the answer, into separate parts."""
    for state in answer.get("states", ()):
        log, machine = state.pop("log", None), state.pop("machine", None)
        if isinstance(log, dict):
            name = _file_name(f"{state.get('node')}.{log.get('name')}")
            parts.append((f"logs/{name}", partial(str, log.get("end"))))
        if isinstance(machine, dict):
            parts.append((f"doctor.{_file_name(str(state.get('node')))}.json", partial(_json, machine)))
    return answer


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def _stacks(running: Running) -> str:
    taken = collect(targets(running, None, None, "stacks"), _STACKS_WITHIN, find_pyspy())
    return "\n".join([*grouped_lines(groups(taken.processes)), taken.hint]) + "\n"


def _doctor() -> str:
    """Run `fleetrun doctor` in a separate process, with a timeout."""
    argv = [sys.executable, "-m", "fleetrun", "doctor", "--json"]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DOCTOR_WITHIN, check=False
    )  # fmt: skip
    if not done.stdout:
        raise LaunchError(done.stderr.decode(errors="replace").strip() or "fleetrun doctor printed nothing")
    return done.stdout.decode(errors="replace")
