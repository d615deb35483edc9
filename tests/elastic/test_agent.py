"""The agent of a node, between a membership and a supervisor that follow the test's script."""

import time
from dataclasses import replace

import pytest

from fleetrun.elastic.agent import Agent
from fleetrun.elastic.rendezvous.actions import Waiting
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, Node, Round, State
from fleetrun.errors import RendezvousError, SpawnError
from fleetrun.plan.topology import Offer
from fleetrun.pod.events import HUNG, Hang, JobResult
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import Fault, GiveUp, Restart
from fleetrun.pod.process import Exit

NODE = Node(id="a", host="10.0.0.1", name="h1", offer=Offer())
OTHER = replace(NODE, id="b", host="10.0.0.2", name="h2")
ROUND = Round(generation=3, state=State.RUNNING, size=2, restarts=1)
LONG = 1000.0
CAUSE = Cause(
    why=CauseKind.FAILED, node="h2 (10.0.0.2)", rank=1, headline="trainer 1 exited with code 7", code=7
)


class Script:
    """Membership, supervisor, pods and events in one: notes what it is told, does what `plan` says next."""

    def __init__(self, *plan, timeout=None):
        self.plan = list(plan)
        self.heard = []
        self.passed = 0.0
        self.loop = Loop(lambda: time.monotonic() + self.passed)
        self.closed = True
        self.reached = False
        self.restarted_servers = ()
        self.result = JobResult(code=0)
        self.agent = Agent(self.loop, NODE, self, self.publish, timeout=timeout)

    def __getattr__(self, name):
        def note(*words, **options):
            self.heard.append((name, *words, *options.items()))
            self.step()

        return note

    def step(self):
        if self.plan:
            self.loop.after(0.0, self.plan.pop(0))

    def expire(self):
        """All that was to last long is over."""
        self.passed = LONG

    def publish(self, event):
        self.heard.append((type(event).__name__, event))
        self.step()

    def supervisor(self, place, peers):
        self.heard.append(("supervisor", place))
        return self

    def run(self):
        self.heard.append(("run",))
        self.step()
        self.loop.run()
        return self.result

    def stop_for(self, reason, notice, *, interrupted=False):
        self.heard.append(("stop_for", reason, notice, interrupted))
        self.loop.stop()

    def finish(self):
        self.heard.append(("finish",))
        self.loop.stop()

    def interrupt(self, number, command):
        self.heard.append(("interrupt", number))
        self.loop.stop()

    def guard_lost(self):
        self.heard.append(("guard_lost",))
        self.loop.stop()

    def close(self):
        self.closed = True
        self.heard.append(("close",))

    def words(self):
        return [each[0] for each in self.heard]


def outcome_of(made, **options):
    outcome = made.agent.run(made, **options)
    made.loop.close()
    return outcome


def test_a_job_that_completes():
    made = Script(
        lambda: made.agent.publish(Waiting(present=1, fewest=2, most=2)),
        lambda: made.agent.start(ROUND, (NODE, OTHER), 0),
        lambda: made.agent.pod_completed(),
        lambda: made.agent.finish(),
        lambda: made.agent.ended(0, None),
    )
    outcome = outcome_of(made)
    assert (outcome.code, outcome.rank, outcome.result) == (0, 0, made.result)
    words = made.words()
    assert words[:5] == ["join", "Waiting", "supervisor", "Assignment", "run"]
    assert words[-4:] == ["completed", "finish", "stopped", "close"]
    place = made.heard[2][1]
    assert (place.generation, place.rank, place.first, place.restarts) == (3, 0, True, 1)


@pytest.mark.parametrize(
    ("decision", "restart", "after"), [(Restart(2.0, 1, 3), True, 2.0), (GiveUp("enough"), False, 0.0)]
)
def test_a_hang_is_a_failure_of_this_node_with_124(decision, restart, after):
    stacks = ("trainer 0: wait (train.py:3)",)
    hang = Hang(silent_for=9.0, containers=(), decision=decision, stacks=stacks)
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 1),
        lambda: None,
        lambda: made.agent.pod_hung(hang, Fault(exit=Exit(124), time=5.0, step=812)),
        lambda: made.agent.stop(CAUSE, False),
        lambda: None,
        lambda: made.agent.ended(124, None),
    )
    outcome_of(made)
    (said,) = [each for each in made.heard if each[0] == "failed"]
    _, cause, *answer = said
    assert answer == [restart, after]
    assert (cause.why, cause.code, cause.lines, cause.rank) == (CauseKind.FAILED, 124, stacks, 1)
    assert cause.headline.endswith(HUNG)
    assert (cause.time, cause.step) == (5.0, 812)


