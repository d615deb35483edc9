"""How long N nodes need to meet, what it costs, and how soon all know of a failure. No training processes.

    python bench/rendezvous.py [--nodes 10,100,1000,4000] [--runs 5] [--write docs/benchmarks-recovery.md]

The nodes are the launcher's own memberships and stores with real connections, in two processes beside the
store's: the embedded one, or an etcd (Debian's etcd-server; left out when there is none). torchrun's dynamic
rendezvous (torch.distributed.elastic) stands beside them for as many nodes as --torch says. All on this
machine, so all share its cores.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _marks import check_marks, publish
from _rendezvous_job import Figures, meet, unpacking
from _rendezvous_peers import EmbeddedStore, Etcd, torchrun

NAME = "rendezvous.py"
WANTED = {128: (0.5, 1.0), 1000: (3.0, 1.0), 4000: (15.0, None)}
"""Nodes -> seconds until all have met, until all know of a failure."""
COLUMNS = (
    "nodes", "store", "all have met, s", "wanted", "torchrun, s", "ours / torchrun", "messages a node",
    "KB a node", "store's CPU, s", "store's memory, MB", "nodes' CPU, s", "all know of a failure, s",
    "wanted",
)  # fmt: skip
MANY, QUIET = 200, 120.0
Series = dict[tuple[str, int], list[Figures]]


def runs_for(nodes: int, runs: int) -> int:
    """Fewer of those that take long."""
    return runs if nodes < 1000 else max(1, min(runs, 3))


def measured(options: argparse.Namespace) -> Series:
    found: Series = {}
    for name, ways in ways_of(options).items():
        for nodes, once in ways:
            for _ in range(runs_for(nodes, options.runs)):
                figures = once()
                found.setdefault((name, nodes), []).append(figures)
                print(f"# {name}, {nodes} nodes: {figures}", flush=True)
    return found


def lease_for(name: str, nodes: int, options: argparse.Namespace) -> float:
    """The heartbeats of many nodes over etcd's gateway need more than one machine that plays them all."""
    return float(options.lease if name == "embedded" or nodes <= MANY else max(options.lease, QUIET))


def ways_of(options: argparse.Namespace) -> dict[str, list[tuple[int, Callable[[], Figures]]]]:
    stores: dict[str, tuple[Any, list[int]]] = {"embedded": (EmbeddedStore, options.nodes)}
    if shutil.which("etcd"):
        stores["etcd"] = (Etcd, [nodes for nodes in options.nodes if nodes <= options.etcd])
    chosen = options.only or [*stores, "torchrun"]
    ways: dict[str, list[tuple[int, Callable[[], Figures]]]] = {
        name: [
            (nodes, partial(meet, store, nodes, lease_for(name, nodes, options), options.nproc))
            for nodes in counts
        ]
        for name, (store, counts) in stores.items()
        if name in chosen
    }
    if "torchrun" in chosen:
        ways["torchrun"] = [(n, partial(torchrun, n)) for n in options.nodes if n <= options.torch]
    return ways


def table_of(series: Series, options: argparse.Namespace, load: float) -> str:
    """`load` is what others did on the machine before."""
    etcd = Etcd.version() if shutil.which("etcd") else "etcd is not installed"
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} CPUs, {platform.release()}, Python "
        f"{platform.python_version()}, pyzmq {version('pyzmq')}, torch {version('torch')}, {etcd}; "
        f"{options.nproc} processes a node, lease {options.lease:g} s (etcd with more than {MANY} nodes: "
        f"{QUIET:g} s); median [least-most] of {runs_for(0, options.runs)} runs, of "
        f"{runs_for(4000, options.runs)} from 1,000 nodes on. Load {load:.1f} before.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|---:|---|{'---:|' * (len(COLUMNS) - 2)}",
    ]
    for (name, nodes), runs in sorted(series.items(), key=lambda item: (item[0][1], item[0][0])):
        if name != "torchrun":
            lines.append(row(name, nodes, runs, series.get(("torchrun", nodes), [])))
    sizes = ", ".join(f"{nodes:,}: {unpacking(nodes, options.nproc) * 1e3:.1f}" for nodes in options.nodes)
    lines += ["", f"To unpack a topology, which a node does once: ms for so many nodes: {sizes}."]
    return "\n".join(lines)


def row(name: str, nodes: int, runs: Sequence[Figures], torchs: Sequence[Figures]) -> str:
    met = median(runs, "met")
    theirs = median(torchs, "met")
    ratio = f"{met / theirs:.3f}" if met and theirs else "-"
    wanted = WANTED.get(nodes, (None, None)) if name == "embedded" else (None, None)
    cells = [
        f"{nodes:,}",
        name,
        f"**{spread(runs, 'met')}**",
        judged(met, wanted[0]),
        spread(torchs, "met"),
        ratio,
    ]
    cells += [spread(runs, what, 0 if what == "messages" else 1) for what in ("messages", "kilobytes")]
    cells += [spread(runs, what, digits) for what, digits in (("cpu", 2), ("memory", 0), ("nodes_cpu", 2))]
    cells += [f"**{spread(runs, 'known')}**", judged(median(runs, "known"), wanted[1])]
    return f"| {' | '.join(cells)} |"


def median(runs: Sequence[Figures], what: str) -> float | None:
    values = [value for run in runs if (value := run.get(what)) is not None]
    return statistics.median(values) if values else None


def spread(runs: Sequence[Figures], what: str, digits: int = 3) -> str:
    values = sorted(value for run in runs if (value := run.get(what)) is not None)
    if not values:
        return "-"
    middle, least, most = (
        f"{each:,.{digits}f}" for each in (statistics.median(values), values[0], values[-1])
    )
    return middle if least == most else f"{middle} [{least}-{most}]"


def judged(value: float | None, limit: float | None) -> str:
    if limit is None:
        return ""
    return f"<= {limit:g}: {'yes' if value is not None and value <= limit else 'no'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = [10, 64, 100, 128, 1000, 4000]
    parser.add_argument("--nodes", metavar="N,N", type=_numbers, default=numbers)
    parser.add_argument("--runs", metavar="N", type=int, default=5)
    parser.add_argument(
        "--only", metavar="NAME,NAME", type=lambda text: text.split(","), help="embedded, etcd, torchrun"
    )
    parser.add_argument(
        "--torch",
        metavar="N",
        type=int,
        default=64,
        help="measure torchrun's rendezvous up to this many nodes",
    )
    parser.add_argument(
        "--etcd", metavar="N", type=int, default=1000, help="measure etcd up to this many nodes"
    )
    parser.add_argument("--lease", metavar="S", type=float, default=10.0, help="as --heartbeat_timeout")
    parser.add_argument("--nproc", metavar="N", type=int, default=8, help="processes of a node")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    load = os.getloadavg()[0]
    publish(table_of(measured(options), options, load), options.write, NAME)


def _numbers(text: str) -> list[int]:
    return sorted(map(int, text.split(",")))


if __name__ == "__main__":
    main()
