"""Signals that are meant for the job rather than for the launcher: passing on, stopping and continuing. Acts
on a pod.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection

from fleetrun.pod.pod import Pod
from fleetrun.pod.process import descendants, reap_adopted, signal_all, signal_name
from fleetrun.pod.signals import PASSED_ON


def dispatch(
    read: Callable[[], bytes],
    pod: Pod | None,
    *,
    interrupt: Callable[[int], None],
    written: Callable[[], None],
    resumed: Callable[[float], None],
    say: Callable[[str], None],
    pausing: Callable[[], None] = lambda: None,
    beside: Collection[int] = (),
) -> None:
    """Act on the signals that `read` gives, in the order in which they came; `pod` is None before there is
    one.

    `interrupt` gets those that mean: end. `written` is called when a log was written to, `pausing` before the
    job is stopped, and `resumed` afterwards, with the seconds for which it was. The processes `beside` the
    job have handles of their own.
    """
    numbers = bytearray(read())
    for position, number in enumerate(numbers):  # which may become more on the way
        if number in (signal.SIGCHLD, signal.SIGIO):
            continue
        if number in PASSED_ON:
            say(pass_on(pod, number) if pod is not None else f"{signal_name(number)}: nobody runs yet")
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
        reap_adopted({*(pod.pids() if pod is not None else ()), *beside})
    if signal.SIGIO in numbers:
        written()


def pass_on(pod: Pod, number: int) -> str:
    """Send a user signal to every process that has a handler for it, and say whom it reached.

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
    text = f"{signal_name(number)} passed on to {', '.join(reached) or 'nobody'}"
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
    """A SIGCONT that comes at the last moment must count: nobody would continue this process again.

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
