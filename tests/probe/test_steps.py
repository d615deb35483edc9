"""The steps of a script that says nothing of them: counted by the probe at torch's optimizers."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import OrderedDict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from fleetrun.probe.states import LastStep, read_state
from trainers.progress.meter import Meter

INSIDE = Path(__file__).parents[2] / "fleetrun" / "probe" / "inside"


class Script:
    """Two optimizers, whose steps are counted; and what comes to the launcher."""

    def __init__(self, folder, monkeypatch):
        spec = spec_from_file_location("steps_under_test", INSIDE / "fleetrun_steps.py")
        self.module = module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.launcher = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.launcher.bind(str(folder / "socket"))
        self.steps = self.module.Steps("p.trainer.0", str(folder / "socket"))
        hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
        monkeypatch.setattr(
            sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict(hooks)
        )
        self.steps.watch(sys.modules["torch.optim.optimizer"])
        self.a, self.b = self.optimizer(), self.optimizer()

    def optimizer(self, kind=torch.optim.AdamW):
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        return kind([parameter], lr=0.1)

    def last_words(self):
        found = []
        while True:
            try:
                found.append(json.loads(self.launcher.recv(9000)))
            except BlockingIOError:
                return found

    def told(self):
        self.steps.end()
        return [each["step"] for each in self.last_words()]


@pytest.fixture
def script(tmp_path, monkeypatch):
    made = Script(tmp_path, monkeypatch)
    yield made
    made.steps.end()
    made.launcher.close()


def test_the_first_and_the_last_step_are_reported_and_two_a_second_between(script):
    for _ in range(50):
        script.a.step()
    script.steps.end()
    first, *between, last = script.last_words()
    assert (first["mark"], first["step"], last["step"]) == ("p.trainer.0", 1, 50)
    assert len(between) < 5
    assert script.told() == []


@pytest.mark.parametrize(
    ("turns", "count"),
    [("ab" * 5, 5), ("aaab" * 3, 9), ("abbbb", 4), ("aaabbb", 5)],
    ids=["a round", "one more often", "another way round", "one after the other"],
)
def test_optimizers_that_take_turns_make_one_step(script, turns, count):
    for each in turns:
        getattr(script, each).step()
    assert script.steps.last()[0] == count


def test_what_was_loaded_from_a_checkpoint_counts(script):
    for _ in range(7):
        script.a.step()
    resumed = script.optimizer()
    resumed.load_state_dict(script.a.state_dict())
    again = script.module.Steps("p.trainer.0", "/nowhere")
    again.watch(sys.modules["torch.optim.optimizer"])
    resumed.step()
    resumed.step()
    assert again.last()[0] == 9


def test_a_state_that_remembers_no_steps_counts_from_1(script):
    script.optimizer(torch.optim.SGD).step()
    assert script.steps.last()[0] == 1


def test_an_optimizer_that_cannot_be_counted_still_steps(script):
    script.a.state = {0: {"step": torch.tensor(float("nan"))}}
    script.steps._hook(script.a, (), {})
    assert script.steps.last() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_steps_are_the_same_graphs(script, monkeypatch):
    """And are not counted."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.code))
        return graph.forward

    def compiled():
        torch._dynamo.reset()
        graphs.clear()
        optimizer = script.optimizer()
        step = torch.compile(lambda: optimizer.step(), backend=backend)
        for _ in range(3):
            step()
        return list(graphs)

    with_hook = compiled()
    assert script.steps.last() is None
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_post_hooks", OrderedDict())
    assert with_hook == compiled()
    assert with_hook


def test_a_descriptor_that_the_script_closed_and_uses_is_the_scripts(script):
    script.a.step()
    number = script.steps._socket[0].fileno()
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    os.dup2(mine.fileno(), number)
    script.a.step()
    script.steps.end()
    with pytest.raises(BlockingIOError):
        other.recv(100)
    assert [each["step"] for each in script.last_words()] == [1, 2]
    mine.close()
    other.close()


def test_without_a_launcher_all_steps_are_taken(script):
    script.launcher.close()
    for _ in range(3):
        script.a.step()
    script.steps.end()
    assert script.steps.last()[0] == 3


def test_a_child_reports_nothing(script):
    script.a.step()
    if not (child := os.fork()):
        script.a.step()
        script.steps._next = 0
        script.a.step()
        script.steps.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert [each["step"] for each in script.last_words()] == [1]


# ---- with `trainers.progress` in the process


class Wire:
    def __init__(self):
        self.last_words = []

    def send(self, datagram):
        self.last_words.append(json.loads(datagram).get("step"))
        return True


@pytest.fixture
def meter(script):
    made = Meter("p.trainer.0", Wire(), clock=iter(range(1000)).__next__)
    script.steps.report = made.optimizer_stepped
    return made


def test_it_reports_instead(script, meter):
    script.a.step()
    script.a.step()
    assert meter._channel.last_words == [1, 2]
    assert script.last_words() == []
    assert meter.last_step()[0] == 2


def test_a_script_that_counts_its_steps_is_believed(script, meter):
    script.a.step()
    meter.report(step=100)
    script.a.step()
    meter.step()
    assert meter._channel.last_words == [1, 100, 101]


def test_its_first_step_is_the_first_whatever_an_optimizer_did_before(script, meter):
    for _ in range(3):
        script.a.step()
    meter.step()
    assert meter._channel.last_words == [1, 2, 3, 1]


def test_a_runtime_that_counts_is_believed(script, meter):
    meter.has_counter()
    script.a.step()
    script.a.step()
    meter.counted(1)
    assert meter._channel.last_words == [1]


# ---- in an answer


def test_the_last_step_is_in_the_state(script):
    script.a.step()
    script.a.step()
    said = {"rank": 0, "title": "trainer 0", "alive": True, "probe": {"step": script.steps.last()}}
    step = read_state(json.loads(json.dumps(said))).step
    assert isinstance(step, LastStep)
    assert step.number == 2
    assert step.ago >= 0
    assert step.seconds > 0
