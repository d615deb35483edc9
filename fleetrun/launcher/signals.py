"""What reaches a launch from outside: signals that end it, that are for its processes (SIGUSR1, SIGUSR2) or
that suspend it (Ctrl-Z), the loss of the guard, and `fleetrun stop`.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Collection

from fleetrun.aliases import Callback, Say
from fleetrun.pod.container import Pod
from fleetrun.pod.guard import PASSED_ON, Guard, Signals
from fleetrun.pod.process import descendants, reap_adopted, signal_all, signal_name

# ---- What ends a job


class Interrupts:
    """Signals, the loss of the guard, and `fleetrun stop`. Made before anything that they end; the supervisor
    of the pod, or the agent of this machine, listens once there is one.
    """

    def __init__(self, signals: Signals, guard: Guard) -> None:
        self.signals = signals
        self.guard = guard
        self.job_over = False
        """No process of the job is left; only the last output has to be shown."""
        self._urgent = select.epoll()
        self._urgent.register(signals.fileno(), select.EPOLLIN)
        self._urgent.register(guard.fileno(), select.EPOLLIN)
        self._interrupt: Callable[[int, str], None] | None = None
        self._guard_lost: Callback | None = None
        self._restart: Callable[[str, str], str] | None = None

    @property
    def urgent(self) -> int:
        """A descriptor, readable when the last output cannot wait for a slow reader: a signal ends the job,
        or its guard is gone.
        """
        return self._urgent.fileno()

    def listen(
        self,
        interrupt: Callable[[int, str], None],
        guard_lost: Callback,
        restart: Callable[[str, str], str],
    ) -> None:
        """From now on `interrupt` gets signals that mean "end", with the command of fleetrun that asked for
        it (empty: a signal came); `guard_lost` is called when the guard is gone; `restart` gets the name of a
        container that a command wants to start again, and returns why it does not.
        """
        self._interrupt, self._guard_lost, self._restart = interrupt, guard_lost, restart

    def end(self, number: int, command: str = "") -> None:
        """As if this signal had come, or because a `command` of fleetrun asked for it. Once the job is over,
        the alarm is for a slow reader of this machine's output: other machines may have more time.
        """
        if self._interrupt is not None and not (self.job_over and number == signal.SIGALRM):
            self._interrupt(number, command)

    def stop(self, command: str, now: bool) -> None:
        """A `command` of fleetrun ends the job. `now`: what is left is killed, as by a second signal."""
        self.end(signal.SIGTERM, command)
        if now:
            self.end(signal.SIGQUIT, command)

    def restart(self, name: str, command: str) -> str:
        """Start this container again; why not, or empty."""
        return "no process runs yet" if self._restart is None else self._restart(name, command)

    def lose_guard(self) -> None:
        if self._guard_lost is not None:
            self._guard_lost()


# ---- Signals that are meant for the job: passing on, stopping, continuing


def dispatch(
    read: Callable[[], bytes],
    pod: Pod | None,
    *,
    interrupt: Callable[[int], None],
    written: Callback,
    resumed: Callable[[float], None],
    say: Say,
    pausing: Callback = lambda: None,
    companions: Collection[int] = (),
) -> None:
    """Act on the signals that `read` gives, in the order in which they came; `pod` is None before there is
    one.

    `interrupt` gets those that mean: end. `written` is called when a log was written to, `pausing` before the
    job is stopped, and `resumed` afterwards, with the seconds for which it was. `companions` are helper
    processes of the launcher, which reap themselves.
    """
    numbers = bytearray(read())
    for position, number in enumerate(numbers):  # which may become more on the way
        if number in (signal.SIGCHLD, signal.SIGIO):
            continue
        if number in PASSED_ON:
            say(pass_on(pod, number) if pod is not None else f"{signal_name(number)}: no process runs yet")
        elif number == signal.SIGTSTP:

            def called_off(since: int = position) -> bool:
                numbers.extend(read())
                return signal.SIGCONT in numbers[since:]

            if not called_off():
                say("stopping all processes; `fg` continues them")
                pausing()
                resumed(suspend(called_off))
        elif number != signal.SIGCONT:
            interrupt(number)
    if signal.SIGCHLD in numbers:
        reap_adopted({*(pod.pids() if pod is not None else ()), *companions})
    if signal.SIGIO in numbers:
        written()


def pass_on(pod: Pod, number: int) -> str:
    """Send a user signal to every process that has a handler for it, and say which got it.

    The default action of SIGUSR1 and SIGUSR2 is to die; a process without a handler is left alone.
    """
    reached, spared = [], []
    for container in pod.alive:
        process = container.process
        if process is not None and process.handles(number):
            process.signal_leader(number)
            reached.append(container.spec.title)
        else:
            spared.append(container.spec.title)
    text = f"{signal_name(number)} passed on to {', '.join(reached) or 'no process'}"
    return f"{text}; no handler for it in {', '.join(spared)}" if spared else text


def suspend(called_off: Callable[[], bool]) -> float:
    """Ctrl-Z: stop every process of the job, then this one. Returns when it is continued, and they are too:
    for how many seconds they stood still.

    SIGSTOP for them, because the kernel does not deliver SIGTSTP to the sessions that the containers lead.
    """
    began = time.monotonic()
    signal_all(descendants(), signal.SIGSTOP)
    _stop_unless(called_off)
    signal_all(descendants(), signal.SIGCONT)
    return time.monotonic() - began


def _stop_unless(called_off: Callable[[], bool]) -> None:
    """A SIGCONT that comes at the last moment must count: no other would come to continue this process.

    So it stops itself by a SIGTSTP that waits while `called_off` looks, and that the kernel takes away when a
    SIGCONT comes (signal(7)). To this thread alone: in another it would not wait.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        if called_off():
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # takes it away too
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        signal.signal(signal.SIGTSTP, before)
