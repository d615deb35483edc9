"""The socket of a launcher: what comes back, who is heard, what bad callers cost."""

import json
import os
import socket
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetrun.control.client import NoLauncher, ask
from fleetrun.control.server import LONGEST, MOST, Control, JobStatus, Server, may_ask
from fleetrun.envs.channels import BREAKPOINT
from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.progress_report import Activity, Report
from fleetrun.files import control_socket, short_socket_path
from fleetrun.pod.container import Ended, Pod, Status
from fleetrun.pod.events import Ending, Failure, Leaving, Started
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.pod.process import Exit
from fleetrun.pod.spec import PodSpec
from fleetrun.record.journal import plain
from tests.support.pods import spec_of
from tests.support.record_lines import happened, line, met, set_pod, waits
from tests.support.serving import serving
from tests.support.waiting import eventually

PATIENT = 100.0  # seconds


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller of this process may be kept waiting by a busy machine."""
    monkeypatch.setattr("fleetrun.control.server.PATIENCE", PATIENT)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The socket of a server that answers with the question, and to `who` with who asks."""

    def answer(question):
        asker = question.pop("asker")
        return {"by": asker} if question.get("ask") == "who" else {"asked": question}

    place = tmp_path / "run" / "abcdef.sock"
    with serving(place, answer):
        yield place


def call(path: Path) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.settimeout(60)
    with short_socket_path(path) as name:
        caller.connect(name)
    return caller


def spoken(path: Path, said: bytes) -> bytes:
    with call(path) as caller:
        caller.sendall(said)
        caller.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: caller.recv(1 << 16), b""))


def test_a_question_is_answered(path):
    assert ask(path, {"ask": "status", "n": 1}, 60) == {"asked": {"ask": "status", "n": 1}}


def test_the_kernel_says_who_asks_and_not_the_question(path):
    assert ask(path, {"ask": "who", "asker": [1, 2]}, 60) == {"by": [os.getpid(), os.getuid()]}


def test_one_line_and_the_connection_is_over(path):
    answer = spoken(path, b'{"ask": 1}\n{"ask": 2}\n')
    assert json.loads(answer) == {"asked": {"ask": 1}}


def test_a_question_may_come_in_pieces(path):
    with call(path) as caller:
        for byte in b'{"ask": 1}\n':
            caller.sendall(bytes([byte]))
        assert caller.recv(1 << 16) == b'{"asked": {"ask": 1}}\n'


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"status\n", "JSON object"),
        (b"\xff\xfe\x00\n", "JSON object"),
        (b"[" * 40_000 + b"\n", "JSON object"),
        (b"[1]\n", "a JSON object"),
        (b"\n", "JSON object"),
        (b"x" * (LONGEST + 1), f"at most {LONGEST} bytes"),
    ],
)
def test_nonsense_is_answered_by_an_error(path, said, error):
    assert error in json.loads(spoken(path, said))["error"]


@pytest.mark.parametrize("said", [b"", b'{"ask": "status"}'])
def test_half_a_question_gets_no_answer(path, said):
    assert spoken(path, said) == b""


def test_only_its_user_reaches_it(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("uid", "own", "answered"), [(7, 7, True), (0, 7, True), (8, 7, False), (7, 0, False)]
)
def test_nobody_else_is_answered(uid, own, answered):
    assert may_ask(uid, own) is answered


def test_who_says_nothing_keeps_nobody_waiting(path):
    silent = [call(path) for _ in range(5)]
    assert ask(path, {}, 60) == {"asked": {}}
    for each in silent:
        each.close()


def test_of_too_many_callers_the_oldest_is_sent_away(path):
    """Not the newest: callers that say nothing would hide the job."""
    silent = [call(path) for _ in range(MOST)]
    assert ask(path, {}, 60) == {"asked": {}}
    assert silent[0].recv(10) == b""
    silent[-1].sendall(b"{}\n")
    assert json.loads(silent[-1].recv(100)) == {"asked": {}}
    for each in silent:
        each.close()


def test_a_slow_caller_is_let_go(path, tmp_path):
    now = [0.0]
    loop = Loop(lambda: now[0])
    slow = Server(loop, tmp_path / "slowly.sock", lambda question: question)
    with call(slow.path) as caller:
        caller.sendall(b'{"ask"')
        turns(loop, 3)
        now[0] += PATIENT + 1
        turns(loop, 2)
        assert caller.recv(10) == b""
    slow.close()
    loop.close()


def turns(loop: Loop, count: int) -> None:
    """So many times around, whatever comes."""
    for _ in range(count):
        loop.after(0, loop.stop)
        loop.run()


