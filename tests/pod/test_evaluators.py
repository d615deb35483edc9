"""Evaluators under the supervisor, as small real processes: what becomes of them decides nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetrun.envs.contract import Mode, Role
from fleetrun.errors import LaunchError
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.evaluators import Evaluators
from fleetrun.pod.events import Failure, PodEvent
from fleetrun.pod.policy import Budget, GiveUp, Restart
from fleetrun.pod.process import Exit
from tests.support.pods import CARING, OBEDIENT, SLOWLY, Supervision, spec_of

UNTIL_GO = 'tell ready; while [ ! -e "$NOTES/go" ]; do sleep 0.005; done; exit 0'
MODES = [(Mode.COLLECTIVE, {}), (Mode.PS, {"ps.0": OBEDIENT})]


def hurry(supervision: Supervision, *rest: str) -> None:
    """Those that are left when the trainers have ended are asked at once."""
    leaving = f"leaving {' '.join(rest)}"
    supervision.on(leaving, lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0)))


@pytest.mark.parametrize(("mode", "servers"), MODES)
def test_one_that_fails_is_started_again_alone(job, mode, servers):
    script = '[ "$PADDLE_RESTART_COUNT" = 2 ] || exit 3; tell up; sleep 99'
    scripts = {**servers, "trainer.0": UNTIL_GO, "evaluator.0": script}
    supervision = job(scripts, mode=mode, restarts=5)
    supervision.on("evaluator.0 up", (supervision.folder / "go").touch)
    hurry(supervision, *servers, "evaluator.0")
    result = supervision.run()
    assert (result.code, result.cause, result.others, result.restarts) == (0, None, (), 0)
    assert supervision.told("evaluator.0 exited with code 3") == 2
    assert supervision.told("restarting evaluator.0") == 2
    assert supervision.told("trainer.0 ready") == 1
    assert [type(decision) for _, decision in supervision.decisions] == [Restart, Restart]


@pytest.mark.parametrize(("mode", "servers"), MODES)
def test_one_that_keeps_failing_is_left_and_the_job_goes_on(job, mode, servers):
    scripts = {**servers, "trainer.0": UNTIL_GO, "evaluator.0": "exit 1"}
    supervision = job(scripts, mode=mode, restarts=1)
    hurry(supervision, *servers)
    failed = "evaluator.0 exited with code 1"
    supervision.on(failed, lambda: supervision.told(failed) == 2 and (supervision.folder / "go").touch())
    result = supervision.run()
    assert (result.code, result.cause) == (0, None)
    assert supervision.told("restarting evaluator.0") == 1
    assert isinstance(supervision.decisions[-1][1], GiveUp)


def test_each_has_restarts_of_its_own_and_uses_none_of_the_trainers(job):
    scripts = {
        "trainer.0": '[ "$PADDLE_RESTART_COUNT" = 1 ] && exit 0; ' + UNTIL_GO.replace("exit 0", "exit 5"),
        "evaluator.0": "exit 1",
        "evaluator.1": "exit 1",
    }
    supervision = job(scripts, restarts=1)
    both = {"evaluator.0 exited with code 1", "evaluator.1 exited with code 1"}

    def told() -> None:
        if all(supervision.told(words) == 2 for words in both):
            (supervision.folder / "go").touch()

    for words in both:
        supervision.on(words, told)
    result = supervision.run()
    assert (result.code, result.restarts) == (0, 1)
    assert supervision.told("trainer.0 exited with code 5") == 1


def test_one_that_ends_well_is_done(job):
    supervision = job({"trainer.0": UNTIL_GO, "evaluator.0": "exit 0"})
    go = (supervision.folder / "go").touch
    supervision.on("trainer.0 ready", lambda: supervision.once_ended("evaluator.0", go))
    assert supervision.run().code == 0
    assert supervision.failures == []


def test_it_is_asked_to_end_when_the_trainers_have_ended(job):
    supervision = job({"trainer.0": UNTIL_GO, "evaluator.0": CARING})
    supervision.on("evaluator.0 ready", (supervision.folder / "go").touch)
    hurry(supervision, "evaluator.0")
    assert supervision.run().code == 0
    assert supervision.told("leaving evaluator.0") == 1
    assert supervision.told("evaluator.0 asked") == 1


def test_a_failed_trainer_is_the_cause_even_if_an_evaluator_wrote_down_a_failure_before(job):
    record = (
        r"""printf '{"message": {"message": "ValueError: first", "extraInfo": """
        r"""{"py_callstack": "Traceback", "time_ns": 1000000000}}}' >"$ERROR_FILE"; """
    )
    late = record + "trap 'exit 7' TERM; tell ready; while :; do sleep 100 & wait; done"
    supervision = job({"trainer.0": UNTIL_GO.replace("exit 0", "exit 4"), "evaluator.0": late})
    supervision.on("evaluator.0 ready", (supervision.folder / "go").touch)
    result = supervision.run()
    assert (result.code, result.cause.spec.name, result.others) == (4, "trainer.0", ())


