"""`fleetrun status` of a job on several machines, with a launcher that is only a socket."""

import base64
import json

import pytest

from fleetrun.control.node_status import pack
from fleetrun.errors import UsageError
from fleetrun.verbs import answer
from tests.support.serving import serving, status_of


def container(number, rank, **more):
    return {
        "name": f"trainer.{number}", "role": "trainer", "rank": rank, "index": number, "state": "running",
        "alive": True, "pid": 4_000_000_000 + rank, "attempt": 0, "started": 1000.0, "ended": None,
        "exit": None,
        "log": "/logs/0", "gpus": "", "step": 10 + rank, "of": None, "left": None, "samples": None,
        "loss": None, "rate": None, "step_seconds": None, "activity": None, **more,
    }  # fmt: skip


class Launcher:
    """Of three nodes this is 1; 2 says nothing. Remembers what it was asked."""

    def __init__(self):
        self.asked = []
        self.nodes = [{"rank": rank, "title": f"h{rank}", "this": rank == 1} for rank in range(3)]
        self.here = status_of(
            "job", "abcdef", nodes=self.nodes, containers=[container(0, 2), container(1, 3)]
        )
        self.other = {**self.here, "pod": "ghijkl", "containers": [container(0, 0), container(1, 1)]}

    def __call__(self, question):
        self.asked.append({name: value for name, value in question.items() if name != "asker"})
        if not question.get("everywhere"):
            return self.here
        first, here, silent = self.nodes
        packed = base64.b64encode(pack(self.other, False, 9999)).decode()
        silent = {**silent, "silent": "no answer within 2 s"}
        return {**self.here, "nodes": [{**first, "packed": packed}, here, silent]}


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    made = Launcher()
    with serving(tmp_path / "run" / "fleetrun" / "abcdef.sock", made):
        yield made


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_all_nodes_and_their_processes(launcher, capsys):
    assert answer("status", []) == 0
    said = lines(capsys)
    assert said[0].startswith("job (pod abcdef), collective, running, 4 of 4 processes up")
    assert [line.split() for line in said[2:6]] == [
        ["NODE", "HOST", "STATE", "PROCESSES", "UP", "POD", "STEP"],
        ["0", "h0", "running", "2", "of", "2", "up", "5s", "ghijkl", "10"],
        ["1", "h1", "running", "2", "of", "2", "up", "5s", "abcdef", "12", "here"],
        ["2", "h2", "no", "answer", "within", "2", "s"],
    ]
    assert said[6] == ""
    assert [line.split()[:3] for line in said[7:]] == [
        ["NODE", "NAME", "RANK"],
        ["0", "trainer.0", "0"],
        ["0", "trainer.1", "1"],
        ["1", "trainer.0", "2"],
        ["1", "trainer.1", "3"],
    ]


def test_one_node(launcher, capsys):
    assert answer("status", ["--node", "0"]) == 0
    assert launcher.asked[-1] == {"ask": "status", "everywhere": True, "all": False, "node": 0}
    said = lines(capsys)
    assert "2 of 2 processes up" in said[0]
    assert [line.split()[:2] for line in said[3:]] == [
        ["0", "h0"], [], ["NODE", "NAME"], ["0", "trainer.0"], ["0", "trainer.1"],
    ]  # fmt: skip


def test_one_that_does_not_answer(launcher, capsys):
    assert answer("status", ["--node", "2"]) == 0
    said = lines(capsys)
    assert "processes up" not in said[0]
    assert [line.split()[:3] for line in said[2:]] == [["NODE", "HOST", "STATE"], ["2", "h2", "no"]]


def test_all_of_many(launcher, capsys):
    assert answer("status", ["--all"]) == 0
    assert launcher.asked[-1]["all"] is True


def test_one_that_is_not_there(launcher):
    with pytest.raises(UsageError, match=r"no node 3: this job has nodes 0 to 2"):
        answer("status", ["--node", "3"])
    launcher.nodes.clear()
    assert answer("status", ["--node", "0"]) == 0
    with pytest.raises(UsageError, match=r"no node 1: this job has one node, 0"):
        answer("status", ["--node", "1"])
    launcher.here["waiting"] = {"present": 1, "wanted": 3, "missing": []}
    with pytest.raises(UsageError, match=r"no node 1: .* none yet"):
        answer("status", ["--node", "1"])


def test_a_job_on_one_machine_asks_nobody_else(launcher, capsys):
    launcher.nodes.clear()
    assert answer("status", []) == 0
    assert launcher.asked == [{"ask": "status"}]


def test_for_programs(launcher, capsys):
    assert answer("status", ["--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    first, here, silent = status["nodes"]
    assert (first["pod"], first["states"], first["silent"]) == ("ghijkl", {"running": 2}, None)
    assert [each["rank"] for each in first["containers"]] == [0, 1]
    assert here["containers"] == status["containers"]
    assert "cpu" in here["containers"][0], "what can be seen from outside"
    assert silent == {"rank": 2, "title": "h2", "this": False, "silent": "no answer within 2 s"}