def test_a_long_answer_goes_out_in_pieces(tmp_path):
    long = "x" * (8 << 20)
    with serving(tmp_path / "abcdef.sock", lambda _: {"long": long}) as server:
        assert ask(server.path, {}, 60) == {"long": long}


def test_who_does_not_read_a_long_answer_keeps_nobody_waiting(tmp_path):
    with serving(
        tmp_path / "abcdef.sock", lambda q: {"long": "x" * (8 << 20 if "big" in q else 1)}
    ) as server:
        with call(server.path) as deaf:
            deaf.sendall(b'{"big": 1}\n')
            assert ask(server.path, {}, 60) == {"long": "x"}
        assert ask(server.path, {}, 60) == {"long": "x"}


def test_a_path_may_be_longer_than_an_address(tmp_path):
    deep = tmp_path.joinpath(*["long" * 12] * 6)
    deep.mkdir(mode=0o700, parents=True)
    with serving(deep / "abcdef.sock", lambda _: {"deep": True}) as server:
        assert len(str(server.path)) > 300
        assert ask(server.path, {}, 60) == {"deep": True}


def test_it_takes_its_socket_away_and_may_be_closed_twice(tmp_path):
    with serving(tmp_path / "abcdef.sock", lambda _: {}) as server:
        assert list(tmp_path.iterdir()) == [server.path]
    assert list(tmp_path.iterdir()) == []
    server.close()
    with pytest.raises(NoLauncher):
        ask(server.path, {}, 60)


def test_what_is_not_its_own_stays(tmp_path):
    with serving(tmp_path / "abcdef.sock", lambda _: {}) as server:
        server.path.unlink()
        server.path.write_text("somebody else's")
    assert server.path.read_text() == "somebody else's"


def test_without_a_descriptor_it_does_not_spin_and_comes_back(tmp_path):
    now = [0.0]
    loop = Loop(lambda: now[0])
    server = Server(loop, tmp_path / "abcdef.sock", lambda question: {"fine": True})
    with call(server.path) as caller:
        caller.sendall(b"{}\n")
        with no_descriptor_left():
            turns(loop, 1)
        turns(loop, 4)  # there is one again, but it looks later
        caller.setblocking(False)
        with pytest.raises(BlockingIOError):
            caller.recv(10)
        now[0] += 2
        turns(loop, 4)
        assert caller.recv(100) == b'{"fine": true}\n'
    server.close()
    loop.close()


class no_descriptor_left:
    def __enter__(self) -> None:
        import resource

        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, self._limits[1]))

    def __exit__(self, *_: object) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def test_numbers_that_json_does_not_have_are_words(tmp_path):
    assert plain({"a": [float("nan"), (float("-inf"), 1.5)], 3: None}) == {
        "a": ["nan", ["-inf", 1.5]],
        "3": None,
    }


def test_an_answer_may_come_later(tmp_path):
    """And only once to each; who did not wait is missed by nobody, and who has said all that he has to say is
    answered all the same.
    """
    waiting = []
    with serving(tmp_path / "run" / "abcdef.sock", lambda question: waiting.append) as server:
        callers = [call(server.path) for _ in range(3)]
        for caller in callers:
            caller.sendall(b'{"ask": 1}\n')
        callers[1].shutdown(socket.SHUT_WR)
        callers[2].close()
        eventually(lambda: len(waiting) == 3)
        for number, say in enumerate(waiting):
            server._loop.after(0.0, partial(say, {"number": number}))
        with call(server.path) as another:
            another.sendall(b"{}\n")  # wakes the loop
            found = sorted(caller.recv(1 << 16) for caller in callers[:2])
        assert len(found) == 2
        assert all(json.loads(line)["number"] in range(3) for line in found)
        for caller in callers[:2]:
            assert caller.recv(1) == b""
            caller.close()


def test_an_answer_that_comes_too_late_finds_nobody(tmp_path):
    waiting = []
    with serving(tmp_path / "run" / "abcdef.sock", lambda question: waiting.append) as server:
        with call(server.path) as caller:
            caller.sendall(b"{}\n")
            eventually(lambda: waiting)
            next(iter(server._talks))._limit.fire()
            assert caller.recv(1 << 16) == b""
        waiting[0]({"late": True})
        assert not server._talks


# ---- What a launcher answers, after what the supervisor told.

FACTS = {
    "job": "default", "pod": "abcdef", "mode": "ps", "log_dir": "/logs", "cwd": "/here", "max_restart": 3,
    "script": "train.py", "pid": 11, "guard": 10,
}  # fmt: skip


LOADING = "loading"