def test_its_restart_runs_no_hook_which_is_the_jobs_and_might_end_it(job):
    script = '[ "$PADDLE_RESTART_COUNT" = 1 ] || exit 3; tell up; sleep 99'
    supervision = job(
        {"trainer.0": UNTIL_GO, "evaluator.0": script},
        hook='tell hook; [ ! -e "$NOTES/hooked" ] || exit 4; : >"$NOTES/hooked"',
        restarts=1,
    )
    supervision.on("evaluator.0 up", (supervision.folder / "go").touch)
    hurry(supervision, "evaluator.0")
    result = supervision.run()
    assert (result.code, result.cause) == (0, None)
    assert supervision.told("pre_hook hook") == 1
    assert supervision.told("restarting evaluator.0") == 1


class Moment:
    """Evaluators with one that failed, at the moment when its restart is due. Nothing is started."""

    def __init__(self, folder: Path, goes_on: bool = True, error: LaunchError | None = None) -> None:
        self.deployed: list[Container] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.told: list[Any] = []
        self.container = Container(spec_of(folder, "exit 0", Role.EVALUATOR))
        self.error = error
        self.evaluators = Evaluators(
            self, Budget(2), self.handle, self.start, lambda: goes_on, lambda mark: None
        )  # type: ignore[arg-type]

    def ends(self, code: int = 1, attempt: int = 0) -> None:
        ended = Ended(
            spec=self.container.spec, exit=Exit(code), pid=1, started=0.0, ended=1.0, attempt=attempt
        )
        self.evaluators.exited(self.container, ended)

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.timers.append((seconds, act))

    def start(self, containers: list[Container]) -> None:
        if self.error is not None:
            raise self.error
        self.deployed += containers

    def handle(self, event: PodEvent) -> None:
        self.told.append(event.decision if isinstance(event, Failure) else "restarting")


def test_waits_grow_and_end(tmp_path):
    moment = Moment(tmp_path)
    for attempt in range(3):
        moment.ends(attempt=attempt)
    assert [seconds for seconds, _ in moment.timers] == [0.0, 0.5]
    assert isinstance(moment.told[-1], GiveUp)


def test_a_restart_that_is_due_happens(tmp_path):
    moment = Moment(tmp_path)
    moment.ends()
    moment.timers[0][1]()
    assert moment.deployed == [moment.container]
    assert moment.told[-1] == "restarting"


@pytest.mark.parametrize("change", ["the job ends", "all started again meanwhile"])
def test_a_restart_that_is_out_of_date_does_not(tmp_path, change):
    moment = Moment(tmp_path, goes_on=change != "the job ends")
    moment.ends()
    if change != "the job ends":
        moment.container.restarts += 1
    moment.timers[0][1]()
    assert moment.deployed == []


def test_a_restart_that_cannot_be_is_told_and_ends_nothing(tmp_path):
    moment = Moment(tmp_path, error=LaunchError("no room for a process"))
    moment.ends()
    moment.timers[0][1]()
    assert moment.told[-1] == GiveUp("the restart failed: no room for a process")


def test_no_timer_starts_it_when_the_job_is_over(job):
    supervision = job({"trainer.0": UNTIL_GO, "evaluator.0": "exit 1"}, restarts=9, backoff=30.0, pace=SLOWLY)
    failed = "evaluator.0 exited with code 1"
    supervision.on(failed, lambda: supervision.told(failed) == 2 and (supervision.folder / "go").touch())
    assert supervision.run().code == 0
    assert supervision.told("started evaluator.0") == 1
