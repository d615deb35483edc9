"""What is told of an evaluator that failed: on the console and on the status. It changes nothing else."""

from types import SimpleNamespace

import pytest

from fleetrun.console.console import Console
from fleetrun.console.narrator import Narrator
from fleetrun.envs.contract import Mode, Role
from fleetrun.pod.container import Container, Ended, Pod
from fleetrun.pod.events import Failure, Restarting, Started
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.pod.process import Exit
from fleetrun.pod.spec import PodSpec
from tests.support.pods import spec_of
from tests.support.record_lines import happened, set_pod
from tests.support.status import job_status

DECISIONS = [
    (Restart(after=0.0, number=1, limit=3), "restart 1 of 3 of evaluator 0 now; log "),
    (Restart(after=0.5, number=2, limit=3), "restart 2 of 3 of evaluator 0 in 0.5 s; log "),
    (GiveUp("--max_restart is 3"), "--max_restart is 3: the job continues without it"),
]


class Lines:
    room = True

    def __init__(self):
        self.text = ""

    def write(self, data):
        self.text += data.decode()


def failure(folder, decision, role=Role.EVALUATOR):
    spec = spec_of(folder, "exit 3", role)
    ended = Ended(spec=spec, exit=Exit(3), pid=1, started=1.0, ended=2.0, attempt=0)
    return Failure(ended=ended, decision=decision)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("mode", [Mode.COLLECTIVE, Mode.PS])
@pytest.mark.parametrize(("decision", "told"), DECISIONS)
def test_on_the_console(tmp_path, decision, told, mode, alone):
    lines = Lines()
    spec = PodSpec(name="abcdef", job_id="default", mode=mode, containers=(), log_dir=tmp_path)
    narrator = Narrator(Console(lines, lines), spec, lambda: None, alone=alone)
    narrator.handle(failure(tmp_path, decision))
    assert "evaluator 0 exited with code 3" in lines.text
    assert told in lines.text


@pytest.mark.parametrize(("decision", "told"), DECISIONS)
def test_on_the_board(tmp_path, decision, told):
    status = job_status()
    evaluator = Container(spec_of(tmp_path, "exit 3", Role.EVALUATOR))
    trainer = Container(spec_of(tmp_path, "exit 3"))
    pod = PodSpec(
        name="p", job_id="j", mode=Mode.PS, containers=(trainer.spec, evaluator.spec), log_dir=tmp_path
    )
    set_pod(status, Pod(pod))
    for number, each in enumerate((trainer, evaluator)):
        each.process = SimpleNamespace(pid=100 + number, exit=None)
    happened(status, Started([trainer, evaluator]))
    happened(status, failure(tmp_path, decision))
    happened(status, Restarting([evaluator]))
    assert (status.fields()["state"], status.fields()["restarts"]) == ("running", 0)
    happened(status, failure(tmp_path, DECISIONS[0][0], Role.TRAINER))
    happened(status, Restarting([trainer, evaluator]))
    assert (status.fields()["state"], status.fields()["restarts"]) == ("restarting", 1)
