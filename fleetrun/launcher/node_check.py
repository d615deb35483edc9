"""Run this node's part in a check before a start (--check). A helper process measures, and the launcher
limits its time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from fleetrun.console.text import printable
from fleetrun.decoding import WRONG
from fleetrun.elastic.rendezvous.checks import SECONDS, Measured, measures, pairs
from fleetrun.elastic.rendezvous.records import Node, Round, read_measured
from fleetrun.envs.contract import VISIBLE_VARIABLE, split_endpoint
from fleetrun.errors import LaunchError
from fleetrun.host.interpreter import helper_command, helper_environment
from fleetrun.launcher.parts import Launch
from fleetrun.plan.topology import Host
from fleetrun.pod.companion import Companion
from fleetrun.pod.process import Exit

_LATE = 1.0
"""Seconds that the helper process may exceed its time before the launcher gives up."""

_WAY = 2.5
"""Seconds to reach the partner, whose process may start later."""


class NodeCheck:
    """One turn of a check. Passes the measurement to `then` once, unless the check is cancelled."""

    def __init__(
        self,
        launch: Launch,
        host: Host,
        round_: Round,
        members: Sequence[Node],
        rank: int,
        then: Callable[[Measured], None],
    ) -> None:
        self._console = launch.console
        self._loop = loop = launch.loop
        self._began = loop.clock()
        self._then: Callable[[Measured], None] | None = then
        self._companion: Companion | None = None
        self._last, self._partner = b"", ""
        how = launch.settings.check
        self._seconds = SECONDS[how]
        self._timer = loop.after(self._seconds + _LATE, self._too_long)
        ids = [node.id for node in members]
        if not measures(ids, round_.check.suspects, rank):
            loop.after(0.0, lambda: self._finish(Measured()))
            return
        partner, visits = _partner(pairs(ids, round_.check.suspects), rank)
        if partner >= 0:
            self._partner = members[partner].title
        way = f" and the link to {printable(self._partner)}" if self._partner else ""
        self._console.info(f"checking this node{way} (--check {how})")
        env = helper_environment()
        if host.devices:
            env[VISIBLE_VARIABLE[host.device_kind]] = ",".join(host.devices)
        try:
            self._companion = Companion(
                loop, launch.companions, helper_command("fleetrun.doctor.check"), env,
                received=self._received, ended=self._ended,
            )  # fmt: skip
        except LaunchError as error:
            failure = Measured(error=f"the check cannot be started: {error.message}")
            loop.after(0.0, lambda: self._finish(failure))
            return
        services = [split_endpoint(node.offer.service) if node.offer.service else None for node in members]
        meets = partner >= 0 and services[rank] is not None and services[partner] is not None
        orders = {
            "visit": services[partner] if meets and visits else None,
            "serve": services[rank] if meets and not visits else None,
            "ticket": f"{round_.topology}/{round_.generation}",
            "full": how == "full",
            "gpus": len(host.devices) if host.device_kind == "gpu" else 0,
            "within": _WAY,
        }
        self._companion.write(json.dumps(orders).encode() + b"\n")

    def cancel(self) -> None:
        self._then = None
        self._timer.cancel()
        self._kill()

    def _received(self, line: bytes) -> None:
        self._last = line

    def _ended(self, exit: Exit) -> None:
        found = self._found()
        self._finish(found if exit.ok and found.compute else replace(found, error=f"the check {exit} on it"))

    def _too_long(self) -> None:
        self._kill()
        self._finish(replace(self._found(), late=self._seconds + _LATE))

    def _found(self) -> Measured:
        """Return the measurements of the helper process so far."""
        took = self._loop.clock() - self._began
        try:
            fields = json.loads(self._last)
            return replace(read_measured(fields), took=max(0.0, took - float(fields["waited"])))
        except WRONG:
            return Measured(took=took)

    def _finish(self, measured: Measured) -> None:
        then, self._then = self._then, None
        if then is None:
            return
        self._timer.cancel()
        wrong = measured.error
        if measured.late and not wrong:
            wrong = f"the check took longer than {measured.late:g} s"
        for what, why in (("this node", wrong), (f"the link to {self._partner}", measured.link_error)):
            if why:
                self._console.warning(f"check: {printable(f'{what}: {why}')}")
        then(measured)

    def _kill(self) -> None:
        if self._companion is not None:
            companion, self._companion = self._companion, None  # a second close might wait again
            companion.close()


def _partner(turn: Sequence[tuple[int, int]], rank: int) -> tuple[int, bool]:
    """Return the rank of the partner, or -1, and True if this node visits the partner."""
    for one, other in turn:
        if rank in (one, other):
            return (other, True) if rank == one else (one, False)
    return -1, False
