"""Signals for the job: whom they reach. Stopping is tried in a process of its own."""

import itertools
import os
import select
import signal
import subprocess
import threading
import traceback
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetrun import __version__
from fleetrun.envs.contract import Mode, Role
from fleetrun.launcher.exports import Exports
from fleetrun.launcher.signals import Interrupts, dispatch, suspend
from fleetrun.pod.container import Pod
from fleetrun.pod.spec import PodSpec
from fleetrun.record.goodput import Goodput
from tests.support.isolated import isolated
from tests.support.pods import spec_of
from tests.support.waiting import eventually, state_of

LISTENS = """trap 'echo got >>"$NOTES/$NAME.got"; exit 0' USR1; {}; while :; do sleep 0.01; done"""
DEAF = "{}; while :; do sleep 0.01; done"
READY = 'echo >"$NOTES/ready.$NAME"'
NOBODY = Pod(PodSpec(name="x", job_id="x", mode=Mode.COLLECTIVE, containers=(), log_dir=Path()))


@pytest.fixture
def pod(tmp_path):
    made = []

    def make(*scripts):
        specs = [
            spec_of(tmp_path, script.format(READY), Role.TRAINER, rank) for rank, script in enumerate(scripts)
        ]
        made.append(
            Pod(
                PodSpec(name="x", job_id="x", mode=Mode.COLLECTIVE, containers=tuple(specs), log_dir=tmp_path)
            )
        )
        made[-1].prepare()
        for container in made[-1].containers:
            os.mkfifo(tmp_path / f"ready.{container.spec.name}")
            container.start()
            (tmp_path / f"ready.{container.spec.name}").read_text()
        return made[-1]

    yield make
    for each in made:
        for container in each.alive:
            container.process.signal_group(signal.SIGKILL)
            container.process.reap()


class Calls:
    def __init__(self):
        self.interrupts = []
        self.written = 0
        self.said = []
        self.resumed = []

    def dispatch(self, numbers, pod, later=()):
        """`later` come while the first of them are acted on."""
        reads = [bytes(numbers), bytes(later)]
        dispatch(
            lambda: reads.pop(0),
            pod,
            interrupt=self.interrupts.append,
            written=self._written,
            resumed=self.resumed.append,
            show=self.said.append,
        )

    def _written(self):
        self.written += 1


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM]
)
def test_what_ends_the_job(pod, number):
    calls = Calls()
    calls.dispatch([number], pod())
    assert calls.interrupts == [number]


def test_in_the_order_in_which_they_came(pod):
    calls = Calls()
    calls.dispatch([signal.SIGTERM, signal.SIGIO, signal.SIGINT, signal.SIGIO, signal.SIGCONT], pod())
    assert calls.interrupts == [signal.SIGTERM, signal.SIGINT]
    assert calls.written == 1, "however often the kernel told"


@pytest.mark.parametrize(
    ("now", "numbers"), [(False, [signal.SIGTERM]), (True, [signal.SIGTERM, signal.SIGQUIT])]
)
def test_a_command_ends_the_job_as_signals_do(now, numbers):
    got = []
    Interrupts.stop(SimpleNamespace(end=lambda *signalled: got.append(signalled)), "`fleetrun stop`", now)
    assert got == [(number, "`fleetrun stop`") for number in numbers]


def test_a_user_signal_reaches_those_that_have_a_handler(pod, tmp_path):
    """And only them: its default action is to die."""
    made = pod(LISTENS, DEAF)
    calls = Calls()
    calls.dispatch([signal.SIGUSR1], made)
    assert calls.said == ["SIGUSR1 passed on to trainer 0; no handler for it in trainer 1"]
    assert select.select([made.containers[0].process], [], [], 60.0)[0]
    assert (tmp_path / "trainer.0.got").read_text() == "got\n"
    assert not select.select([made.containers[1].process], [], [], 0)[0]
    assert calls.interrupts == []


def test_a_user_signal_for_nobody(pod):
    calls = Calls()
    calls.dispatch([signal.SIGUSR2], pod())
    assert calls.said == ["SIGUSR2 passed on to no process"]