class ProgressReceiver:
    """Reports of trainer 0."""

    def latest(self, container: str, /) -> Report | None:
        if container != "trainer.0":
            return None
        activity = Activity(LOADING, 3.0, None)
        return Report(
            pod="abcdef",
            role="trainer",
            rank=0,
            step=7,
            of=9,
            samples=70,
            loss=float("nan"),
            activity=activity,
        )

    def age(self, container: str, /) -> float | None:
        return 5000.0 if container == "trainer.0" else None

    def speeds(self, container: str, /) -> tuple[float | None, float | None, float | None]:
        return (12.5, 0.25, 3.5) if container == "trainer.0" else (None, None, None)


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
def status(now, monkeypatch):
    monkeypatch.setattr("fleetrun.control.server.time.time", lambda: now[0] + 1e9)
    made = JobStatus(ProgressReceiver(), clock=lambda: now[0] + 1e9)
    made.handle({"time": 1000.0, "event": "launch", **FACTS})
    return made


def run(status, *containers):
    """As the deployer does, and then the supervisor."""
    for number, each in enumerate(containers):
        each.process = SimpleNamespace(pid=100 + number, exit=None)
        each.status = Status.RUNNING
    happened(status, Started(list(containers)))


def end(status, container, code):
    container.process.exit = Exit(code)
    container.status = Status.FAILED if code else Status.COMPLETED
    ended = Ended(spec=container.spec, exit=Exit(code), pid=100, started=1.0, ended=2.0, attempt=0)
    happened(status, ended)
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
    set_pod(status, pod)
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
    set_pod(status, pod)
    assert of(status, "trainer.0")["gpus"] == gpus


def test_what_they_report(status, pod):
    set_pod(status, pod)
    run(status, *pod.containers)
    trainer = of(status, "trainer.0")
    assert (trainer["step"], trainer["samples"], trainer["rate"]) == (7, 70, 12.5)
    assert trainer["step_seconds"] == 0.25
    assert trainer["activity"] == {"what": "loading", "done": 3.0, "of": None}
    assert of(status, "trainer.1")["step"] is None


@pytest.mark.parametrize(
    ("state", "shown"),
    [(Status.RUNNING, "debugged"), (Status.TERMINATING, "terminating"), (Status.RESTARTING, "restarting")],
)
def test_a_process_that_stops_is_not_shown_as_debugged(status, pod, monkeypatch, state, shown):
    monkeypatch.setitem(globals(), "LOADING", BREAKPOINT)
    set_pod(status, pod)
    run(status, *pod.containers)
    pod.containers[1].status = state
    assert of(status, "trainer.0")["state"] == shown


def test_one_that_ended_says_how_and_reports_no_more(status, pod, now):
    set_pod(status, pod)
    run(status, *pod.containers)
    end(status, pod.containers[1], -9)
    trainer = of(status, "trainer.0")
    assert (trainer["alive"], trainer["pid"], trainer["state"]) == (False, None, "failed")
    assert (trainer["exit"], trainer["ended"]) == (-9, now[0] + 1e9)
    assert (trainer["step"], trainer["rate"]) == (None, None)


def test_a_failure_is_restarted_and_counted(status, pod):
    set_pod(status, pod, 1)
    run(status, *pod.containers)
    ended = end(status, pod.containers[1], 3)
    happened(status, Failure(ended=ended, decision=Restart(after=1.0, number=2, limit=3), alive=2))
    assert (status.fields()["state"], status.fields()["restarts"]) == ("restarting", 2)
    run(status, pod.containers[1])
    assert status.fields()["state"] == "running"
    assert of(status, "trainer.0")["exit"] is None, "the end of the attempt before is the past"


def test_a_failure_that_is_the_last_ends_the_job(status, pod):
    set_pod(status, pod)
    run(status, *pod.containers)
    ended = end(status, pod.containers[1], 3)
    happened(status, Failure(ended=ended, decision=GiveUp("enough"), alive=2))
    assert (status.fields()["state"], status.fields()["why"]) == ("ending", "exited with code 3")


def test_leaving_and_ending(status, pod):
    set_pod(status, pod)
    run(status, *pod.containers)
    happened(status, Leaving(pod.containers[:1]))
    assert status.fields()["state"] == "leaving"
    happened(status, Ending("got SIGTERM"))
    assert (status.fields()["state"], status.fields()["why"]) == ("ending", "got SIGTERM")


def test_the_pre_hook_shows_while_it_runs(status, pod):
    set_pod(status, pod)
    run(status, pod.hook)
    assert of(status, "pre_hook")["state"] == "running"
    end(status, pod.hook, 0)
    assert "pre_hook" not in [each["name"] for each in status.fields()["containers"]]


