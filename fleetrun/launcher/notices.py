"""Send the notifications of --notify: one message for each event, delivered by the notifier process. While
the job runs, the launcher never waits for the delivery.

With several nodes, one node sends the notifications of the job: see `nodes.notifies_for_job`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from fleetrun import __version__
from fleetrun.aliases import Document, Fields
from fleetrun.console.narrator import cause_line
from fleetrun.console.text import describe_duration, printable, read_tail, without_secrets
from fleetrun.envs.settings.parsing import written_notifiers
from fleetrun.envs.settings.show import program
from fleetrun.host import interpreter
from fleetrun.launcher.parts import End, Event, Launch, Part, Reach
from fleetrun.pod.companion import Companion, CompanionOutput
from fleetrun.pod.events import HUNG, Failure, Hang, JobResult, code_of
from fleetrun.pod.policy import Restart
from fleetrun.pod.process import Exit
from fleetrun.pod.spec import ContainerSpec
from fleetrun.record.journal import encoded, plain

_LONGEST_WAIT = 5.0  # seconds that the end of a launch waits for the last messages; a signal ends the wait
_SILENT_WAIT = 1.0  # seconds of this wait before the user sees a line about it


class Notices(Part):
    """The notifications of a launch with --notify."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        """Start the notifier process. Raises LaunchError."""
        self.node = 0
        """The rank of this node."""
        self._alone = reach.others is None
        self._notifies_end = True
        self._where: Fields = {}
        self._settings = launch.settings
        self._pod = launch.spec.name
        self._info = launch.console.info
        self._warn = launch.warn
        self._began = time.time()
        self._from_it = CompanionOutput(self._warn)
        self._companion = Companion(
            launch.loop,
            launch.companions,
            interpreter.helper_command("fleetrun.notifiers.process"),
            received=self._from_it.take,
            ended=self._ended,
        )
        titled = [(*each, written_notifiers((each,))) for each in self._settings.notify]
        self._companion.write(encoded_line(titled))

    def handle(self, event: Event) -> None:
        """Send a notification if this node restarts processes on its own decision. A single node decides
        alone. A node of several decides alone only after a failure in a job with parameter servers.
        """
        by_itself = self._alone or self._settings.run_mode.has_servers
        match event:
            case Failure(decision=Restart() as decision) if by_itself and not event.tolerated:
                ended = event.ended
                named = {**_process(ended.spec), "code": code_of(ended)}
                self._restart(
                    "restart",
                    cause_line(JobResult(code=code_of(ended), cause=ended), read_tail(ended.spec.log)),
                    decision,
                    **named,
                )
            case Hang(decision=Restart() as decision) if self._alone:
                self._restart("hang", event.cause, decision)

    def restarting(self, sentence: str, *, hang: bool, **fields: object) -> None:
        """Send a notification that all nodes restart their processes. `sentence` gives the reason and the
        node.
        """
        self._notify("hang" if hang else "restart", f"restarts: {sentence}", reason=sentence, **fields)

    def at_end(self, notifies: bool, **where: object) -> None:
        """Set if this node sends the notification of the end, and the `node` and `host` of the cause."""
        self._notifies_end, self._where = notifies, where

    def over(self, end: End, reached: str) -> None:
        if not self._notifies_end:
            return
        cause = end.report[-1] if end.report else end.reason
        process = {} if end.first is None else _process(end.first)
        fields = {**process, "code": end.code, "restarts": end.restarts, **self._where}
        took = describe_duration(time.time() - self._began)
        took += f" and {end.restarts} restart{'s' * (end.restarts > 1)}" if end.restarts else ""
        if end.code == 0:
            self._notify("end", f"completed: {reached}", **fields)
        elif end.requested:
            self._notify("end", f"stopped after {took}: {cause}", reason=cause, **fields)
        else:
            text = f"failed with exit code {end.code} after {took}: {cause}"
            self._notify("hang" if HUNG in end.reason else "failure", text, reason=cause, **fields)

    def close(self, urgent: int) -> None:
        """Wait for the last messages, for some seconds or until `urgent` becomes readable."""
        companion = self._companion
        if not companion.alive:
            return
        if not companion.finish(_SILENT_WAIT, urgent):
            self._info("waiting until the last notification is sent; Ctrl-C stops waiting")
        in_time = companion.close(_LONGEST_WAIT - _SILENT_WAIT, urgent)
        if not in_time or companion.exit != Exit(0):
            names = written_notifiers(self._settings.notify)
            self._warn(f"{names}: the last notification may be lost")

    def _restart(self, event: str, sentence: str, decision: Restart, **fields: object) -> None:
        text = f"restarts ({decision.number} of {decision.limit}): {sentence}"
        self._notify(event, text, reason=sentence, restarts=decision.number, **fields)

    def _notify(self, event: str, text: str, **fields: Any) -> None:
        if event not in self._settings.notify_on:
            return
        job, host = self._settings.job_id, os.uname().nodename
        on = f" on {host}" if self._settings.nnodes == (1, 1) else ""
        script = os.path.basename(program(self._settings))  # noqa: PTH119 - may be a module
        sentence = without_secrets(printable(f"Job {job} ({script}){on} {text}"), os.environ)
        if "reason" in fields:
            fields["reason"] = without_secrets(fields["reason"], os.environ)
        message = {
            "text": for_slack(sentence),
            "sentence": sentence,
            "event": event,
            "job": job,
            "script": script,
            "pod": self._pod,
            "host": host,
            "node": self.node,
            "reason": "",
            "code": None,
            "restarts": 0,
            "container": None,
            "rank": None,
            "log": None,
            "log_dir": str(os.path.abspath(self._settings.log_dir)),  # noqa: PTH100 - it may be gone
            "seconds": round(time.time() - self._began, 3),
            "time": round(time.time(), 3),
            "version": __version__,
            **fields,
        }
        self._companion.write(encoded_line(message))

    def _ended(self, exit: Exit) -> None:
        self._warn(f"the notifier process {self._from_it.end(exit)}; the job continues without notifications")


def _process(spec: ContainerSpec) -> Document:
    return {"container": spec.name, "rank": None if spec.label else spec.rank, "log": str(spec.log)}


def encoded_line(value: object) -> bytes:
    return encoded(plain(value)) + b"\n"


def for_slack(text: str) -> str:
    """Escape the characters that Slack reads as markup, as in `<!channel>`."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