def test_a_failure_elsewhere_stops_this_pod_and_the_next_generation_starts():
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 0),
        lambda: None,
        lambda: made.agent.stop(CAUSE, True),
        lambda: made.agent.start(replace(ROUND, generation=4), (NODE,), 0),
        lambda: None,
        lambda: made.agent.stop(CAUSE, False),
        lambda: made.agent.ended(7, CAUSE),
    )
    outcome = outcome_of(made)
    assert (outcome.code, outcome.cause) == (7, CAUSE)
    assert ("stop_for", CAUSE.headline, "failure", False) in made.heard
    assert [each[1].first for each in made.heard if each[0] == "supervisor"] == [True, False]
    assert made.words().count("stopped") == 2


@pytest.mark.parametrize(
    ("why", "notice"),
    [(CauseKind.JOINED, "membership"), (CauseKind.LOST, "lost"), (CauseKind.TIMEOUT, "stop")],
)
def test_processes_are_told_why(why, notice):
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 0),
        lambda: None,
        lambda: made.agent.stop(replace(CAUSE, why=why), False),
        lambda: made.agent.ended(7, CAUSE),
    )
    outcome_of(made)
    assert ("stop_for", CAUSE.headline, notice, False) in made.heard


@pytest.mark.parametrize(
    ("code", "restart", "interrupted"), [(130, False, True), (143, False, False), (130, True, False)]
)
def test_the_ctrl_c_of_another_node_interrupts_the_processes_here(code, restart, interrupted):
    left = replace(CAUSE, why=CauseKind.LEFT, headline="interrupted", code=code)
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 0),
        lambda: None,
        lambda: made.agent.stop(left, restart),
        lambda: made.agent.ended(code, left),
    )
    outcome_of(made)
    assert [words[3] for words in made.heard if words[0] == "stop_for"] == [interrupted]


def test_a_stop_between_two_pods_is_answered():
    made = Script(lambda: made.agent.stop(CAUSE, False), lambda: None, lambda: made.agent.ended(7, CAUSE))
    assert outcome_of(made).code == 7
    assert "stopped" in made.words()
    assert "run" not in made.words()


def test_a_signal_while_waiting():
    made = Script(lambda: made.agent.interrupt(15))
    outcome = outcome_of(made)
    assert outcome.code == 143
    (cause,) = [each[1] for each in made.heard if each[0] == "leave"]
    assert (cause.why, cause.headline, cause.code, cause.node) == (
        CauseKind.LEFT,
        "got SIGTERM",
        143,
        NODE.title,
    )


def test_a_signal_while_running_wins_over_what_the_job_ends_with():
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 1),
        lambda: None,
        lambda: made.agent.interrupt(2),
        lambda: None,
        lambda: made.agent.ended(7, CAUSE),
    )
    assert outcome_of(made).code == 130
    assert made.words().index("leave") < made.words().index("interrupt")


def test_a_first_ctrl_c_while_the_job_is_stopping_kills_nothing():
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 1),
        lambda: None,
        lambda: made.agent.stop(CAUSE, False),
        lambda: made.agent.ended(7, CAUSE),
    )

    def stop_for(reason, notice, *, interrupted=False):
        made.agent.interrupt(2)
        made.loop.stop()

    made.stop_for = stop_for
    assert outcome_of(made).code == 130
    assert "interrupt" not in made.words()
    assert any(each[0] == "Departing" and "interrupted" in each[1].why for each in made.heard)


def test_a_lost_guard_is_told_to_the_others_before_the_processes_are_ended():
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 1), lambda: None, lambda: made.agent.guard_lost()
    )
    outcome = outcome_of(made)
    assert outcome.code == 125
    assert outcome.cause.headline == "fleetrun-guard, the launcher's parent, was killed"
    assert made.words().index("leave") < made.words().index("guard_lost")
    (cause,) = [each[1] for each in made.heard if each[0] == "leave"]
    assert (cause.why, cause.code, cause.rank) == (CauseKind.LOST, 125, 1)


def test_a_timeout_is_told_once():
    made = Script(lambda: made.agent.start(ROUND, (NODE, OTHER), 1), lambda: made.expire(), timeout=LONG)

    def failed(cause, restart, after):
        made.heard.append(("failed", cause))
        made.agent.stop(cause, False)
        made.agent.ended(cause.code, cause)

    made.failed = failed
    assert outcome_of(made).code == 124
    assert [word for word in made.words() if word in ("Departing", "Stopping")] == ["Departing"]


def test_a_pod_that_cannot_be_started_is_a_failure_of_this_node():
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 1),
        lambda: None,
        lambda: made.agent.ended(125, CAUSE),
    )

    def refuse(place, peers):
        raise SpawnError("no more processes", hint="ulimit -u")

    made.supervisor = refuse
    assert outcome_of(made).code == 125
    (failed,) = [each for each in made.heard if each[0] == "failed"]
    assert failed[1].headline == "no more processes (ulimit -u)"
    assert failed[2:] == (False, 0.0)


