"""What a launcher answers, after what the supervisor told."""

import json
from types import SimpleNamespace

import pytest

from fleetrun.control.server import Control, JobStatus
from fleetrun.envs.contract import Mode, Role
from fleetrun.pod.container import Ended, Pod, Status
from fleetrun.pod.events import Ending, Failure, Leaving, Started
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.pod.process import Exit
from fleetrun.pod.spec import PodSpec
from fleetrun.progress.reports import Activity, Report
from tests.support.pods import spec_of

FACTS = {
    "job": "default", "pod": "abcdef", "mode": "ps", "log_dir": "/logs", "cwd": "/here", "max_restart": 3,
    "started": 1000.0, "pid": 11, "guard": 10,
}  # fmt: skip


class ProgressReceiver:
    """Reports of trainer 0."""

    def latest(self, container: str, /) -> Report | None:
        if container != "trainer.0":
            return None
        activity = Activity("loading", 3.0, None)
        return Report(
            pod="abcdef", role="trainer", rank=0, step=7, samples=70, loss=float("nan"), activity=activity
        )

    def rate(self, container: str, /) -> float | None:
        return 12.5 if container == "trainer.0" else None


@pytest.fixture
def pod(tmp_path):
    specs = (spec_of(tmp_path, "true", Role.SERVER), *(spec_of(tmp_path, "true", rank=n) for n in (0, 1)))
    hook = spec_of(tmp_path, "true", label="pre_hook")
    spec = PodSpec(
        name="abcdef", job_id="default", mode=Mode.PS, containers=specs, log_dir=tmp_path, pre_hook=hook
    )
    return Pod(spec)


@pytest.fixture
def now():
    return [5000.0]


@pytest.fixture
def status(now):
    return JobStatus(FACTS, ProgressReceiver(), clock=lambda: now[0], wall=lambda: now[0] + 1e9)


def run(status, *containers):
    """As the deployer does, and then the supervisor."""
    for number, each in enumerate(containers):
        each.process = SimpleNamespace(pid=100 + number, exit=None)
        each.status = Status.RUNNING
    status.handle(Started(list(containers)))


def end(status, container, code):
    container.process.exit = Exit(code)
    container.status = Status.FAILED if code else Status.COMPLETED
    ended = Ended(spec=container.spec, exit=Exit(code), pid=100, started=1.0, ended=2.0, attempt=0)
    status.handle(ended)
    return ended


def of(status, name):
    return next(each for each in status.fields()["containers"] if each["name"] == name)


def test_a_job_that_has_just_begun(status, now):
    now[0] += 2.5
    status = status.fields()
    assert status["job"] == "default"
    assert status["version"] == 1
    assert (status["pid"], status["guard"], status["log_dir"]) == (11, 10, "/logs")
    assert (status["started"], status["elapsed"]) == (1000.0, 2.5)
    assert (status["state"], status["containers"], status["nodes"]) == ("meeting", [], [])


def test_processes_that_run(status, pod, now):
    status.set_pod(pod, 0)
    assert status.fields()["state"] == "starting"
    run(status, *pod.containers)
    assert status.fields()["state"] == "running"
    assert [each["name"] for each in status.fields()["containers"]] == ["ps.0", "trainer.0", "trainer.1"]
    trainer = of(status, "trainer.0")
    assert (trainer["pid"], trainer["state"], trainer["role"], trainer["rank"]) == (
        101,
        "running",
        "trainer",
        0,
    )
    assert trainer["started"] == now[0] + 1e9
    assert trainer["exit"] is None


@pytest.mark.parametrize(
    ("seen", "own", "gpus"),
    [
        ("0,1", "1", "1"),
        ("4,5", "1", "5"),  # --gpus 4,5
        ("4,5", "0,1", "4,5"),
        ("GPU-5e,GPU-7f", "1", "GPU-7f"),
        ("", "", ""),
        ("4", "1", ""),
    ],
)
def test_gpus_are_told_by_the_names_that_the_machine_has_for_them(status, pod, seen, own, gpus):
    pod.containers[1].spec.env.update(CUDA_VISIBLE_DEVICES=seen, FLAGS_selected_gpus=own)
    status.set_pod(pod, 0)
    assert of(status, "trainer.0")["gpus"] == gpus


def test_what_they_report(status, pod):
    status.set_pod(pod, 0)
    run(status, *pod.containers)
    trainer = of(status, "trainer.0")
    assert (trainer["step"], trainer["samples"], trainer["rate"]) == (7, 70, 12.5)
    assert trainer["activity"] == {"what": "loading", "done": 3.0, "of": None}
    assert of(status, "trainer.1")["step"] is None