def stop_and_go_on(called_off):
    """With one process below it."""
    child = subprocess.Popen(["sleep", "100"], start_new_session=True)
    suspend(called_off)
    assert state_of(child.pid) != "T"
    child.kill()
    child.wait()


def launcher(act):
    """In a process group of its own, as the real one: the kernel does not stop an orphaned group."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCONT, lambda number, frame: None)
        threading.Thread(target=threading.Event().wait, daemon=True).start()  # which takes signals too
        try:
            act()
        except BaseException:  # noqa: BLE001  # shown here, and known by the exit code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def ends_well(act):
    """Of a launcher that does this: neither stopped nor failed."""
    _, status = os.waitpid(launcher(act), os.WUNTRACED)
    assert not os.WIFSTOPPED(status), "nobody would continue it"
    assert os.waitstatus_to_exitcode(status) == 0


def ctrl_z_and_fg():
    pid = launcher(lambda: stop_and_go_on(lambda: False))
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    below = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert below
    eventually(lambda: all(state_of(each) == "T" for each in below))
    os.kill(pid, signal.SIGCONT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def continued():
    os.kill(os.getpid(), signal.SIGCONT)
    return False


def called_off_at_the_last_moment():
    for called_off in (continued, lambda: True):
        ends_well(lambda called_off=called_off: stop_and_go_on(called_off))


def followed(numbers, later):
    """A stop is not, where a SIGCONT is among the signals of this look or of the next."""
    calls = Calls()
    calls.dispatch(numbers, NOBODY, later)
    assert (calls.said, calls.resumed, calls.interrupts) == ([], [], [signal.SIGINT])


def called_off_before_it_was_followed():
    ends_well(lambda: followed([signal.SIGTSTP, signal.SIGCONT], [signal.SIGINT]))
    ends_well(lambda: followed([signal.SIGTSTP], [signal.SIGINT, signal.SIGCONT]))


def orphans_are_reaped_and_containers_left():
    lives, ends = os.pipe()
    orphan = subprocess.run(
        ["/bin/sh", "-c", "exec 3<&0; cat <&3 >/dev/null & echo $!"],
        stdin=lives,
        stdout=subprocess.PIPE,
        check=True,
    )
    pid = int(orphan.stdout)
    os.close(ends)  # its shell has ended, which would have reaped it
    eventually(lambda: state_of(pid) == "Z")
    Calls().dispatch([signal.SIGCHLD], NOBODY)
    assert state_of(pid) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ctrl_z_and_fg,
        called_off_at_the_last_moment,
        called_off_before_it_was_followed,
        orphans_are_reaped_and_containers_left,
    ],
)
def test_alone(case):
    isolated(case)


# ---- What the record says of a launch.


def test_the_version_is_that_of_the_package():
    assert version("fleetrun") == __version__


def test_the_time_that_is_exported_never_goes_back():
    """Since the last report of the first trainer it may have failed; a report of another does not count."""
    sent = []
    goodput = Goodput()
    exports = SimpleNamespace(_send=lambda *message: sent.append(message), _goodput=goodput)
    first = {"container": "trainer.0"}
    for time, event, fields in (
        (0, "launch", {}),
        (0, "ready", {"containers": [{"name": "trainer.0", "role": "trainer"}]}),
        (1, "started", first),
        (2, "progress", {**first, "step": 1}),
        (12, "progress", {**first, "step": 10}),
        (20, "progress", {"container": "trainer.1", "step": 20}),
        (21, "exited", {**first, "code": -9}),
    ):
        said = {"time": time, "event": event, **fields}
        goodput.take(said)
        Exports.noted(exports, said)
    spent = [fields["seconds"] for kind, fields in sent if kind == "spent"]
    for earlier, later in itertools.pairwise(spent):
        assert all(later[kind] >= seconds for kind, seconds in earlier.items())
    assert spent[-1] == {"steps": 10.0, "start-up": 2.0, "restarts": 9.0}
