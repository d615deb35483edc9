"""Restart policy: from a failure and what has been spent of the budget to a decision. Pure: no clock, no
process, no other machine.
"""

from __future__ import annotations

import re
import signal
from binascii import crc32

from fleetrun.pod.process import Exit
from fleetrun.values import frozen, frozen_by_name

# 2: the command line was wrong; 126, 127: the program cannot be run. Trying again gives the same.
HOPELESS = frozenset({2, 126, 127})


@frozen
class Restart:
    """Start again after so many seconds; this is restart `number` of `limit` since the last progress.
    `step`: this attempt came there, further than all before; None if it did not.
    """

    after: float
    number: int
    limit: int
    step: int | None = None


@frozen
class GiveUp:
    reason: str


@frozen_by_name
class Fault:
    """How an attempt ended at `time` (seconds since the epoch). `kind` is the class of its exception, such as
    `ValueError`; `error` is the same text for the same traceback. Both may be empty. `step` is the last one
    that was made in this attempt, None if none is known. `hopeless`: the process itself said
    that its next attempt would fail in the same way: a damaged file, no memory. `counts_on`: it is a trainer
    with servers, which counts its steps on in the next attempt, and it has made no checkpoint in this one.
    """

    exit: Exit
    time: float
    kind: str = ""
    error: str = ""
    step: int | None = None
    hopeless: bool = False
    counts_on: bool = False


@frozen
class Spent:
    """What a job has used of its budget. `times` of the restarts that count, in seconds since the epoch;
    `step` is the last one of all attempts, None before the first; `error` and `last` are error and step of
    the last `Fault`, and `gain` is how many steps it came further than the one before; None where steps that
    are further are progress for sure.
    """

    times: tuple[float, ...] = ()
    step: int | None = None
    error: str = ""
    last: int | None = None
    gain: int | None = None


NOTHING_SPENT = Spent()

_SYMPTOMS = re.compile(
    r"timed? ?out|timeout|connection (closed|reset|refused|was)|broken pipe|by peer|watchdog|gloo|nccl"
    r"|DistNetwork|DistStore|DistBackend|TCPStore|has not answered|TrainerLostError",
    re.IGNORECASE,
)


def is_symptom(exit: Exit, message: str) -> bool:
    """Whether a process that ended so, with this error, may be the victim of another: a collective that timed
    out, a connection to a peer that broke, torch's watchdog, which ends the process by SIGABRT.
    """
    return exit.signal == signal.SIGABRT or _SYMPTOMS.search(message) is not None


BROKEN_GPU = r"uncorrectable (?:NVLink|ECC) error|GPU has fallen off the bus|GPU is lost"

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGKILL})


def may_be_machine(exit: Exit, message: str) -> bool:
    """Whether the machine may be to blame for an end that nobody asked for: a crash, which a script seldom
    makes by itself, or what the driver says of a GPU. An exception is the script's, as far as anyone knows.
    """
    return exit.signal in _CRASHES or re.search(BROKEN_GPU, message) is not None


_SUSPICIONS: dict[int | None, str] = {signal.SIGSEGV: "crash", signal.SIGKILL: "kill"}


def suspicion(exit: Exit, message: str) -> str:
    """`MachineFault.suspicion` of such an end: a library crashes, and a person kills, on any machine. Empty
    where the machine is to blame: its memory (SIGBUS), its processor (SIGILL), its GPU.
    """
    if exit.signal not in _SUSPICIONS or re.search(BROKEN_GPU, message) is not None:
        return ""
    return _SUSPICIONS[exit.signal]


