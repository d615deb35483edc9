"""Build the state of a launch, as a pure fold over the lines of its event log (docs/events.md). The launcher
answers `fleetrun status` with the state, and the exporter process exports the state.
"""

from __future__ import annotations

from collections import Counter

from fleetrun.aliases import Document, Fields
from fleetrun.pod.events import HUNG


class Process:
    """One process of this node over all its attempts. Times are seconds since the epoch.

    `rank` is None for the pre-hook, which runs before the others. `exits` counts by outcome: `ok`, `failed`,
    or `stopped` (by fleetrun).
    """

    def __init__(self, role: str, rank: int | None) -> None:
        self.role, self.rank = role, rank
        self.pid: int | None = None
        self.started: float | None = None
        self.ended: float | None = None
        self.code: int | None = None
        """The exit code of the last attempt, or minus the signal. None while the process runs."""
        self.how = ""
        self.starts = 0
        self.exits: Counter[str] = Counter()

    @property
    def up(self) -> bool:
        return self.pid is not None

    def start(self, line: Fields) -> None:
        self.pid, self.started = line["pid"], line["time"]
        self.ended = self.code = None
        self.starts += 1

    def end(self, line: Fields) -> None:
        self.pid = None
        self.ended, self.code, self.how = line["time"], line["code"], line["how"]
        self.exits["ok" if self.code == 0 else "stopped" if line["asked"] is not None else "failed"] += 1


_OF_LAUNCH = ("job", "pod", "mode", "pid", "guard", "log_dir", "cwd", "script", "max_restart")


class State:
    """The state after all lines so far."""

    process: type[Process] = Process

    def __init__(self) -> None:
        self.launch: Document = {}
        """The fields of the launch, and its time `started`."""
        self.began: float | None = None
        self.state, self.why = "meeting", ""
        self.restarted = 0
        """Restarts of the job after failures."""
        self.stopping_since: float | None = None
        self.nodes: list[Document] = []
        self.waiting: Fields | None = None
        """While nodes join: the fields `present`, `wanted`, `missing` and `until` of the line."""
        self.store: Document | None = None
        """The store that does not answer, with the end of the wait for it."""
        self.processes: dict[str, Process] = {}
        """Processes by name."""
        self.late: list[Document] = []
        self.verdict: Fields | None = None
        """The line of the last diagnosis."""

    def handle(self, line: Fields) -> None:
        """Handle the next line. Raises LookupError or TypeError if a journal did not write it."""
        self.began = line["time"] if self.began is None else self.began
        handler = getattr(self, f"on_{line['event']}", None)
        if handler is not None:
            handler(line)

    def process_of(self, line: Fields) -> Process | None:
        return self.processes.get(line.get("container") or "")

    def on_launch(self, line: Fields) -> None:
        self.launch = {**{name: line.get(name) for name in _OF_LAUNCH}, "started": line["time"]}

    def on_ready(self, line: Fields) -> None:
        """Start the processes. A node that joins again keeps the names of its processes, but their ranks may
        change.
        """
        before = {(each.role, each.rank): each for each in self.processes.values()}
        made = {each["name"]: self.process(each["role"], each["rank"]) for each in line["containers"]}
        self.processes = {name: before.get((each.role, each.rank), each) for name, each in made.items()}
        self.restarted, self.late = line.get("restarts", self.restarted), []
        self.state, self.why = "starting", ""

    def on_started(self, line: Fields) -> None:
        self.state, self.stopping_since = "running", None
        if (process := self.process_of(line)) is not None:
            process.start(line)

    def on_exited(self, line: Fields) -> None:
        if (process := self.process_of(line)) is not None:
            process.end(line)

    def on_failed(self, line: Fields) -> None:
        if not line["beside"]:
            process = self.process_of(line)
            self._decided(line, process.how if process is not None else "")

    def on_hung(self, line: Fields) -> None:
        headline, hung, _ = line["reason"].partition(HUNG)
        self._decided(line, headline + hung)

    def _decided(self, line: Fields, why: str) -> None:
        """Restart or stop, after a failure or a hang."""
        if line["restart"]:
            self.restarted += 1
            self.state = "restarting"
        else:
            self._stop(line, why)

    def on_restarting(self, line: Fields) -> None:
        self.restarted = line.get("restarts", self.restarted)
        there = (self.processes.get(each) for each in line["containers"])
        if any(each is not None and each.role != "evaluator" for each in there):
            self.state = "restarting"

    on_restart_asked = on_restarting

    def on_leaving(self, line: Fields) -> None:
        self.state = "leaving"

    def on_paused(self, line: Fields) -> None:
        self.state, self.stopping_since = "waiting", None

    def on_ending(self, line: Fields) -> None:
        self._stop(line, line["reason"])

    def on_lateness(self, line: Fields) -> None:
        self.late = line["late"]

    def on_verdict(self, line: Fields) -> None:
        self.verdict = line

    def on_node(self, line: Fields) -> None:
        if "wanted" in line:
            self.waiting = line
            self.state = "spare" if line["spare"] else "meeting"
        if "nodes" in line:
            here, self.waiting = line["rank"], None
            titled = enumerate(line["nodes"])
            self.nodes = [{"rank": rank, "title": title, "this": rank == here} for rank, title in titled]
        if "store" in line:
            first = not self.nodes and self.waiting is None
            since = self.began if first and self.began is not None else line["time"]
            name, limit = line["store"], line.get("limit", 0.0)
            self.store = {"name": name, "until": since + limit} if name else None
        if "restart" in line:
            self._stop(line, line["why"], "restarting" if line["restart"] else "ending")

    on_waiting = on_node

    def _stop(self, line: Fields, why: str, state: str = "ending") -> None:
        """Stop the processes of this node, after an event on any node of the job."""
        self.state, self.why = state, why
        if self.stopping_since is None:
            self.stopping_since = line["time"]
