"""What the scripts of `tests/e2e` import: a line to the test as things happen, and waits without a clock."""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path


class Late:
    """A module that few scripts use, and that takes milliseconds to import."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return getattr(__import__(self._name), name)


select, socket, subprocess = map(Late, ("select", "socket", "subprocess"))

WHO = os.environ.get("FLEETRUN_CONTAINER", "outside.nobody.0").partition(".")[2]
"""`trainer.0`, `ps.1`"""
RANK = int(WHO.rpartition(".")[2])
SIZE = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
ATTEMPT = int(os.environ.get("PADDLE_RESTART_COUNT", "0"))


def tell(*words):
    """One line, whole, to the test."""
    fd = os.open(os.environ["FLEETTEST_NEWS"], os.O_WRONLY)
    os.write(fd, (" ".join(map(str, (WHO, *words))) + "\n").encode())
    os.close(fd)


def stay():
    """Say "ready" and the pid, then wait for a signal that ends this."""
    tell("ready", os.getpid())
    while True:
        time.sleep(0.1)  # not pause(): a signal between the two statements would wait for the next one


def wait_for_go():
    """Until the test calls `go`, which lets go of a lock."""
    with Path(os.environ["FLEETTEST_GATE"]).open() as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)


def wait_for_end_of(pid):
    """Until that process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([fd], [], [])
    os.close(fd)


def on(number, then):
    """Tell of every signal `number`, and call `then`."""

    def act(*_):
        tell("got", signal.Signals(number).name)
        then()

    signal.signal(number, act)


def leave_on_term(code=0):
    on(signal.SIGTERM, lambda: os._exit(code))


def ignore(*numbers):
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def publish_pid():
    """For `pid_of`; before the "ready" that the test waits for."""
    Path(f"pid.{WHO}").write_text(str(os.getpid()))


def pid_of(who):
    return int(Path(f"pid.{who}").read_text())


def meet(count):
    """Until so many processes of this attempt are here. A server serves each trainer, as all servers do, and
    stays until the trainers among them have ended: a second before them, it would be a failure.
    """
    servers = [
        place.rpartition(":") for place in os.environ.get("PADDLE_PSERVERS_IP_PORT_LIST", "").split(",")
    ]
    if WHO.startswith("ps."):
        host, _, port = servers[int(WHO.removeprefix("ps."))]
        listening = socket.create_server((host, int(port)))
    here = Path(f"met.{ATTEMPT}.{WHO}")
    here.with_name(f".{here}").write_text(str(os.getpid()))
    here.with_name(f".{here}").rename(here)
    while len(list(Path().glob(f"met.{ATTEMPT}.*"))) < count:
        time.sleep(0.002)
    trainers = list(Path().glob(f"met.{ATTEMPT}.trainer.*"))
    if WHO.startswith("ps."):
        served = [listening.accept() for _ in trainers]
        for trainer in trainers:
            wait_for_end_of(int(trainer.read_text()))
        served.clear()
    elif WHO.startswith("trainer."):
        for server in Path().glob(f"met.{ATTEMPT}.ps.*"):
            host, _, port = servers[int(server.suffix[1:])]
            socket.create_connection((host, int(port))).close()


def helper(code, **options):
    """A process of its own that runs this Python; it can import this module too."""
    return subprocess.Popen([sys.executable, "-c", "from telling import *\n" + code], **options)


__all__ = [
    "ATTEMPT", "RANK", "SIZE", "WHO", "Path", "helper", "ignore", "leave_on_term", "meet", "on", "os",
    "pid_of", "publish_pid", "signal", "stay", "subprocess", "sys", "tell", "time", "wait_for_end_of",
    "wait_for_go",
]  # fmt: skip
