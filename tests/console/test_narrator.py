"""What is told of a failure while the job goes on."""

from fleetrun.console.console import Console
from fleetrun.console.narrator import Narrator
from fleetrun.envs.channels import ErrorRecord
from fleetrun.envs.contract import Mode
from fleetrun.pod.container import Ended
from fleetrun.pod.events import Failure
from fleetrun.pod.policy import Restart
from fleetrun.pod.process import Exit
from fleetrun.pod.spec import PodSpec
from tests.support.pods import spec_of


class Lines:
    def __init__(self):
        self.text = ""

    def write(self, data):
        self.text += data.decode()


def test_words_of_a_script_do_nothing_to_a_terminal(tmp_path):
    failed, before = (spec_of(tmp_path, "exit 3", rank=rank) for rank in (0, 1))
    ended = Ended(spec=failed, exit=Exit(3), pid=1, started=1.0, ended=2.0, attempt=0)
    record = ErrorRecord("ValueError: \x1b[2Jbad\nand more", "", 1.0)
    restart = Restart(after=0.0, number=1, limit=3)
    failure = Failure(ended=ended, decision=restart, earlier=((before, record),), alive=1)
    pod = PodSpec(name="abcdef", job_id="j", mode=Mode.COLLECTIVE, containers=(), log_dir=tmp_path)
    lines = Lines()
    Narrator(Console(lines, lines), pod, lambda: None).handle(failure)
    assert "; trainer 1 had failed before: ValueError: bad; restart 1 of 3" in lines.text
    assert lines.text.count("\n") == 1