_OWN_MISTAKES = frozenset(
    {
        "AttributeError",
        "IndexError",
        "KeyError",
        "NameError",
        "NotImplementedError",
        "RuntimeError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    }
)
"""What a script raises because it is wrong; a file, a device or a peer that is not there yet seldom does."""

_DEVICES = re.compile(r"cuda|cudnn|cublas|hip\b|driver|memory", re.IGNORECASE)


_OUTAGES = re.compile(
    r"^(\w+\.)*(OSError|IOError|\w*(HTTP|URL|SSL|Proxy|Connect|Timeout|Throttling|Unavailable)\w*):"
    r"|stale file handle|\b(429|5\d\d) (too many|internal|bad|service|gateway)|service unavailable",
    re.IGNORECASE,
)
"""What a file system or a service raises that may be back soon."""


_MEMORY = re.compile(
    r"out of ?memory|MemoryError|bad_alloc|allocate (memory|[\d.]+ [KMGTPE]?i?B)", re.IGNORECASE
)


def error_at(step: int | None, exit: Exit, message: str, traceback: str) -> str:
    """`Fault.error`; empty where the error is not known, or may be another process's, and where no step is
    known, unless it is the script's own mistake or memory was not enough.
    """
    if not traceback or is_symptom(exit, message) or _OUTAGES.search(message):
        return ""
    if _MEMORY.search(message):
        traceback = re.sub(r"\d+", "", traceback)  # how much is free differs
    elif step is None and (message.partition(":")[0] not in _OWN_MISTAKES or _DEVICES.search(message)):
        return ""
    text = re.sub(r"0x[0-9a-f]+", "", traceback)
    return f"{crc32(text.encode()):08x}"


_SOON = 60.0
"""Seconds from one failure to the next within which the same error shows no more than a wrong script, also
where no step is known.
"""

_MISTAKES = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "AssertionError"}
)
"""What a script raises before its first step because it is wrong, or because its Python is."""


@frozen
class Budget:
    """At most `limit` restarts in a row without progress, which is a later step than any before; with a
    `window`, in any so many seconds. The first is made at once, the next after `backoff` seconds, then
    doubling up to `longest`.
    """

    limit: int
    window: float | None = None
    backoff: float = 0.5
    longest: float = 30.0

    def decide(self, fault: Fault, spent: Spent) -> Restart | GiveUp:
        reason = self._no_help(fault, spent)
        if reason:
            return GiveUp(reason)
        counted = len(self._counted(fault, spent))
        if counted >= self.limit:
            return GiveUp(self._used_up(counted))
        doublings = min(counted - 1, 60)  # far past any `longest`, and within what a float can hold
        after = 0.0 if counted == 0 else min(self.longest, self.backoff * 2**doublings)
        return Restart(after, counted + 1, self.limit, fault.step if _progressed(fault, spent) else None)

    def after(self, fault: Fault, spent: Spent) -> Spent:
        """What is spent once it has led to a restart."""
        step = fault.step if _progressed(fault, spent) else spent.step
        times = (*self._counted(fault, spent), fault.time)
        return Spent(times, step, fault.error, fault.step, _gain(fault, spent))

    def _counted(self, fault: Fault, spent: Spent) -> tuple[float, ...]:
        if _progressed(fault, spent):
            return ()
        since = float("-inf") if self.window is None else fault.time - self.window
        return tuple(time for time in spent.times if time > since)

    def _used_up(self, counted: int) -> str:
        if not counted:
            return "restarts are off (--max_restart 0)"
        window = "" if self.window is None else f" in --restart_window {self.window:g} s"
        return f"--max_restart is {self.limit}{window}"

    @staticmethod
    def _no_help(fault: Fault, spent: Spent) -> str:
        if fault.hopeless:
            return "a restart will not help"
        if fault.exit.code in HOPELESS:
            return f"exit code {fault.exit.code}: a restart will not help"
        if fault.kind in _MISTAKES and fault.step is None and spent.step is None:
            return f"{fault.kind} before the first step: a restart will not help"
        if not fault.error or fault.error != spent.error:
            return ""
        if fault.step is None:
            soon = spent.step is None and spent.times and fault.time - spent.times[-1] < _SOON
            return "the same error twice: a restart will not help" if soon else ""
        if fault.step == spent.last:
            return f"the same error twice after step {fault.step}: a restart will not help"
        if spent.gain is not None and _gain(fault, spent) == spent.gain:
            return f"the same error again {spent.gain} steps further, as before: a restart will not help"
        return ""


NO_RESTARTS = Budget(0)


def _gain(fault: Fault, spent: Spent) -> int | None:
    if not fault.counts_on or fault.step is None or spent.last is None:
        return None
    return fault.step - spent.last


def _progressed(fault: Fault, spent: Spent) -> bool:
    return fault.step is not None and (spent.step is None or fault.step > spent.step)
