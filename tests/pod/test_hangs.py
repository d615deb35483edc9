"""A job that hangs, under the supervisor: who is stopped, what starts again, with which code it ends. The
clock is put forward by the test; who takes the stacks is the test too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest

from fleetrun.envs.contract import Mode
from fleetrun.pod.container import Container
from fleetrun.pod.events import HUNG, Findings, Hang, Peers
from fleetrun.pod.hangs import LOOKS, HangWatch, Silence
from fleetrun.pod.policy import GiveUp, Restart
from tests.support.pods import CARING, OBEDIENT, SLOWLY, STUBBORN, Supervision

LIMIT = 8.0
SECOND_TIME = '[ "$PADDLE_RESTART_COUNT" = 0 ] || { tell again; exit 0; }; '
TOGETHER = SECOND_TIME.replace("exit", 'while [ ! -e "$NOTES/go" ]; do sleep 0.005; done; exit')


class Watched:
    """A supervision with a watch for hangs: `pass_by` lets the limit go by in silence. `places` is what the
    stacks say, `asked` who was asked for them; `slow`: they are never there by themselves. `others` is what
    other nodes answer.
    """

    def __init__(self, supervision: Supervision, *, slow: bool = False) -> None:
        self.supervision = supervision
        self.asked: list[list[str]] = []
        self.called_off = 0
        self.places = ("trainer 0: wait (train.py:3)",)
        self._slow = slow
        self.told: list[Findings] = []
        self.others: list[float | None] = []
        self.questions = 0
        self.watch = HangWatch(supervision.loop, LIMIT, self._take, self.told.append, self._ask)
        supervision.supervisor._hangs = self.watch

    def _take(self, containers: Sequence[Container], then: Callable[[Findings], None]) -> Callable[[], None]:
        self.asked.append([each.spec.name for each in containers if each.alive])
        if not self._slow:
            timer = self.supervision.loop.after(0.0, lambda: then(Findings(self.places)))
        else:
            timer = self.supervision.loop.after(1e9, lambda: then(Findings(self.places)))

        def cancel() -> None:
            self.called_off += 1
            timer.cancel()

        return cancel

    def _ask(self, then: Callable[[Sequence[float | None]], None]) -> None:
        self.questions += 1
        then(self.others)

    def pass_by(self, then: Callable[[], None] = lambda: None) -> None:
        """One look after the other, each at its time, until there have been enough for a hang."""
        self._looks(2 * LOOKS, len(self.supervision.hangs), then)

    def _looks(self, left: int, hangs: int, then: Callable[[], None]) -> None:
        if not left or len(self.supervision.hangs) > hangs:
            then()
            return
        self.supervision.clock.advance(LIMIT / LOOKS)
        self.supervision.loop.after(0.0, lambda: self._looks(left - 1, hangs, then))


@pytest.fixture
def hanging(job) -> Callable[..., Watched]:
    def make(scripts: dict[str, str], *, slow: bool = False, **options: object) -> Watched:
        return Watched(job(scripts, **{"pace": SLOWLY, **options}), slow=slow)

    return make


def test_silence_ends_the_job_with_124_and_says_where_it_stood(hanging):
    watched = hanging({"trainer.0": CARING, "trainer.1": OBEDIENT})
    watched.supervision.after({"trainer.0 ready": 1, "trainer.1 ready": 1}, watched.pass_by)
    result = watched.supervision.run()
    assert (result.code, result.cause, result.restarts) == (124, None, 0)
    assert result.reason == f"no trainer printed or reported anything for 8 s {HUNG}; " + (
        "restarts are off (--max_restart 0)"
    )
    assert result.hang.stacks == watched.places
    assert watched.asked == [["trainer.0", "trainer.1"]]
    assert watched.supervision.told("trainer.0 asked") == 1


def test_stacks_are_taken_of_all_who_run_before_any_is_stopped(hanging):
    watched = hanging({"ps.0": OBEDIENT, "trainer.0": CARING, "trainer.1": "exit 0"}, mode=Mode.PS)
    ready = {"ps.0 ready": 1, "trainer.0 ready": 1}
    supervision = watched.supervision
    supervision.after(ready, lambda: supervision.once_ended("trainer.1", watched.pass_by))
    assert supervision.run().code == 124
    assert watched.asked == [["ps.0", "trainer.0"]]
    assert supervision.story.index("hung") < supervision.story.index("trainer.0 asked")
    assert [each.name for each in supervision.hangs[0].containers] == ["ps.0", "trainer.0"]


@pytest.mark.parametrize("mode", [Mode.COLLECTIVE, Mode.PS])
def test_all_start_again_and_that_counts(hanging, mode):
    watched = hanging(
        {"ps.0" if mode is Mode.PS else "trainer.1": TOGETHER + CARING, "trainer.0": TOGETHER + CARING},
        mode=mode,
        restarts=1,
    )
    supervision = watched.supervision
    names = sorted(each.spec.name for each in supervision.pod.containers)
    supervision.after({f"{name} ready": 1 for name in names}, watched.pass_by)
    supervision.after({f"{name} again": 1 for name in names}, (supervision.folder / "go").touch)
    result = supervision.run()
    assert (result.code, result.restarts, result.hang) == (0, 1, None)
    assert [isinstance(each.decision, Restart) for each in supervision.hangs] == [True]
    for name in names:
        assert supervision.told(f"{name} again") == 1
        assert supervision.container(name).restarts == 1


def test_not_oftener_than_max_restart(hanging):
    watched = hanging({"trainer.0": OBEDIENT}, restarts=1)
    watched.supervision.on("trainer.0 ready", watched.pass_by)
    result = watched.supervision.run()
    assert (result.code, result.restarts) == (124, 1)
    assert [type(each.decision) for each in watched.supervision.hangs] == [Restart, GiveUp]


@pytest.mark.parametrize("name", ["trainer.0", "trainer.1"])
def test_one_trainer_that_prints_is_a_sign_of_life(hanging, name):
    prints = "tell ready; while :; do echo line; sleep 0.002; done"
    scripts = {"trainer.0": OBEDIENT, "trainer.1": OBEDIENT} | {name: prints}
    watched = hanging(scripts)
    supervision = watched.supervision

    def printed() -> bool:
        return (supervision.folder / f"{name}.log").stat().st_size > 0

    def look(left: int, size: int) -> None:
        """The clock goes on only when there is another line."""
        log = supervision.folder / f"{name}.log"
        if log.stat().st_size == size:
            supervision.soon(lambda: look(left, size))
        elif left:
            supervision.clock.advance(LIMIT / LOOKS)
            supervision.loop.after(0.0, lambda: look(left - 1, log.stat().st_size))
        else:
            supervision.supervisor.interrupt(2)

    supervision.after({"trainer.0 ready": 1, "trainer.1 ready": 1}, lambda: look(3 * LOOKS, 0))
    assert supervision.run().code == 130
    assert printed()
    assert supervision.hangs == []


def test_a_report_is_a_sign_of_life_but_not_a_servers(hanging):
    watched = hanging({"ps.0": OBEDIENT, "trainer.0": OBEDIENT}, mode=Mode.PS)
    supervision = watched.supervision

    def look(left: int, reporter: str) -> None:
        watched.watch.reported(reporter)
        supervision.clock.advance(LIMIT / LOOKS)
        if left:
            supervision.loop.after(0.0, lambda: look(left - 1, reporter))
        elif reporter == "trainer.0":
            assert supervision.hangs == []
            look(2 * LOOKS, "ps.0")

    supervision.after({"ps.0 ready": 1, "trainer.0 ready": 1}, lambda: look(3 * LOOKS, "trainer.0"))
    assert supervision.run().code == 124


def test_servers_that_print_are_none(hanging):
    prints = "tell ready; while :; do echo line; sleep 0.002; done"
    watched = hanging({"ps.0": prints, "trainer.0": OBEDIENT}, mode=Mode.PS)
    watched.supervision.after({"ps.0 ready": 1, "trainer.0 ready": 1}, watched.pass_by)
    assert watched.supervision.run().code == 124


def test_an_interrupt_does_not_wait_for_the_stacks(hanging):
    watched = hanging({"trainer.0": CARING}, slow=True)
    supervision = watched.supervision
    supervision.on("trainer.0 ready", lambda: watched.pass_by(lambda: supervision.supervisor.interrupt(15)))
    assert supervision.run().code == 143
    assert (len(watched.asked), watched.called_off, supervision.hangs) == (1, 1, [])


def test_a_failure_meanwhile_is_the_cause(hanging):
    watched = hanging(
        {"trainer.0": 'tell ready; while [ ! -e "$NOTES/go" ]; do sleep 0.005; done; exit 7'}, slow=True
    )
    supervision = watched.supervision
    supervision.on("trainer.0 ready", lambda: watched.pass_by((supervision.folder / "go").touch))
    result = supervision.run()
    assert (result.code, result.cause.spec.name, result.hang) == (7, "trainer.0", None)
    assert watched.called_off == 1


def test_a_restart_meanwhile_does_not_hear_of_it(hanging):
    """What hung was the attempt before."""
    fails = 'tell ready; while [ ! -e "$NOTES/go" ]; do sleep 0.005; done; exit 7'
    watched = hanging({"trainer.0": SECOND_TIME + fails}, slow=True, restarts=1)
    supervision = watched.supervision
    called_off: list[int] = []
    supervision.on("trainer.0 ready", lambda: watched.pass_by((supervision.folder / "go").touch))
    supervision.on("restarting trainer.0", lambda: called_off.append(watched.called_off))
    assert supervision.run().code == 0
    assert (called_off, supervision.hangs) == ([1], [])


def test_what_is_being_stopped_does_not_hang(hanging):
    """A stubborn process has --stop_timeout, however long that is."""
    watched = hanging({"trainer.0": STUBBORN}, stop_timeout=1.5 * LIMIT)
    supervision = watched.supervision

    def stop() -> None:
        supervision.supervisor.interrupt(15)
        watched.pass_by()

    supervision.on("trainer.0 ready", stop)
    assert supervision.run().code == 143
    assert (supervision.hangs, watched.asked) == ([], [])


def test_one_that_waits_for_its_own_restart_starts_once(hanging):
    """A trainer of a parameter-server job failed and waits; then the rest hangs, and all start again."""
    fails = '[ "$PADDLE_RESTART_COUNT" = 2 ] && { tell again; exit 0; }; exit 3'
    watched = hanging(
        {"ps.0": SECOND_TIME + OBEDIENT, "trainer.0": SECOND_TIME + OBEDIENT, "trainer.1": fails},
        mode=Mode.PS, restarts=5, backoff=2 * LIMIT,
    )  # fmt: skip
    supervision = watched.supervision
    seen = iter([lambda: None, watched.pass_by])
    supervision.on("trainer.1 exited with code 3", lambda: next(seen)())

    def urgent() -> None:
        if not supervision.told("restarting ps.0 trainer.0 trainer.1"):
            supervision.clock.advance(1.0)
            supervision.soon(urgent)

    supervision.on("hung", urgent)
    supervision.on("leaving ps.0", lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0)))
    assert supervision.run().code == 0
    assert supervision.told("trainer.1 again") == 1
    assert supervision.told("restarting ps.0 trainer.0 trainer.1") == 1


# ---- several machines


class OtherMachines:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.hangs: list[Hang] = []

    def pod_hung(self, hang: Hang, fault: object) -> None:
        self.hangs.append(hang)

    def pod_failed(self, ended: object, decision: object, fault: object) -> None: ...
    def pod_failed_too(self, ended: object, fault: object) -> None: ...
    def pod_completed(self) -> None: ...


def test_several_machines_stop_and_hear_whether_to_start_again(hanging):
    watched = hanging({"trainer.0": CARING}, restarts=3)
    others: Peers = OtherMachines()
    watched.supervision.supervisor._peers = others
    watched.supervision.on("trainer.0 ready", watched.pass_by)
    watched.supervision.run()
    assert [isinstance(each.decision, Restart) for each in others.hangs] == [True]
    assert watched.supervision.told("trainer.0 asked") == 1


@pytest.mark.parametrize(
    ("reason", "asked"), [(f"no trainer did anything {HUNG}", 1), ("trainer 3 failed", 0)]
)
def test_a_hang_of_another_machine_has_the_stacks_taken_here_first(hanging, reason, asked):
    watched = hanging({"trainer.1": CARING})
    supervision = watched.supervision
    supervision.on("trainer.1 ready", lambda: supervision.supervisor.stop_for(reason, "failure"))
    result = supervision.run()
    assert (len(watched.asked), result.hang) == (asked, None)
    assert watched.told == [Findings(watched.places)] * asked
    assert supervision.told("trainer.1 asked") == 1


def test_a_stubborn_one_is_stopped_once_for_a_hang_of_another_machine(hanging):
    """Its silence while it is being stopped gives it no other --stop_timeout."""
    watched = hanging({"trainer.0": STUBBORN}, stop_timeout=1.5 * LIMIT)
    supervision = watched.supervision

    def stop() -> None:
        supervision.supervisor.stop_for(HUNG, "failure")
        watched.pass_by(lambda: supervision.supervisor.interrupt(2))

    supervision.on("trainer.0 ready", stop)
    supervision.run()
    assert (len(watched.asked), len(watched.told)) == (1, 1)


def test_where_the_first_trainer_is_not_nobody_decides(hanging):
    watched = hanging({"trainer.2": OBEDIENT})
    supervision = watched.supervision
    stop = partial(watched.pass_by, lambda: supervision.supervisor.interrupt(15))
    supervision.on("trainer.2 ready", stop)
    assert supervision.run().code == 143
    assert watched.questions == 0


@pytest.mark.parametrize(
    ("others", "code"),
    [
        pytest.param([LIMIT, 2 * LIMIT], 124, id="all silent"),
        pytest.param([LIMIT, LIMIT - 1], 143, id="one gave a sign"),
        pytest.param([LIMIT, None], 124, id="on one none runs"),
        pytest.param([LIMIT, 0.0], 143, id="one does not answer"),
    ],
)
def test_the_other_nodes_are_asked_before_a_silence_is_a_hang(hanging, others, code):
    watched = hanging({"trainer.0": OBEDIENT})
    supervision = watched.supervision
    watched.others = others
    stop = partial(watched.pass_by, lambda: supervision.supervisor.interrupt(15))
    supervision.on("trainer.0 ready", stop)
    assert supervision.run().code == code
    assert watched.questions == (1 if code == 124 else LOOKS + 1)


@pytest.mark.parametrize(("others", "code"), [([LIMIT], 124), ([None], 143), ([], 143)])
def test_where_none_runs_any_more_the_others_may_hang(hanging, others, code):
    watched = hanging({"trainer.0": "tell ready; exit 0"})
    supervision = watched.supervision
    supervision.supervisor._peers = OtherMachines()
    watched.others = others
    then = partial(watched.pass_by, lambda: supervision.supervisor.interrupt(15))
    supervision.on("trainer.0 ready", lambda: supervision.once_ended("trainer.0", then))
    assert supervision.run().code == code


def test_an_answer_after_the_stop_of_the_processes_does_not_count(hanging):
    watched = hanging({"trainer.0": OBEDIENT})
    supervision = watched.supervision

    def ask(then: Callable[[Sequence[float]], None]) -> None:
        supervision.supervisor.interrupt(15)
        then([LIMIT])

    watched.watch._ask = ask
    supervision.on("trainer.0 ready", watched.pass_by)
    assert (supervision.run().code, watched.asked) == (143, [])


def test_without_a_limit_nobody_looks(job):
    supervision = job({"trainer.0": OBEDIENT})
    watch = HangWatch(supervision.loop)
    watch.watch(supervision.pod, lambda seconds, stacks: None)
    assert supervision.loop._timers == []


# ---- When a job hangs, decided from looks.

SAME = {"a": 1, "b": 1}
LOOK_AGAIN = [SAME] * LOOKS


def verdicts(*seen: Mapping[str, int]) -> list[bool]:
    silence = Silence()
    return [silence.look(each) for each in seen]


def test_nothing_new_in_so_many_looks_is_a_hang():
    assert verdicts(SAME, *LOOK_AGAIN) == [False] * LOOKS + [True]


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param({"a": 2, "b": 1}, id="one of them is enough"),
        pytest.param({"a": 1, "b": 0}, id="a log that became shorter"),
        pytest.param({"a": 1, "b": 1, "c": 1}, id="one more begins"),
        pytest.param({}, id="none runs"),
    ],
)
def test_a_sign_of_life_begins_the_count_anew(sign: Mapping[str, int]):
    before = [SAME] * LOOKS
    assert verdicts(*before, sign) == [False] * (LOOKS + 1)
    assert verdicts(*before, sign, *[sign] * (LOOKS - 1)) == [False] * (2 * LOOKS)


def test_one_that_ends_neither_gives_a_sign_nor_is_waited_for():
    alone = {"b": 1}
    assert verdicts(SAME, SAME, *[alone] * (LOOKS - 1)) == [False] * LOOKS + [True]


def test_where_none_runs_none_is_silent():
    assert verdicts(*[{}] * (3 * LOOKS)) == [False] * (3 * LOOKS)


def test_it_stays_a_hang_until_something_happens():
    assert verdicts(SAME, *LOOK_AGAIN, SAME, {"a": 2, "b": 1})[-3:] == [True, True, False]
