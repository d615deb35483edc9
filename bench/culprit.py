"""How often the launcher names the rank that broke a job, ours and torchrun, for many kinds of faults.

    python bench/culprit.py                           # every fault, 2 ranks, 1 seed, plain torch
    python bench/culprit.py --seeds 10 --ranks 2,4,8 --nodes 1,2 --styles plain,ddp,fsdp
    python bench/culprit.py --seeds 10 --mix --ranks 2,4,8 --nodes 1,2 --styles plain,ddp,fsdp --peer no
    python bench/culprit.py --styles ps --peer no
    python bench/culprit.py --device cuda --ranks 3     # with NCCL, on one GPU
    python bench/culprit.py --faults 'sleep;order' -v   # and what was said

A job is right when the rank is named that broke it and no other (of two ranks that differ, both may be),
wrong when another is, unknown when none is. Seconds are from the end of the first process to the verdict, or
to the report where there is none. torchrun's word is the rank of its "Root Cause".
"""

import argparse
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

JOB = Path(__file__).with_name("_culprit_job.py")
FAULTS = [
    "sleep", "python loop", "C loop with the GIL", "SIGSTOP", "lock", "slow disk", "thread dies",
    "recv without send", "operation", "size", "dtype", "group", "order", "fewer steps", "fewer steps, stays",
    "os._exit(0)", "sys.exit(3)", "SIGKILL", "SIGSEGV", "SIGABRT", "exception", "backward", "data loader",
    "data loader killed", "memory", "straggler", "never joins", "sends nothing", "storage times out",
]  # fmt: skip
SERVED = [
    "sleep", "python loop", "C loop with the GIL", "SIGSTOP", "lock", "slow disk", "thread dies",
    "sys.exit(3)", "SIGKILL", "SIGSEGV", "SIGABRT", "exception", "backward", "data loader",
    "data loader killed", "memory", "storage times out",
    "server SIGSTOP", "server SIGKILL", "server busy",
]  # fmt: skip
"""Where there are parameter servers."""

GONE = ["launcher SIGKILL", "network cut"]
SEVERAL = [*FAULTS, *GONE]
"""On several nodes. Of those of GONE the node is to be named, or its ranks, by the others."""

BOTH = {"operation", "size", "dtype", "order", "group", "recv without send"}
"""Where two ranks differ, or wait for each other, nobody can know which of them is wrong."""


class Network:
    """Two network namespaces on this machine, with a cable between them; for root."""

    def __init__(self) -> None:
        self._names = [f"culprit{os.getpid()}n{node}" for node in range(2)]

    def __enter__(self) -> "Network":
        for name in self._names:
            _ip("netns", "add", name)
        here, there = self._names
        _ip("link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", "eth0", "netns", there)
        for node, name in enumerate(self._names):
            _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", name, "link", "set", "dev", link, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            _ip("netns", "del", name)

    def address(self, node: int) -> str:
        return f"10.99.0.{node + 1}"

    def enter(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self._names[node], "env", "GLOO_SOCKET_IFNAME=eth0"]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def ours(folder: Path, ranks: int, nodes: int, words: list[str]) -> tuple[set[int], float | None, str]:
    """Ranks that are named, seconds to the verdict, and the sentence. `nodes`: so many launchers, on this
    machine.
    """
    if words[0] != "network cut":
        return _ours(folder, ranks, nodes, words, None)
    with Network() as network:
        return _ours(folder, ranks, nodes, words, network)


