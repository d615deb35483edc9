"""What every launcher is made to start: says when its first statement ran, then does what the bench orders.

Imports as little as it can: whatever it loads competes for the cores with the launcher under measurement.
"""

import time

FIRST_STATEMENT = time.monotonic_ns()

import _signal  # type: ignore[import-not-found]  # noqa: E402 - the stamp comes before everything
import _socket  # noqa: E402
import os  # noqa: E402

STOP_SIGNALS = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP)


def rank() -> int:
    """This worker's number under any of the launchers; -1 under a bash loop."""
    for name in ("RANK", "PADDLE_TRAINER_ID", "OMPI_COMM_WORLD_RANK"):
        if os.environ.get(name):
            return int(os.environ[name])
    honcho_name = os.environ.get("HONCHO_PROCESS_NAME", "w.0")  # w.1, w.2, ...
    return int(honcho_name.partition(".")[2]) - 1


def on_stop(number: int, _frame: object) -> None:
    """Stamp the signal's arrival, then obey it."""
    bench.send(b"stop %d" % time.monotonic_ns())
    _signal.signal(number, _signal.SIG_DFL)
    os.kill(os.getpid(), number)


def die(how: str, argument: str) -> None:
    bench.send(b"dies %d" % time.monotonic_ns())
    if how == "raise":
        raise RuntimeError(argument)
    os._exit(int(argument))


def spawn(how: str) -> None:
    """A child that sleeps: an ordinary one, or a daemon with a session of its own."""
    import subprocess

    quiet = subprocess.DEVNULL
    child = subprocess.Popen(
        ["sleep", "60"], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=how == "daemon"
    )
    bench.send(b"spawned %d" % child.pid)


def write(total: int) -> None:
    """`total` bytes of 64-byte lines to stdout in blocks of 64 KiB."""
    block = memoryview((b"x" * 63 + b"\n") * 1024)
    left = total
    while left > 0:
        left -= os.write(1, block[: min(left, len(block))])
    bench.send(b"wrote %d" % time.monotonic_ns())


def obey(order: str, argument: str) -> None:
    if order == "write":
        write(int(argument))
    elif order == "spawn":
        spawn(argument)
    elif order == "exit":
        os._exit(int(argument))
    elif order:
        die(order, argument)
    else:
        os._exit(99)  # end of file: the bench is gone


if os.environ["BENCH_STOP"] == "ignore":
    for each in STOP_SIGNALS:
        _signal.signal(each, _signal.SIG_IGN)
bench = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
bench.connect(os.environ["BENCH_SOCKET"])
if os.environ["BENCH_STOP"] == "stamp":
    for each in STOP_SIGNALS:
        _signal.signal(each, on_stop)
bench.send(b"hello %d %d %d" % (FIRST_STATEMENT, os.getpid(), rank()))
while True:
    obey(*bench.recv(4096).decode().partition(" ")[::2])
