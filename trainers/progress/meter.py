"""Count the steps and samples of this process, and report them to the launcher twice a second.

The meter never waits, never raises errors into a training, and does not need torch. A script's own reports
have priority over counters. Once a script reports its steps or samples, the counts of optimizers and loops
are ignored. Without either, the meter counts the steps of torch's own optimizers. An `Activity` is long work
that is not a step, such as a load, a save or a wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from numbers import Integral, Real
from types import TracebackType

from fleetrun.aliases import Callback, Clock, Document, Fields
from fleetrun.envs.channels import LONGEST_ACTIVITY, LONGEST_NAME, LONGEST_TABLE
from fleetrun.envs.progress_report import encode_reports, valid_name
from trainers.process.log import glog
from trainers.progress.channel import Channel, is_child
from trainers.progress.values import Reader, kept, whole

# ---- Activities: a load, a save, a wait


class Activity:
    """Work between steps. Use `with activity("loading tables", of=10) as loading: ... loading.advance()`."""

    def __init__(self, meter: Meter, what: str, of: float | None = None) -> None:
        self.what = valid_name(what, LONGEST_ACTIVITY)
        self.of = of
        self.done: float | None = None if of is None else 0
        self.reported = False
        """True if the launcher received it."""
        self._meter = meter

    def advance(self, parts: float = 1) -> None:
        """Add `parts` completed parts."""
        self.at((self.done or 0) + parts)

    def at(self, done: float) -> None:
        """Set the number of completed parts."""
        self.done = done
        self._meter.gets_on()

    def fields(self) -> Document:
        """Return the activity in the form of a report."""
        return {"what": self.what, "done": _amount(self.done), "of": _amount(self.of)}

    def __enter__(self) -> Activity:
        self._meter.begins(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.is_over(self)


def _named(tables: Mapping[str, Mapping[str, float]]) -> Mapping[str, Mapping[str, float]]:
    return {valid_name(name, LONGEST_TABLE): numbers for name, numbers in tables.items()}


def _amount(number: object) -> float | None:
    """Return a valid number of parts as a plain number, because JSON lacks NumPy's, or None for
    anything else.
    """
    if not isinstance(number, Real):
        return None
    try:
        amount = float(number)
    except OverflowError:
        return None
    if not 0 <= amount < 1e18:
        return None
    return int(amount) if isinstance(number, Integral) else amount


# ---- The meter

PERIOD = 0.5
"""Seconds between two reports. Starts, ends and progress of activities may come between."""
STEP_PERIOD = 0.1
"""Seconds between two reports of the step alone, for the status line."""
MOST_NAMES = 200
"""Number of scalar names. Further names are ignored."""
_ARRIVING = 1.0  # seconds to wait for the last values of a device, which may be stuck
_PAUSE = 0.002
_LAST = 5.0  # seconds to wait, at the end of the process, for a busy or stopped launcher
_AT_ONCE = 10  # consecutive activities that are all reported
_LOSS = ""  # next to the names of scalars, which are never empty


class Meter:
    """The progress of a process with the id `mark`.

    Without a channel there is no launcher, and the calls cost nothing. `on_start` is called at the first
    step, or at the start of the work in a process without steps.
    """

    def __init__(
        self,
        mark: str,
        channel: Channel | None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
        on_start: Callback = lambda: None,
        reader: Reader | None = None,
    ) -> None:
        self._mark = mark
        self._on_start = on_start
        self._channel = channel
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._reader = reader or Reader()
        self._next = self._next_step = self._next_activity = float("-inf")
        self._reported_steps = 0
        self._news = False
        self._before = 0
        self._counted = 0
        self._optimized: int | None = None
        self._resumed: int | None = None
        self._ahead = 0
        self._has_counter = False
        self._stated: int | None = None
        self._numbers = False
        self._ended: float | None = None
        self._took: float | None = None
        self._saved = False
        self._samples: int | None = None
        self._of: int | None = None
        self._seen = self._drawn = 0
        self._given: Document = {}
        self._names: dict[str, str] = {}
        self._activities: list[Activity] = []

    def renew(self, mark: str, channel: Channel | None) -> None:
        """Change the id and the channel, in a process that a zygote has forked."""
        self._mark, self._channel = mark, channel

    # ---- reports of scripts

    def step(
        self,
        samples: object = None,
        loss: object = None,
        scalars: Fields | None = None,
        of: object = None,
    ) -> None:
        """Report one completed step."""
        if self._channel is not None:
            self._expect(of)
            self._stated = (self._before + self._counted if self._stated is None else self._stated) + 1
            self._has_stepped()
            self._note_values(samples, loss, scalars)

    def report(
        self,
        step: object = None,
        samples: object = None,
        loss: object = None,
        scalars: Fields | None = None,
        of: object = None,
    ) -> None:
        """Report the number of the completed step, its values, and the number of all steps."""
        if self._channel is not None:
            self._expect(of)
            if step is not None and (number := whole(step)) is not None:
                if number != self._stated:
                    self._has_stepped()
                self._stated, self._numbers = number, True
            self._note_values(samples, loss, scalars)

    def log_scalar(self, name: str, value: object) -> None:
        if self._channel is not None:
            self._scalar(name, value)
            self._beat()

    def heartbeat(self) -> None:
        if self._channel is not None:
            self._beat()

    def activity(self, what: str, of: float | None = None) -> Activity:
        return Activity(self, what, of)

    # ---- counts of the runtime

    def counted(self, steps: int) -> None:
        """Record the steps of a counter. Among several counters, the highest is right."""
        if self._channel is not None:
            if steps > self._counted:
                self._counted = steps
                self._news = True
                if self._stated is None:
                    self._has_stepped()
            self._beat()

    def has_counter(self) -> None:
        """Note that a counter will report steps by `counted`."""
        self._has_counter = True

    def optimizer_stepped(self, number: int) -> None:
        """Record a step of one of torch's optimizers, with its number."""
        if self._channel is not None and self._stated is None and not self._has_counter:
            if self._resumed is not None:
                self._ahead, self._resumed = max(0, self._resumed + 1 - number), None
            self._optimized = number + self._ahead
            self._has_stepped()
            self._news = True
            self._beat()

    def seen(self, samples: int) -> None:
        """Count examples used in training, as reported by an executor or a loop."""
        self._seen += samples

    def drawn(self, samples: int) -> None:
        """Count examples that a loader returned. They have less weight, because their use is unknown."""
        self._drawn += samples

    def has_loss(self, loss: object) -> None:
        """Set the loss of the step that is about to be counted."""
        if self._channel is not None:
            self._given[_LOSS] = kept(loss)

    def resumed(self, step: int) -> None:
        """Set the number of the resumed step. The next step follows it, even if torch's optimizers count from
        1 again.
        """
        self._before = step - self._counted
        self._resumed = step

    def saved(self, step: int) -> None:
        """Record a checkpoint of this step.

        If steps are not counted, or are counted from another start, the training has reached this step, and
        the next one follows it. A script's own step numbers have priority.
        """
        if self._channel is not None and not self._saved:
            self._saved = self._news = True
        if self._channel is not None and not self._numbers and step > self.steps:
            self.resumed(step)
            self._stated = None if self._stated is None else step
            self._optimized = None if self._optimized is None else step
            self._has_stepped()
            self._news = True
            self._beat()

    @property
    def steps(self) -> int:
        """The number of the last step."""
        if self._stated is not None:
            return self._stated
        if self._has_counter or self._optimized is None:
            return self._before + self._counted
        return self._optimized

    def last_step(self) -> tuple[int, float, float | None] | None:
        """Return the number of the last step, the seconds since its end, and its duration in seconds.

        The duration of the first step is None. The result is None before it. Another thread calls this.
        """
        ended = self._ended
        return None if ended is None else (self.steps, self._clock() - ended, self._took)

    # ---- numbers of a parameter server

    @property
    def listened_to(self) -> bool:
        """True if there is a launcher."""
        return self._channel is not None

    def tables(
        self,
        server: Mapping[str, float],
        tables: Mapping[str, Mapping[str, float]],
        hot: Mapping[str, Mapping[str, float]],
    ) -> bool:
        """Send numbers of this server, numbers of its tables by name, and hot keys of some tables.

        Return True if all of them were sent.
        """
        if self._channel is None or not self._lock.acquire(blocking=False):
            return False
        try:
            fields = self._report_with(server=server)
            datagrams = [
                datagram
                for kind, numbers in (("tables", tables), ("hot", hot))
                if numbers or kind == "tables"
                for datagram in encode_reports(fields, _named(numbers), kind)
            ]
            return all(map(self._channel.send, datagrams))
        finally:
            self._lock.release()

    # ---- activities

    def begins(self, activity: Activity) -> None:
        self._activities.append(activity)
        now = self._clock()
        if now >= self._next_activity:  # for short activities in every step, this allows two reports a second
            self._next_activity = max(self._next_activity, now - _AT_ONCE * PERIOD) + PERIOD
            self._send()

    def gets_on(self) -> None:
        self._beat()

    def is_over(self, activity: Activity) -> None:
        if activity in self._activities:
            self._activities.remove(activity)
        if activity.reported:
            self._send()

    def begins_to_serve(self) -> None:
        """Note that this process makes no steps, and that its work starts now."""
        if self._channel is not None:
            self._on_start()
            self._beat()

    # ---- sending

    def flush(self) -> None:
        """Send unreported values now."""
        if self._news or self._given or self._reader.waits:
            self._send()

    def end(self) -> None:
        """Send the last values at the end of the process, and wait a moment if the launcher is busy.

        Often, all processes of a job end at the same time.
        """
        self.flush()
        if self._channel is None:
            return
        if self._given or self._reader.waits:
            # Wait for values on devices. Otherwise the report would contain the last loss but one.
            last = self._clock() + _ARRIVING
            while (self._given or self._reader.waits) and self._clock() < last:
                time.sleep(_PAUSE)
                self.flush()
        last = self._clock() + _LAST
        while self._news and (left := last - self._clock()) > 0 and self._channel.wait(left):
            self.flush()
        if self._news:  # this process itself may have been suspended
            self.flush()
        self._channel.close()

    def turn_off(self) -> None:
        """Stop reporting, in a forked child, which is another process."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _has_stepped(self) -> None:
        now = self._clock()
        if self._ended is None:
            self._on_start()
        self._took = None if self._ended is None else now - self._ended
        self._ended = now

    def _expect(self, of: object) -> None:
        if of is not None and (number := whole(of)) is not None:
            self._of = number

    def _note_values(self, samples: object, loss: object, scalars: Fields | None) -> None:
        if samples is not None and (number := whole(samples)) is not None:
            self._samples = (self._samples or 0) + number
        if loss is not None:
            self._given[_LOSS] = kept(loss)
        if scalars:
            for name, value in scalars.items():
                self._scalar(name, value)
        self._news = True
        self._beat()

    def _scalar(self, name: str, value: object) -> None:
        known = self._names.get(name) if isinstance(name, str) else None
        if known is None:
            if len(self._names) >= MOST_NAMES:
                return
            known = self._names[str(name)] = valid_name(name, LONGEST_NAME)
            if len(self._names) == MOST_NAMES:
                with contextlib.suppress(OSError, ValueError):  # a full disk, or a closed stderr
                    glog(f"progress: {MOST_NAMES} scalars have been logged, so further names are ignored")
        self._given[known] = kept(value)
        self._news = True

    def _beat(self) -> None:
        now = self._clock()
        if now >= self._next:
            self._send()
        elif now >= self._next_step and self.steps != self._reported_steps:
            self._send(step_alone=True)

    def _send(self, *, step_alone: bool = False) -> None:
        # Another thread holds the lock, or this thread in a signal handler, so skip this report.
        if self._channel is None or not self._lock.acquire(blocking=False):
            return
        try:
            now = self._clock()
            self._next_step, self._reported_steps = now + STEP_PERIOD, self.steps
            self._next = self._next if step_alone else now + PERIOD
            if is_child():
                self.turn_off()
            elif step_alone:
                fields = self._report_with(**self._state())
                # the next report contains the step too
                all(map(self._channel.send, encode_reports(fields, {})))
            else:
                self._news = False
                numbers = self._reader.read(self._given)
                values = {name: number for name, number in numbers.items() if name != _LOSS}
                fields = self._report_with(**self._state())
                for each in self._activities[-1:]:
                    each.reported = True
                if _LOSS in numbers:
                    fields["loss"] = numbers[_LOSS]
                if self._saved:
                    fields["saved"] = True
                if not all(self._channel.send(datagram) for datagram in encode_reports(fields, values)):
                    self._news = True
                    for name, number in numbers.items():
                        self._given.setdefault(name, number)
        finally:
            self._lock.release()

    def _report_with(self, **more: object) -> Document:
        """Return the fields of every report, with `more` added."""
        doing = self._activities[-1:]
        activity = doing[0].fields() if doing else None
        return {"mark": self._mark, **more, "time": self._wall(), "activity": activity}

    def _state(self) -> dict[str, int]:
        """Return the counted values."""
        state = {"step": self.steps} if self._stated is not None or self.steps else {}
        samples = self._samples if self._samples is not None else self._seen or self._drawn
        of = {} if self._of is None else {"of": self._of}
        return state | of | ({"samples": samples} if samples else {})