def test_how_long_no_trainer_has_given_a_sign_of_life(status, pod, now):
    set_pod(status, pod)
    assert status.silent_for() is None
    run(status, *pod.containers)
    log = pod.containers[1].spec.log
    log.parent.mkdir(exist_ok=True)
    now[0] += 40
    assert status.silent_for() == 40, "since the start"
    log.write_text("")
    os.utime(log, (now[0] + 1e9 - 7, now[0] + 1e9 - 7))
    assert status.silent_for() == pytest.approx(7), "what was printed counts"
    pod.containers[0].spec.log.write_text("of a server")
    assert status.silent_for() == pytest.approx(7)
    for each in pod.containers[1:]:
        end(status, each, 0)
    assert status.silent_for() is None


def test_machines_that_meet(status):
    waits(status, 3, 4, ["10.0.0.7"], left=60.0)
    known = {"present": 3, "wanted": 4, "missing": ["10.0.0.7"]}
    assert status.fields()["waiting"] == {**known, "left": 60.0}
    waits(status, 4, 4, [], spare=True)
    assert status.fields()["state"] == "spare"
    met(status, ["h1 (10.0.0.1)", "h2 (10.0.0.2)"], 1)
    assert status.fields()["waiting"] is None
    assert status.fields()["nodes"] == [
        {"rank": 0, "title": "h1 (10.0.0.1)", "this": False},
        {"rank": 1, "title": "h2 (10.0.0.2)", "this": True},
    ]


@pytest.mark.parametrize(("restart", "state"), [(True, "restarting"), (False, "ending")])
def test_what_happened_on_another_machine(status, pod, restart, state):
    set_pod(status, pod)
    run(status, *pod.containers)
    line(status, "node", why="trainer 3 exited with code 7", restart=restart)
    assert (status.fields()["state"], status.fields()["why"]) == (
        state,
        "trainer 3 exited with code 7",
    )
    set_pod(status, pod, 1)
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
    got: list[tuple[str, bool]] = []
    restarted: list[tuple[str, str]] = []

    def restart(name: str, command: str) -> str:
        restarted.append((name, command))
        return "" if name == "trainer.0" else "it does not run"

    made = Control(
        loop, status, lambda command, now: got.append((command, now)), restart, said.append, None, print
    )
    made.said, made.got, made.loop, made.restarted = said, got, loop, restarted  # type: ignore[attr-defined]
    yield made
    made.close()
    loop.close()


def test_a_socket_that_a_cleaner_of_old_files_took_is_made_again(status, tmp_path):
    now = [0.0]
    loop = Loop(lambda: now[0])
    made = Control(loop, status, print, print, print, None, print)
    renewed: list[float] = []
    made.open(tmp_path / "run", [lambda: renewed.append(now[0])])
    path = control_socket(tmp_path / "run", status.launch["pod"])
    try:
        for seconds, number in ((60.0, 1), (59.0, 1), (1.0, 2)):
            path.unlink(missing_ok=True)
            (tmp_path / "run").rmdir()
            now[0] += seconds
            turn(loop)
            assert (len(renewed), path.exists()) == (number, seconds != 59.0)
            (tmp_path / "run").mkdir(mode=0o700, exist_ok=True)
        call(path).close()
    finally:
        made.close()
        loop.close()
    assert not path.exists()


def turn(loop):
    loop.after(0, loop.stop)
    loop.run()


@pytest.mark.parametrize("question", [{}, {"ask": "dance"}, {"ask": ["status"]}, {"ask": None}])
def test_what_it_does_not_know(control, question):
    assert "does not know" in control.answer(question)["error"]


@pytest.mark.parametrize(("at_once", "kills"), [(False, False), (True, True), ("yes", False), (None, False)])
def test_a_stop_is_answered_first_and_then_done(control, at_once, kills):
    got = control.got
    assert control.answer({"ask": "stop", "now": at_once})["stopping"] == "default"
    assert got == []
    turn(control.loop)
    assert got == [(f"`fleetrun stop{' --now' * kills}`", kills)]


def test_a_restart_is_done_or_it_says_why_not(control):
    question = {"ask": "restart", "name": "trainer.0", "asker": (0, os.getuid())}
    assert control.answer(question) == {"restarting": "trainer.0"}
    assert control.answer({"ask": "restart", "name": ["x"] * 999}) == {"error": "it does not run"}
    (name, command), (long, _) = control.restarted
    assert name == "trainer.0"
    assert command.startswith("`fleetrun top` of ")
    assert len(long) <= 100


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
    set_pod(status, pod)
    run(status, *pod.containers)
    json.dumps(status.fields())