def test_one_that_ended_says_how_and_reports_no_more(status, pod):
    status.set_pod(pod, 0)
    run(status, *pod.containers)
    end(status, pod.containers[1], -9)
    trainer = of(status, "trainer.0")
    assert (trainer["alive"], trainer["pid"], trainer["state"]) == (False, None, "failed")
    assert (trainer["exit"], trainer["ended"]) == (-9, 2.0)
    assert (trainer["step"], trainer["rate"]) == (None, None)


def test_a_failure_is_restarted_and_counted(status, pod):
    status.set_pod(pod, 1)
    run(status, *pod.containers)
    ended = end(status, pod.containers[1], 3)
    status.handle(Failure(ended=ended, decision=Restart(after=1.0, number=2, limit=3), alive=2))
    assert (status.fields()["state"], status.fields()["restarts"]) == ("restarting", 2)
    run(status, pod.containers[1])
    assert status.fields()["state"] == "running"
    assert of(status, "trainer.0")["exit"] is None, "the end of the attempt before is the past"


def test_a_failure_that_is_the_last_ends_the_job(status, pod):
    status.set_pod(pod, 0)
    run(status, *pod.containers)
    ended = end(status, pod.containers[1], 3)
    status.handle(Failure(ended=ended, decision=GiveUp("enough"), alive=2))
    assert (status.fields()["state"], status.fields()["why"]) == ("ending", "exited with code 3")


def test_leaving_and_ending(status, pod):
    status.set_pod(pod, 0)
    run(status, *pod.containers)
    status.handle(Leaving(pod.containers[:1]))
    assert status.fields()["state"] == "leaving"
    status.handle(Ending("got SIGTERM"))
    assert (status.fields()["state"], status.fields()["why"]) == ("ending", "got SIGTERM")


def test_the_pre_hook_shows_while_it_runs(status, pod):
    status.set_pod(pod, 0)
    run(status, pod.hook)
    assert of(status, "pre_hook")["state"] == "running"
    end(status, pod.hook, 0)
    assert "pre_hook" not in [each["name"] for each in status.fields()["containers"]]


def test_machines_that_meet(status):
    status.waiting(3, 4, ["10.0.0.7"])
    assert status.fields()["waiting"] == {"present": 3, "wanted": 4, "missing": ["10.0.0.7"]}
    status.met(["h1 (10.0.0.1)", "h2 (10.0.0.2)"], 1)
    assert status.fields()["waiting"] is None
    assert status.fields()["nodes"] == [
        {"rank": 0, "title": "h1 (10.0.0.1)", "this": False},
        {"rank": 1, "title": "h2 (10.0.0.2)", "this": True},
    ]


@pytest.mark.parametrize(("restart", "state"), [(True, "restarting"), (False, "ending")])
def test_what_happened_on_another_machine(status, pod, restart, state):
    status.set_pod(pod, 0)
    run(status, *pod.containers)
    status.stopping("trainer 3 exited with code 7", restart)
    assert (status.fields()["state"], status.fields()["why"]) == (
        state,
        "trainer 3 exited with code 7",
    )
    status.set_pod(pod, 1)
    assert (status.fields()["state"], status.fields()["why"], status.fields()["restarts"]) == (
        "starting",
        "",
        1,
    )


# ---- what is answered, and done


@pytest.fixture
def control(status):
    loop = Loop()
    said: list[str] = []
    got: list[int] = []
    made = Control(loop, status, got.append, said.append)
    made.said, made.got, made.loop = said, got, loop  # type: ignore[attr-defined]
    yield made
    made.close()
    loop.close()


def turn(loop):
    loop.after(0, loop.stop)
    loop.run()


@pytest.mark.parametrize("question", [{}, {"ask": "dance"}, {"ask": ["status"]}, {"ask": None}])
def test_what_it_does_not_know(control, question):
    assert "does not know" in control.answer(question)["error"]


@pytest.mark.parametrize(
    ("at_once", "signals"), [(False, [15]), (True, [15, 3]), ("yes", [15]), (None, [15])]
)
def test_a_stop_is_answered_first_and_then_done(control, at_once, signals):
    got = control.got
    assert control.answer({"ask": "stop", "now": at_once})["stopping"] == "default"
    assert got == []
    turn(control.loop)
    assert got == signals
    assert "asks this job to end" in control.said[0]


def test_without_a_place_for_the_socket_the_job_runs_and_says_so(control, tmp_path):
    (tmp_path / "file").write_text("")
    control.open(tmp_path / "file" / "fleetrun")
    assert "will not find this job" in control.said[0]


def test_the_folder_of_another_is_not_used(control, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    control.open(tmp_path / "open")
    assert "open to other users" in control.said[0]
    assert list((tmp_path / "open").iterdir()) == []


def test_every_answer_is_json(status, pod):
    status.set_pod(pod, 0)
    run(status, *pod.containers)
    json.dumps(status.fields())