def _ours(
    folder: Path, ranks: int, nodes: int, words: list[str], network: Network | None
) -> tuple[set[int], float | None, str]:
    options = ["--max_restart", "0", "--stop_timeout", "1", "--follow", "none"]
    if words[-1] == "ps":
        options += ["--server_num", "1", "--trainer_num", str(ranks), "--hang_timeout", "8"]
        words = [*words, str(folder / "server")]
    else:
        options += ["--nproc_per_node", str(ranks // nodes)]
    if nodes > 1:
        host = network.address(0) if network is not None else "127.0.0.1"
        options += ["--nnodes", str(nodes), "--master", f"{host}:{free_port()}"]
    launches = []
    for node in range(nodes):
        own = ["--rank", str(node)] if nodes > 1 else []
        own += ["--host", network.address(node)] if network is not None else []
        module = ["fleetrun", *options, *own, "--log_dir", str(folder / f"log{node}"), str(JOB), *words]
        enter = network.enter(node) if network is not None else []
        launches.append([*enter, sys.executable, "-m", *module])
    run(launches)
    broken = int(words[1]) * nodes // ranks
    others = [node for node in range(nodes) if words[0] not in GONE or node != broken]
    records = [
        [json.loads(line) for line in record.read_text().splitlines()]
        for node in others
        for record in folder.glob(f"log{node}/*.events.jsonl")
    ]
    events = sorted((each for record in records for each in record), key=lambda each: each["time"])
    first = next(each["time"] for each in events if each["event"] in ("exited", "hung"))
    report = next((each["report"] for each in events if each["event"] == "over" and each["report"]), [])
    said = " ".join([*(line.strip() for line in report), *(each.get("text", "") for each in events)])
    verdict = next((each for each in events if each["event"] == "verdict"), None)
    if verdict is not None:
        seconds = max(0.0, verdict["time"] - first)
        server = {-1} if verdict["kind"] == "server" else set()
        named = set(verdict["ranks"]) | server
        there = words[0] in GONE and {each * nodes // ranks for each in named} == {broken}
        return ({int(words[1])} if there else named), seconds, verdict["sentence"]
    gone = re.search(
        r"node (\d+), [^:]* is gone|is gone, with the launcher that (hosted) it"
        r"|the rendezvous store (\S+) has not answered for",
        said,
    )
    if words[0] in GONE and gone is not None:
        node = int(gone[1]) if gone[1] else 0  # that of the store
        return ({int(words[1])} if node == broken else {-1}), None, said
    named = re.search(r"(?:First failure|Began with): (?:node \d+[^:]*: )?(trainer|server) (\d+)", said)
    seconds = next((each["time"] for each in events if each["event"] == "failed"), first) - first
    if named is None:
        return set(), seconds, said
    return {int(named[2]) if named[1] == "trainer" else -1}, seconds, said


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def torchrun(folder: Path, ranks: int, words: list[str]) -> tuple[set[int], float | None, str]:
    options = ["--nproc-per-node", str(ranks), "--max-restarts", "0"]
    text = run([[sys.executable, "-m", "torch.distributed.run", *options, str(JOB), *words]])
    root = text.rpartition("Root Cause")[2]
    named = re.search(r"rank\s*:\s*(\d+)", root)
    return ({int(named[1])} if named and "Root Cause" in text else set()), None, root[:500]


def run(commands: list[list[str]]) -> str:
    """What the first one printed; they are ended after a while."""
    env = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "OMP_NUM_THREADS": "1"}
    started = []
    for command in commands:
        time.sleep(0.5 * len(started))  # the first one hosts the rendezvous store
        started.append(
            subprocess.Popen(
                command,
                env=env,
                start_new_session=True,
                stdout=subprocess.PIPE if command is commands[0] else subprocess.DEVNULL,
                stderr=subprocess.STDOUT,
            )
        )
    said = b""
    for popen in started:
        try:
            said = popen.communicate(timeout=180)[0] or said
        except subprocess.TimeoutExpired:
            os.killpg(popen.pid, signal.SIGKILL)
            said = popen.communicate()[0] or said
    return said.decode(errors="replace")


def judge(fault: str, bad: int, named: set[int]) -> str:
    if not named:
        return "unknown"
    if named == {bad}:
        return "right"
    if fault in BOTH and bad in named and len(named) == 2:
        return "right"
    return "wrong"


class Tally:
    """Of one fault, or of all."""

    def __init__(self) -> None:
        self.scores: dict[str, Counter[str]] = {"fleetrun": Counter(), "torchrun": Counter()}
        self.seconds: list[float] = []

    def add(self, other: "Tally") -> None:
        self.seconds += other.seconds
        for name, score in other.scores.items():
            self.scores[name].update(score)

    def row(self, title: str) -> str:
        shown = [
            ", ".join(f"{number} {word}" for word, number in score.items()) for score in self.scores.values()
        ]
        return f"{title:22} {shown[0]:>24} {max(self.seconds, default=0):8.2f} {shown[1]:>24}"


def attempt(
    tally: Tally, fault: str, style: str, ranks: int, nodes: int, seed: int, asked: argparse.Namespace
) -> None:
    chance = random.Random(f"{fault} {ranks} {seed}")
    bad, step = chance.randrange(ranks), chance.randrange(2, 15)
    if fault.startswith("server "):
        bad = -1
    words = [fault.removeprefix("server "), str(bad), str(step), style]
    for name in {"no": ("fleetrun",), "only": ("torchrun",)}.get(asked.peer, ("fleetrun", "torchrun")):
        if name == "torchrun" and nodes > 1:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if name == "fleetrun":
                named, seconds, said = ours(Path(folder), ranks, nodes, words)
            else:
                named, seconds, said = torchrun(Path(folder), ranks, words)
        result = judge(fault, bad, named)
        tally.scores[name][result] += 1
        tally.seconds += [seconds] if seconds is not None else []
        if asked.v or (name == "fleetrun" and result != "right"):
            where = f"{style}, {ranks} ranks on {nodes}, rank {bad} at step {step}"
            print(f"  {name}: {where}: {result}: {sorted(named)}: {said[:600]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", default="", help="separated by semicolons")
    parser.add_argument("--ranks", default="2")
    parser.add_argument(
        "--nodes", default="1", help="number of launchers; with several, torchrun is not measured"
    )
    parser.add_argument("--styles", default="plain")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument(
        "--mix", action="store_true", help="choose one style, ranks and nodes at random for each seed"
    )
    parser.add_argument("--peer", default="yes", choices=["yes", "no", "only"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: NCCL, all on one GPU")
    parser.add_argument("-v", action="store_true")
    asked = parser.parse_args()
    os.environ["CULPRIT_DEVICE"] = asked.device
    total = Tally()
    print(f"{'fault':22} {'fleetrun':>24} {'seconds':>8} {'torchrun':>24}")
    all_faults = SERVED if asked.styles == "ps" else FAULTS if "1" in asked.nodes.split(",") else SEVERAL
    for fault in asked.faults.split(";") if asked.faults else all_faults:
        tally = Tally()
        seeds = range(asked.seed, asked.seed + asked.seeds)
        lists = [each.split(",") for each in (asked.styles, asked.ranks, asked.nodes)]
        every = itertools.product(*lists)
        cases = [(*case, seed) for case in every for seed in seeds]
        if asked.mix:
            cases = [(*map(random.Random(f"{fault} {seed}").choice, lists), seed) for seed in seeds]
        for style, ranks, nodes, seed in cases:
            attempt(tally, fault, style, int(ranks), int(nodes), seed, asked)
        print(tally.row(fault), flush=True)
        total.add(tally)
    print(total.row("all"))
    if total.seconds:
        print(f"seconds to the verdict: median {statistics.median(total.seconds):.2f}")


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"in {time.monotonic() - began:.0f} s")
