"""Handle everything that reaches a launch from outside: signals, the loss of the guard, and `fleetrun stop`.

Some signals end the launch, some are for its processes (SIGUSR1, SIGUSR2), and Ctrl-Z suspends it.
"""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable, Collection

from fleetrun.aliases import Callback, ShowText
from fleetrun.pod.container import Pod
from fleetrun.pod.guard import PASSED_ON, Guard, Signals
from fleetrun.pod.process import descendants, reap_adopted, signal_all, signal_name

# ---- Signals and commands that end a job


class Interrupts:
    """The sources that end a job: signals, the loss of the guard, and `fleetrun stop`. They exist before
    anything that they end. The supervisor of the pod, or the agent of this node, listens as soon as it
    exists.
    """

    def __init__(self, signals: Signals, guard: Guard) -> None:
        self.signals = signals
        self.guard = guard
        self.job_over = False
        """True if no process of the job remains, and only the last output must be shown."""
        self.asked = False
        """True if a signal, a command or the loss of the guard ends the job."""
        self._urgent = select.epoll()
        self._urgent.register(signals.fileno(), select.EPOLLIN)
        self._urgent.register(guard.fileno(), select.EPOLLIN)
        self._interrupt: Callable[[int, str], None] | None = None
        self._guard_lost: Callback | None = None
        self._restart: Callable[[str, str, str], str] | None = None

    @property
    def urgent(self) -> int:
        """A descriptor that becomes readable when the last output cannot wait for a slow reader. The cause is
        a signal that ends the job, or the loss of the guard.
        """
        return self._urgent.fileno()

    def listen(
        self,
        interrupt: Callable[[int, str], None],
        guard_lost: Callback,
        restart: Callable[[str, str, str], str],
    ) -> None:
        """Set the receivers.

        `interrupt` gets each signal that means "end", with the command of fleetrun that requested the end.
        The command is empty for a real signal. `guard_lost` is called when the guard has ended. `restart`
        gets the name of a process that a command restarts, and returns the reason if it refuses.
        """
        self._interrupt, self._guard_lost, self._restart = interrupt, guard_lost, restart

    def end(self, number: int, command: str = "") -> None:
        """End the job as if this signal had arrived, or because a `command` of fleetrun requested the end.

        After the end of the job, SIGALRM is ignored here. It then means that this node's output has a slow
        reader, and other nodes may have more time.
        """
        if self._interrupt is not None and not (self.job_over and number == signal.SIGALRM):
            self.asked = True
            self._interrupt(number, command)

    def stop(self, command: str, now: bool) -> None:
        """End the job for a `command` of fleetrun. `now`: kill the remaining processes, as a second signal
        does.
        """
        self.end(signal.SIGTERM, command)
        if now:
            self.end(signal.SIGQUIT, command)

    def restart(self, name: str, command: str, edit: str = "") -> str:
        """Restart this process. Return the reason if the process cannot restart, else an empty text. `edit`:
        see `Supervisor.restart`.
        """
        return "no process runs yet" if self._restart is None else self._restart(name, command, edit)

    def lose_guard(self) -> None:
        self.asked = True
        if self._guard_lost is not None:
            self._guard_lost()


# ---- Signals for the job: passing on, stopping, continuing


def dispatch(
    read: Callable[[], bytes],
    pod: Pod | None,
    *,
    interrupt: Callable[[int], None],
    written: Callback,
    resumed: Callable[[float], None],
    show: ShowText,
    pausing: Callback = lambda: None,
    companions: Collection[int] = (),
) -> None:
    """Handle the signals that `read` returns, in order of arrival. `pod` is None before the first pod.

    `interrupt` gets the signals that mean "end". `written` is called after a write to a log, and `pausing`
    before the job stops. `resumed` is called afterwards with the seconds of the stop. `companions` are helper
    processes of the launcher, which reap themselves.
    """
    numbers = bytearray(read())
    for position, number in enumerate(numbers):  # the list may grow during the loop
        if number in (signal.SIGCHLD, signal.SIGIO):
            continue
        if number in PASSED_ON:
            show(pass_on(pod, number) if pod is not None else f"{signal_name(number)}: no process runs yet")
        elif number == signal.SIGTSTP:

            def called_off(since: int = position) -> bool:
                numbers.extend(read())
                return signal.SIGCONT in numbers[since:]

            if not called_off():
                show("stopping all processes; `fg` continues them")
                pausing()
                resumed(suspend(called_off))
        elif number != signal.SIGCONT:
            interrupt(number)
    if signal.SIGCHLD in numbers:
        reap_adopted({*(pod.pids() if pod is not None else ()), *companions})
    if signal.SIGIO in numbers:
        written()


def pass_on(pod: Pod, number: int) -> str:
    """Send a user signal to every process that has a handler for it. Return a sentence with the receivers.

    The default action of SIGUSR1 and SIGUSR2 ends a process, so processes without a handler get no signal.
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
    """Handle Ctrl-Z: stop every process of the job, then this process. Return after all of them continue,
    with the seconds of the stop.

    The processes get SIGSTOP, because the kernel does not deliver SIGTSTP to sessions that processes of the
    job lead.
    """
    began = time.monotonic()
    signal_all(descendants(), signal.SIGSTOP)
    _stop_unless(called_off)
    signal_all(descendants(), signal.SIGCONT)
    return time.monotonic() - began


def _stop_unless(called_off: Callable[[], bool]) -> None:
    """Stop this process, unless a SIGCONT arrives at the last moment. No second SIGCONT would come to
    continue this process.

    The process therefore sends itself a blocked SIGTSTP before `called_off` looks. A SIGCONT makes the kernel
    discard this SIGTSTP (signal(7)). SIGTSTP goes to this thread alone, because another thread would not
    block it.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        if called_off():
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # ignoring the signal discards it too
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        signal.signal(signal.SIGTSTP, before)
