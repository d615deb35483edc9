"""Decide about restarts, from a failure and the used part of the budget.

The functions are pure and independent of clocks, processes and other nodes.
"""

from __future__ import annotations

import re
import signal
from binascii import crc32

from fleetrun.pod.process import Exit
from fleetrun.values import frozen, frozen_by_name

# 2 is a wrong command line, and 126 and 127 are programs that cannot run. Another attempt ends in the same
# way.
HOPELESS = frozenset({2, 126, 127})


@frozen
class Restart:
    """Start again after `after` seconds. This is restart `number` of `limit` since the last progress.

    `step` is the step of this attempt if it is later than in all earlier attempts, else None.
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
    """The end of an attempt at `time` (seconds since the epoch).

    `kind` is the class of its exception, such as `ValueError`. `error` is equal for equal tracebacks. Both
    may be empty. `step` is the last completed step of this attempt, or None if unknown. `hopeless` is True if
    the process reported that its next attempt would fail in the same way, for example with a damaged file or
    without memory. `counts_on` is True for a trainer with servers that has not saved a checkpoint in this
    attempt. Its next attempt continues the step count.
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
    """The used part of a job's budget.

    `times` are the restarts that count, in seconds since the epoch. `step` is the last step of all attempts,
    or None before the first. `error` and `last` are error and step of the last `Fault`. `gain` is how many
    steps it came further than the fault before. It is None where later steps certainly are progress.
    """

    times: tuple[float, ...] = ()
    step: int | None = None
    error: str = ""
    last: int | None = None
    gain: int | None = None


NOTHING_SPENT = Spent()

_SYMPTOMS = re.compile(
    r"timed? ?out|timeout|connection (closed|reset|refused|was)|broken pipe|by peer|watchdog|gloo|nccl"
    r"|DistNetwork|DistStore|DistBackend|TCPStore|server \d+ .*did not answer|TrainerLostError",
    re.IGNORECASE,
)


def is_symptom(exit: Exit, message: str) -> bool:
    """Return True if a process with this exit and error may be the victim of another process.

    Examples are a collective that timed out, a broken connection to a peer, and torch's watchdog, which ends
    the process by SIGABRT.
    """
    return exit.signal == signal.SIGABRT or _SYMPTOMS.search(message) is not None


BROKEN_GPU = r"uncorrectable (?:NVLink|ECC) error|GPU has fallen off the bus|GPU is lost"

_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGKILL})


def may_be_machine(exit: Exit, message: str) -> bool:
    """Return True if the node may be to blame for an unexpected end.

    Signs are a crash, which a script seldom causes by itself, and a driver's report about a GPU. An exception
    is attributed to the script.
    """
    return exit.signal in _CRASHES or re.search(BROKEN_GPU, message) is not None


_SUSPICIONS: dict[int | None, str] = {signal.SIGSEGV: "crash", signal.SIGKILL: "kill"}


def suspicion(exit: Exit, message: str) -> str:
    """Return `MachineFault.suspicion` for such an end. A library can crash, and a person can kill, on any
    node.

    The text is empty if the node is to blame, through its memory (SIGBUS), its processor (SIGILL) or its GPU.
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
"""Exceptions of a wrong script. A missing file, device or peer seldom raises them."""

_DEVICES = re.compile(r"cuda|cudnn|cublas|hip\b|driver|memory", re.IGNORECASE)


_OUTAGES = re.compile(
    r"^(\w+\.)*(OSError|IOError|\w*(HTTP|URL|SSL|Proxy|Connect|Timeout|Throttling|Unavailable)\w*):"
    r"|stale file handle|\b(429|5\d\d) (too many|internal|bad|service|gateway)|service unavailable",
    re.IGNORECASE,
)
"""Errors of a file system or service that may soon be available again."""


_MEMORY = re.compile(
    r"out of ?memory|MemoryError|bad_alloc|allocate (memory|[\d.]+ [KMGTPE]?i?B)", re.IGNORECASE
)


def error_at(step: int | None, exit: Exit, message: str, traceback: str) -> str:
    """Return `Fault.error`.

    It is empty if the error is unknown or may come from another process. Without a known step, it is also
    empty unless the error is the script's own mistake or a lack of memory.
    """
    if not traceback or is_symptom(exit, message) or _OUTAGES.search(message):
        return ""
    if _MEMORY.search(message):
        traceback = re.sub(r"\d+", "", traceback)  # the amount of free memory differs
    elif step is None and (message.partition(":")[0] not in _OWN_MISTAKES or _DEVICES.search(message)):
        return ""
    text = re.sub(r"0x[0-9a-f]+", "", traceback)
    return f"{crc32(text.encode()):08x}"


_SOON = 60.0
"""Seconds between two failures within which the same error proves a wrong script, even without a known
step.
"""

_MISTAKES = frozenset(
    {"SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError", "AssertionError"}
)
"""Exceptions before the first step that show a wrong script or a wrong Python."""


@frozen
class Budget:
    """At most `limit` restarts in a row without progress, which is a later step than all before.

    With a `window`, the limit holds within any `window` seconds. The first restart is immediate. The next one
    waits `backoff` seconds, and each further wait doubles up to `longest`.
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
        doublings = min(counted - 1, 60)  # far past any `longest`, and within the range of a float
        after = 0.0 if counted == 0 else min(self.longest, self.backoff * 2**doublings)
        return Restart(after, counted + 1, self.limit, fault.step if _progressed(fault, spent) else None)

    def after(self, fault: Fault, spent: Spent) -> Spent:
        """Return the used budget after this fault has led to a restart."""
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