def test_a_node_that_cannot_continue():
    error = RendezvousError("the store is gone")
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 1), lambda: None, lambda: made.agent.failed(error)
    )
    outcome = outcome_of(made)
    assert (outcome.code, outcome.error) == (124, error)
    assert ("stop_for", "the store is gone", "stop", False) in made.heard


def test_a_start_check_is_made_only_before_the_store_was_reached():
    error = RendezvousError("no such name")
    made = Script()
    checks = [(0.0, lambda: error)]
    assert outcome_of(made, start_checks=checks).error is error
    made = Script(lambda: made.loop.after(0.05, lambda: made.agent.ended(0, None)))
    made.reached = True
    assert outcome_of(made, start_checks=checks).error is None


@pytest.mark.parametrize("serves", [False, True])
def test_the_job_ends_without_the_node_that_hosts_its_store(serves):
    made = Script(lambda: made.agent.interrupt(15))
    made.loop.after(0.0, lambda: made.agent.interrupt(15))
    outcome_of(made, serves=serves)
    assert [each[2:] for each in made.heard if each[0] == "leave"] == [(("last", serves),)]


def test_a_timeout_while_a_generation_stops_for_something_else_ends_the_next_one():
    made = Script(
        lambda: made.agent.start(ROUND, (NODE, OTHER), 1),
        lambda: made.agent.stop(CAUSE, True),
        lambda: made.expire(),
        timeout=LONG,
    )

    def stop_for(reason, notice, *, interrupted=False):
        made.heard.append(("stop_for", reason, notice))
        if "--timeout" in reason:
            made.loop.stop()

    def stopped(step):
        made.loop.after(0.0, lambda: made.agent.start(replace(ROUND, generation=4), (NODE, OTHER), 1))

    def failed(cause, restart, after):
        made.heard.append(("failed", cause.why, restart))
        if "stop_for" in made.words() and made.words().count("failed") == 2:
            made.agent.ended(cause.code, cause)

    made.stop_for, made.stopped, made.failed = stop_for, stopped, failed
    assert outcome_of(made).code == 124
    assert made.words().count("run") == 1
    assert made.heard[-2] == ("failed", CauseKind.TIMEOUT, False)


def test_the_agent_waits_until_the_membership_has_left():
    made = Script(lambda: made.agent.ended(0, None), lambda: None)
    made.closed = False
    made.loop.after(0.05, lambda: (made.close(), made.when_closed()))
    assert outcome_of(made).code == 0
    assert made.words()[-2:] == ["close", "close"]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def suspended_script(*plan):
    made = Script(*plan)
    made.clock = Clock()
    made.agent = Agent(made.loop, NODE, made, made.publish, lease=0.08, clock=made.clock)
    return made


def test_after_a_suspension_processes_are_held_until_the_store_says_that_their_generation_runs():
    made = suspended_script()

    def confirm(then):
        made.heard.append(("confirm",))
        made.loop.after(0.0, then)
        made.loop.after(0.01, lambda: made.agent.ended(0, None))
        made.loop.after(0.02, made.loop.stop)

    made.confirm = confirm
    made.plan = [lambda: made.agent.start(ROUND, (NODE, OTHER), 1), lambda: None, lambda: resume(made)]
    outcome_of(made)
    heard = made.heard
    assert heard.index(("hold", True)) < heard.index(("confirm",)) < heard.index(("hold", False))
    assert made.words().count("hold") == 2


def resume(made):
    made.clock.now += LONG


def test_processes_are_not_released_when_the_job_has_gone_on_without_them():
    made = suspended_script()

    def confirm(then):
        made.loop.after(0.0, lambda: made.agent.stop(CAUSE, True, at_once=True))
        made.loop.after(0.01, then)
        made.loop.after(0.15, lambda: made.agent.ended(0, None))
        made.loop.after(0.16, made.loop.stop)

    made.confirm = confirm
    made.plan = [lambda: made.agent.start(ROUND, (NODE, OTHER), 1), lambda: None, lambda: resume(made)]
    outcome_of(made)
    assert ("hold", False) not in made.heard
    assert ("kill_for", CAUSE.headline, "failure") in made.heard


def test_processes_are_released_when_the_store_does_not_answer_for_a_lease():
    made = suspended_script()

    def hold(held):
        made.heard.append(("hold", held))
        if held:
            made.step()
        else:
            made.agent.ended(0, None)
            made.loop.stop()

    made.hold = hold
    made.confirm = lambda then: None
    made.plan = [lambda: made.agent.start(ROUND, (NODE, OTHER), 1), lambda: None, lambda: resume(made)]
    outcome_of(made)
    assert made.heard.count(("hold", False)) == 1
