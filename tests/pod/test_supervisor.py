"""The supervisor over small real processes: whom it stops and restarts, when, and what it says at the end."""

import os
import signal
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fleetrun.envs.contract import Mode
from fleetrun.errors import LaunchError, ScriptNotExecutableError
from fleetrun.pod.container import Container
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.pod.process import Exit
from fleetrun.pod.stopping import LET_GO, Ladder
from tests.support.isolated import isolated
from tests.support.pods import CARING, OBEDIENT, SLOWLY, STUBBORN, Clock, Supervision, spec_of
from tests.support.waiting import ended, eventually, state_of

ATTEMPT = '[ "$PADDLE_RESTART_COUNT" = {} ] || '
"""Only in this attempt goes on with what follows: `ATTEMPT.format(0) + "exit 0; exit 3"`."""

LEAVE_ON_GO = 'tell ready; while [ ! -e "$NOTES/go" ]; do sleep 0.005; done; exit {}'


# ---- the end of a job


def test_all_trainers_that_end_well_make_0(job):
    supervision = job({"trainer.0": "exit 0", "trainer.1": "exit 0"})
    result = supervision.run()
    assert (result.code, result.cause, result.others, result.restarts) == (0, None, (), 0)
    assert supervision.story == ["started trainer.0 trainer.1"]


def test_a_job_goes_on_while_a_trainer_runs(job):
    supervision = job({"trainer.0": "exit 0", "trainer.1": LEAVE_ON_GO.format(0)})
    go = (supervision.folder / "go").touch
    supervision.on("trainer.1 ready", lambda: supervision.once_ended("trainer.0", go))
    assert supervision.run().code == 0
    assert supervision.container("trainer.1").ended.exit.ok


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 3", 3),
        ("exit 255", 255),
        ("exit 2", 2),
        ("kill -KILL $$", 137),
        ("kill -SEGV $$", 139),
        ("kill -TERM $$", 143),
    ],
)
def test_the_code_is_that_of_the_failure(job, script, code):
    supervision = job({"trainer.0": script})
    result = supervision.run()
    assert result.code == code
    assert result.cause.spec.name == "trainer.0"
    assert result.cause.exit.shell_code == code


def test_a_failure_stops_the_others_and_its_code_counts(job):
    supervision = job({"trainer.0": OBEDIENT, "trainer.1": LEAVE_ON_GO.format(7), "trainer.2": OBEDIENT})
    supervision.after({"trainer.0 ready": 1, "trainer.2 ready": 1}, (supervision.folder / "go").touch)
    result = supervision.run()
    assert (result.code, result.cause.spec.name, result.others) == (7, "trainer.1", ())
    assert result.reason == "restarts are off (--max_restart 0)"
    for name in ("trainer.0", "trainer.2"):
        end = supervision.container(name).ended
        assert (end.exit, end.asked) == (Exit(-signal.SIGTERM), signal.SIGTERM)


def test_peers_may_clean_up_before_they_go(job):
    supervision = job({"trainer.0": CARING, "trainer.1": LEAVE_ON_GO.format(7)})
    supervision.on("trainer.0 ready", (supervision.folder / "go").touch)
    assert supervision.run().code == 7
    assert supervision.told("trainer.0 asked") == 1
    assert supervision.container("trainer.0").ended.exit.ok


def test_a_peer_that_ignores_sigterm_is_killed_after_stop_timeout(job):
    supervision = job({"trainer.0": STUBBORN, "trainer.1": LEAVE_ON_GO.format(7)}, stop_timeout=0.05)
    supervision.on("trainer.0 ready", (supervision.folder / "go").touch)
    assert supervision.run().code == 7
    assert supervision.container("trainer.0").ended.exit == Exit(-signal.SIGKILL)


def test_the_first_to_fail_is_the_one_that_wrote_down_so(job):
    """Rank 0 raises first and is slow to leave; rank 1 sees the broken connection and is out before it."""
    record = (
        r"""printf '{"message": {"message": "ValueError: first", "extraInfo": """
        r"""{"py_callstack": "Traceback", "time_ns": 1000000000}}}' >"$ERROR_FILE"; """
    )
    slow = record + "trap 'exit 4' TERM; tell wrote; while :; do sleep 100 & wait; done"
    supervision = job({"trainer.0": slow, "trainer.1": LEAVE_ON_GO.format(7)})
    supervision.on("trainer.0 wrote", (supervision.folder / "go").touch)
    result = supervision.run()
    assert (result.code, result.cause.spec.name, result.cause.failed_at) == (4, "trainer.0", 1.0)
    assert [each.spec.name for each in result.others] == ["trainer.1"]


def test_the_cause_is_never_a_signal_of_our_own(job):
    """It wrote that it had failed, hung on its way out, and had to be killed."""
    record = (
        r"""printf '{"message": {"message": "ValueError: first", "extraInfo": """
        r"""{"py_callstack": "Traceback", "time_ns": 1000000000}}}' >"$ERROR_FILE"; """
    )
    supervision = job({"trainer.0": record + STUBBORN, "trainer.1": LEAVE_ON_GO.format(7)}, stop_timeout=0.05)
    supervision.on("trainer.0 ready", (supervision.folder / "go").touch)
    result = supervision.run()
    assert (result.code, result.cause.spec.name) == (1, "trainer.0")


def test_a_failed_leader_takes_its_group_with_it(job):
    supervision = job({"trainer.0": 'sleep 100 & echo $! >"$NOTES/helper"; exit 3'})
    assert supervision.run().code == 3
    helper = int((supervision.folder / "helper").read_text())
    eventually(lambda: ended(helper))


# ---- collective: all or nothing


def test_a_collective_job_restarts_whole(job):
    supervision = job(
        {
            "trainer.0": 'tell "started in $PADDLE_RESTART_COUNT"; '
            + ATTEMPT.format(0)
            + "exit 0; "
            + CARING,
            "trainer.1": ATTEMPT.format(0) + "exit 0; " + LEAVE_ON_GO.format(7),
        },
        restarts=1,
    )
    supervision.on("trainer.0 ready", (supervision.folder / "go").touch)
    result = supervision.run()
    assert (result.code, result.restarts, result.cause) == (0, 1, None)
    assert supervision.told("trainer.0 started in 0") == 1
    assert supervision.told("trainer.0 started in 1") == 1
    assert supervision.told("restarting trainer.0 trainer.1") == 1
    assert "restart 1 of trainer 0" in supervision.log("trainer.0")
    assert supervision.sweeps[0] == 0.0, "daemons of the first attempt are ended before the second"


def test_those_that_had_ended_well_start_again_too(job):
    supervision = job(
        {
            "trainer.0": "tell ran",
            "trainer.1": ATTEMPT.format(0) + "exit 0; " + LEAVE_ON_GO.format(1),
        },
        restarts=1,
    )
    go = (supervision.folder / "go").touch
    wait = {"trainer.0 ran": 1, "trainer.1 ready": 1}
    supervision.after(wait, lambda: supervision.once_ended("trainer.0", go))
    assert supervision.run().code == 0
    assert supervision.told("trainer.0 ran") == 2


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_so_many_restarts_and_not_one_more(job, limit):
    supervision = job({"trainer.0": "tell ran; exit 5"}, restarts=limit)
    result = supervision.run()
    assert (result.code, result.restarts) == (5, limit)
    assert supervision.told("trainer.0 ran") == limit + 1
    assert [decision for _, decision in supervision.decisions[:-1]] == [
        Restart(0.01 * 2 ** (number - 1) / 2 if number > 1 else 0.0, number, limit)
        for number in range(1, limit + 1)
    ]
    assert isinstance(supervision.decisions[-1][1], GiveUp)


@pytest.mark.slow
def test_the_first_restart_is_at_once_and_the_wait_doubles(job):
    supervision = job({"trainer.0": "exit 5"}, restarts=4, backoff=0.02)
    supervision.run()
    asked = [decision.after for _, decision in supervision.decisions[:-1]]
    assert asked == [0.0, 0.02, 0.04, 0.08]
    for (failed, decision), restarted in zip(
        supervision.decisions[:-1], supervision.restarted_at, strict=True
    ):
        assert restarted - failed >= decision.after


@pytest.mark.parametrize("code", [2, 126, 127])
def test_what_cannot_heal_is_not_tried_again(job, code):
    supervision = job({"trainer.0": f"tell ran; exit {code}"}, restarts=3)
    result = supervision.run()
    assert (result.code, result.restarts) == (code, 0)
    assert supervision.told("trainer.0 ran") == 1


# ---- parameter servers: only what failed


def test_with_servers_only_what_failed_restarts(job):
    supervision = job(
        {
            "ps.0": "trap 'exit 0' TERM; tell ready; while :; do sleep 100 & wait; done",
            "trainer.0": 'tell ready; while [ ! -e "$NOTES/done" ]; do sleep 0.005; done',
            "trainer.1": ATTEMPT.format(0) + 'touch "$NOTES/done"; '
            + ATTEMPT.format(0) + "exit 0; " + LEAVE_ON_GO.format(9),
        },
        mode=Mode.PS,
        restarts=2,
    )  # fmt: skip
    ready = {"ps.0 ready": 1, "trainer.0 ready": 1, "trainer.1 ready": 1}
    supervision.after(ready, (supervision.folder / "go").touch)
    supervision.on("leaving ps.0", lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0)))
    result = supervision.run()
    assert (result.code, result.restarts) == (0, 1)
    assert supervision.told("restarting trainer.1") == 1
    assert (supervision.told("ps.0 ready"), supervision.told("trainer.0 ready")) == (1, 1)


def test_a_server_that_says_what_it_could_not_keep_fails_the_job_also_after_its_trainers(job):
    record = """printf '{"message": "DurabilityError: x"}' >"$ERROR_FILE"; exit 1"""
    server = f"trap '{record.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}' TERM; "
    server += "tell ready; while :; do sleep 100 & wait; done"
    supervision = job({"ps.0": server, "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS)
    supervision.on("ps.0 ready", (supervision.folder / "go").touch)
    result = supervision.run()
    assert (result.code, result.cause.spec.name) == (1, "ps.0")


FATAL = (
    r"""printf '{"message": {"message": "DamagedError: x", "extraInfo": """
    r"""{"py_callstack": "", "restart_helps": false}}}' >"$ERROR_FILE"; exit 3"""
)


@pytest.mark.parametrize("mode", [Mode.COLLECTIVE, Mode.PS])
def test_a_process_that_knows_that_a_restart_will_not_help_is_not_restarted(job, mode):
    result = job({"trainer.0": FATAL}, mode=mode, restarts=3).run()
    assert (result.code, result.restarts, result.reason) == (3, 0, "a restart will not help")


def test_the_end_of_a_server_leads_to_that_of_the_trainers_that_name_it(job):
    record = FATAL.replace("DamagedError: x", "ServerError: server 0, 1 at 127.0.0.1:1 was restarted")
    trainer = f'while [ ! -e "$NOTES/back" ]; do sleep 0.005; done; {record}'
    server = f'[ "$PADDLE_RESTART_COUNT" = 0 ] && kill -KILL $$; touch "$NOTES/back"; {OBEDIENT}'
    scripts = {"ps.0": OBEDIENT, "ps.1": server, "trainer.0": trainer}
    result = job(scripts, mode=Mode.PS, restarts=3).run()
    assert result.cause.spec.name == "trainer.0"
    assert (result.began.spec.name, result.began.exit) == ("ps.1", Exit(-signal.SIGKILL))


def test_a_server_comes_back(job):
    supervision = job(
        {
            "ps.0": ATTEMPT.format(1) + 'exit 9; touch "$NOTES/done"; exec sleep 100',
            "trainer.0": 'while [ ! -e "$NOTES/done" ]; do sleep 0.005; done',
        },
        mode=Mode.PS,
        restarts=1,
    )
    supervision.on("leaving ps.0", lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0)))
    result = supervision.run()
    assert (result.code, result.restarts) == (0, 1)
    assert supervision.container("ps.0").restarts == 1
    assert supervision.container("trainer.0").restarts == 0


def test_servers_are_asked_to_stop_once_the_trainers_have_ended(job):
    supervision = job({"ps.0": CARING, "ps.1": CARING, "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS)
    supervision.after({"ps.0 ready": 1, "ps.1 ready": 1}, (supervision.folder / "go").touch)
    supervision.on(
        "leaving ps.0 ps.1", lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0))
    )
    assert supervision.run().code == 0
    assert (supervision.told("ps.0 asked"), supervision.told("ps.1 asked")) == (1, 1)


@pytest.mark.slow
def test_servers_may_leave_by_themselves(job):
    """Without being asked."""
    server = 'tell ready; while [ ! -e "$NOTES/leave" ]; do sleep 0.005; done; exit 0'
    supervision = job({"ps.0": server, "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS, pace=SLOWLY)
    supervision.on("ps.0 ready", (supervision.folder / "go").touch)
    supervision.on("leaving ps.0", (supervision.folder / "leave").touch)
    assert supervision.run().code == 0
    assert supervision.container("ps.0").ended.exit.ok


def test_how_servers_end_after_the_trainers_does_not_count(job):
    server = "trap 'exit 6' TERM; tell ready; while :; do sleep 100 & wait; done"
    supervision = job({"ps.0": server, "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS)
    supervision.on("ps.0 ready", (supervision.folder / "go").touch)
    supervision.on("leaving ps.0", lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0)))
    result = supervision.run()
    assert (result.code, result.cause) == (0, None)


def test_nor_how_they_end_before_they_are_asked(job):
    server = 'tell ready; while [ ! -e "$NOTES/leave" ]; do sleep 0.005; done; exit 6'
    supervision = job({"ps.0": server, "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS, pace=SLOWLY)
    supervision.on("ps.0 ready", (supervision.folder / "go").touch)
    supervision.on("leaving ps.0", (supervision.folder / "leave").touch)
    result = supervision.run()
    assert (result.code, result.cause) == (0, None)
    assert supervision.container("ps.0").ended.exit == Exit(6)


def daemons_of_what_restarts_are_ended():
    """They hide in a session of their own; those of the others are left alone."""
    daemon = "setsid sh -c 'echo $$ >\"$NOTES/daemon.$NAME\"; exec sleep 100' & "
    written = 'while [ ! -s "$NOTES/daemon.$NAME" ]; do sleep 0.005; done; '
    with TemporaryDirectory() as folder:
        supervision = Supervision(
            Path(folder),
            {
                "ps.0": daemon + written + OBEDIENT,
                "trainer.0": ATTEMPT.format(0) + "exit 0; " + daemon + written + LEAVE_ON_GO.format(3),
            },
            mode=Mode.PS,
            restarts=1,
        )

        def look():
            trainers, servers = (
                int((supervision.folder / f"daemon.{name}.0").read_text()) for name in ("trainer", "ps")
            )
            eventually(lambda: ended(trainers))
            assert not ended(servers)

        both = {"ps.0 ready": 1, "trainer.0 ready": 1}
        supervision.after(both, (supervision.folder / "go").touch)
        supervision.on("restarting trainer.0", look)
        supervision.on(
            "leaving ps.0", lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0))
        )
        assert supervision.run().code == 0
        assert supervision.told("restarting trainer.0") == 1


@pytest.mark.slow
def test_daemons_of_what_restarts_are_ended():
    isolated(daemons_of_what_restarts_are_ended)


def test_a_server_that_ends_with_0_while_trainers_run_is_a_failure_after_a_moment(job):
    supervision = job({"ps.0": "exit 0", "trainer.0": OBEDIENT}, mode=Mode.PS)
    supervision.on(
        "trainer.0 ready", lambda: supervision.once_ended("ps.0", lambda: supervision.clock.advance(1.0))
    )
    result = supervision.run()
    assert (result.code, result.cause.spec.name) == (1, "ps.0")
    assert result.cause.exit.ok


def test_a_server_that_ends_with_0_just_before_its_trainers_is_none(job):
    supervision = job({"ps.0": "exit 0", "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS, pace=SLOWLY)
    go = (supervision.folder / "go").touch
    supervision.on("trainer.0 ready", lambda: supervision.once_ended("ps.0", go))
    assert supervision.run().code == 0


def test_a_dismissed_server_may_be_gone_long_before_its_trainers(job):
    dismissed = """printf '{"dismissed": true}' >"$ERROR_FILE"; exit 0"""
    supervision = job({"ps.0": dismissed, "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS)

    def go_on_later():
        supervision.clock.advance(20.0)
        supervision.loop.after(0.0, (supervision.folder / "go").touch)

    supervision.on("trainer.0 ready", lambda: supervision.once_ended("ps.0", go_on_later))
    result = supervision.run()
    assert (result.code, result.cause) == (0, None)


def test_trainers_stop_before_their_servers(job):
    trainer = "trap 'kill $!; tell asked; exit 0' TERM; sleep 100 & tell ready; wait"
    supervision = job({"ps.0": CARING, "trainer.0": trainer, "trainer.1": OBEDIENT}, mode=Mode.PS)
    ready = {"ps.0 ready": 1, "trainer.0 ready": 1, "trainer.1 ready": 1}
    supervision.after(ready, lambda: supervision.supervisor.interrupt(signal.SIGTERM))
    assert supervision.run().code == 143
    asked = [line for line in supervision.story if line.endswith("asked")]
    assert asked == ["trainer.0 asked", "ps.0 asked"]


# ---- from outside


@pytest.mark.parametrize(
    ("number", "command", "code", "why"),
    [
        (signal.SIGINT, "", 130, "stopping; Ctrl-C again kills"),
        (signal.SIGTERM, "", 143, "got SIGTERM; stopping the job"),
        (signal.SIGHUP, "", 129, "got SIGHUP; stopping the job"),
        (
            signal.SIGTERM,
            "`fleetrun stop` of me",
            143,
            "asked to end by `fleetrun stop` of me; stopping the job",
        ),
    ],
)
def test_a_signal_ends_the_job_with_its_own_code(job, number, command, code, why):
    supervision = job({"trainer.0": CARING, "trainer.1": OBEDIENT}, restarts=3)
    ready = {"trainer.0 ready": 1, "trainer.1 ready": 1}
    supervision.after(ready, lambda: supervision.supervisor.interrupt(number, command))
    result = supervision.run()
    assert (result.code, result.cause, result.restarts) == (code, None, 0)
    assert supervision.told("trainer.0 asked") == 1
    assert f"ending: {why}" in supervision.story
    assert result.requested == (not why.startswith("got"))


def test_the_second_ctrl_c_kills(job):
    supervision = job({"trainer.0": STUBBORN, "ps.0": STUBBORN}, mode=Mode.PS)

    def twice():
        supervision.supervisor.interrupt(signal.SIGINT)
        supervision.supervisor.interrupt(signal.SIGINT)

    supervision.after({"trainer.0 ready": 1, "ps.0 ready": 1}, twice)
    assert supervision.run().code == 130
    for name in ("trainer.0", "ps.0"):
        assert supervision.container(name).ended.exit == Exit(-signal.SIGKILL)


def test_a_signal_during_the_wait_for_a_restart_starts_nothing(job):
    """Not even what would have been due before the last of the others has gone."""
    supervision = job(
        {"ps.0": STUBBORN, "trainer.0": LEAVE_ON_GO.format(5)},
        mode=Mode.PS,
        restarts=3,
        backoff=0.01,
        stop_timeout=0.1,
    )
    first = iter([lambda: None, lambda: supervision.loop.after(0, interrupt)])

    def interrupt():
        supervision.supervisor.interrupt(signal.SIGTERM)

    supervision.after({"ps.0 ready": 1, "trainer.0 ready": 1}, (supervision.folder / "go").touch)
    supervision.on("trainer.0 exited with code 5", lambda: next(first)())
    assert supervision.run().code == 143
    assert supervision.told("started trainer.0") == 1


def let_time_pass(supervision):
    """For the grace and for the kernel, until a process is left behind."""
    if not any("after SIGKILL" in line for line in supervision.story):
        supervision.clock.advance(LET_GO)
        supervision.soon(lambda: let_time_pass(supervision))


def immortal(supervision, name):
    """As one that the kernel holds: SIGKILL does nothing. Returns what ends that."""
    process = supervision.container(name).process
    signal_group = process.signal_group
    process.signal_group = lambda number: None if number == signal.SIGKILL else signal_group(number)

    def let_die():
        process.signal_group = signal_group

    return let_die


@pytest.mark.parametrize(
    ("mode", "restarts", "interrupts", "code"),
    [
        pytest.param(Mode.COLLECTIVE, 0, False, 7, id="after a failure"),
        pytest.param(Mode.COLLECTIVE, 3, False, 125, id="before a restart"),
        pytest.param(Mode.COLLECTIVE, 3, True, 143, id="after a signal"),
        pytest.param(Mode.COLLECTIVE, 3, "twice", 130, id="after Ctrl-C twice"),
    ],
)
def test_a_process_that_cannot_be_killed_is_left_behind(job, mode, restarts, interrupts, code):
    supervision = job(
        {"trainer.0": STUBBORN, "trainer.1": LEAVE_ON_GO.format(7)}, restarts=restarts, pace=SLOWLY
    )
    made = []

    def begin():
        made.append(immortal(supervision, "trainer.0"))
        if interrupts == "twice":
            supervision.supervisor.interrupt(signal.SIGINT)
            supervision.supervisor.interrupt(signal.SIGINT)
        elif interrupts:
            supervision.supervisor.interrupt(signal.SIGTERM)
        else:
            (supervision.folder / "go").touch()
        supervision.once_ended("trainer.1", lambda: let_time_pass(supervision))

    supervision.after({"trainer.0 ready": 1, "trainer.1 ready": 1}, begin)
    result = supervision.run()
    made[0]()
    assert result.code == code
    assert result.left_behind.startswith("trainer 0 did not end within 15 s after SIGKILL")
    assert sum(result.left_behind in line for line in supervision.story) == 1
    assert supervision.told("started trainer.0 trainer.1") == 1


@pytest.mark.parametrize("end", ["restart", "leave"])
def test_a_server_that_cannot_be_killed_is_left_behind(job, end):
    """When it is to start again, and when the trainers are done."""
    supervision = job({"ps.0": STUBBORN, "trainer.0": LEAVE_ON_GO.format(0)}, mode=Mode.PS, pace=SLOWLY)
    made = []

    def begin():
        made.append(immortal(supervision, "ps.0"))
        if end == "restart":
            assert not supervision.supervisor.restart("ps.0", "fleetrun restart")
            let_time_pass(supervision)
        else:
            (supervision.folder / "go").touch()
            supervision.once_ended("trainer.0", lambda: let_time_pass(supervision))

    supervision.after({"ps.0 ready": 1, "trainer.0 ready": 1}, begin)
    result = supervision.run()
    made[0]()
    assert result.code == (125 if end == "restart" else 0)
    assert result.left_behind.startswith("server 0 did not end within 15 s after SIGKILL")
    assert supervision.told("started ps.0 trainer.0") == 1


def test_a_job_that_takes_too_long_ends_with_124(job):
    supervision = job({"trainer.0": CARING}, timeout=10.0, pace=SLOWLY)
    supervision.on("trainer.0 ready", lambda: supervision.clock.advance(10.0))
    result = supervision.run()
    assert (result.code, result.reason) == (124, "the job took longer than --timeout 10 s")
    assert supervision.told("trainer.0 asked") == 1


def test_a_lost_guard_ends_everything_at_once(job):
    supervision = job({"trainer.0": STUBBORN})
    supervision.on("trainer.0 ready", lambda: supervision.supervisor.guard_lost())
    assert supervision.run().code == 125
    eventually(lambda: ended(supervision.container("trainer.0").process.pid))


# ---- a node of several


def held(supervision, name):
    """Suspend the processes as after a suspension of the launcher. A shell whose child stops between vfork
    and exec is in state D.
    """
    supervision.supervisor.hold(True)
    eventually(lambda: state_of(supervision.container(name).process.pid) in ("T", "D"))


def test_what_the_job_has_gone_on_without_does_not_run_again_before_it_is_killed(job):
    """SIGKILL is the first signal: SIGTERM comes with SIGCONT."""
    supervision = job({"trainer.0": STUBBORN})

    def ready():
        held(supervision, "trainer.0")
        supervision.supervisor.kill_for("gone on", "lost")

    supervision.on("trainer.0 ready", ready)
    supervision.run()
    end = supervision.container("trainer.0").ended
    assert (end.asked, end.exit) == (signal.SIGKILL, Exit(-signal.SIGKILL))


def test_what_stops_already_is_killed_when_the_job_has_gone_on_without_it(job):
    supervision = job({"trainer.0": STUBBORN})

    def ready():
        supervision.supervisor.stop_for("another failed", "failure")
        supervision.supervisor.kill_for("gone on", "lost")

    supervision.on("trainer.0 ready", ready)
    supervision.run()
    assert supervision.container("trainer.0").ended.exit == Exit(-signal.SIGKILL)


def test_processes_that_are_held_are_asked_to_go_as_others_are(job):
    supervision = job({"trainer.0": CARING})

    def ready():
        held(supervision, "trainer.0")
        supervision.supervisor.stop_for("another failed", "failure")

    supervision.on("trainer.0 ready", ready)
    supervision.run()
    assert supervision.told("trainer.0 asked") == 1


def test_processes_that_are_released_go_on(job):
    supervision = job({"trainer.0": LEAVE_ON_GO.format(0)})

    def ready():
        held(supervision, "trainer.0")
        (supervision.folder / "go").touch()
        supervision.supervisor.hold(False)

    supervision.on("trainer.0 ready", ready)
    assert supervision.run().code == 0


class Heard:
    """What a supervisor tells the other nodes."""

    def __init__(self):
        self.too = []
        self.restarts = []

    def restart_asked(self, command, edit):
        self.restarts.append(command)

    def pod_failed_too(self, ended, fault):
        self.too.append(ended.spec.name)


def test_a_failure_whose_inspection_is_cut_off_by_a_stop_is_told_too(job):
    """It may have been the first."""
    peers, cut = Heard(), []

    def inspect(containers, ended, then):
        supervision.loop.after(0.0, lambda: supervision.supervisor.stop_for("another failed", "failure"))
        return lambda: cut.append(ended.spec.name)

    scripts = {"trainer.0": LEAVE_ON_GO.format(7), "trainer.1": OBEDIENT}
    supervision = job(scripts, peers=peers, inspect=inspect)
    supervision.on("trainer.1 ready", (supervision.folder / "go").touch)
    supervision.run()
    assert (cut, peers.too) == (["trainer.0"], ["trainer.0"])


FAILS = ATTEMPT.format(0) + "exit 0; exit 3"
STAYS = "exec sleep 100"
SECOND = {
    "trainer": ({"ps.0": STAYS, "trainer.0": FAILS}, {"trainer.1": "exit 0"}, 4),
    "server": ({"ps.0": STAYS, "trainer.0": FAILS}, {"ps.1": STAYS}, 4),
    "evaluator": ({"ps.0": STAYS, "trainer.0": FAILS}, {"evaluator.0": "exit 0"}, 4),
    "the last trainer, well": ({"ps.0": ATTEMPT.format(0) + f"{STAYS}; exit 3"}, {"trainer.0": "exit 0"}, 0),
}


@pytest.mark.parametrize(("first", "second", "code"), SECOND.values(), ids=list(SECOND))
def test_what_ends_while_others_are_asked_after_a_failure_is_not_forgotten(job, first, second, code):
    """Only what had failed starts again where there are servers, so nothing else would."""
    ((other, then_ends),) = second.items()

    def inspect(containers, ended, then):
        if ended.exit.code != 3:
            return None
        (supervision.folder / "go").touch()
        supervision.once_ended(other, lambda: then(None))
        return lambda: None

    scripts = {**first, other: ATTEMPT.format(0) + f"{then_ends}; " + LEAVE_ON_GO.format(code)}
    supervision = job(scripts, mode=Mode.PS, restarts=5, inspect=inspect)
    servers = " ".join(each for each in scripts if each.startswith("ps."))
    skip = partial(supervision.clock.advance, 1.0)
    supervision.on(f"leaving {servers}", lambda: supervision.loop.after(0, skip))
    assert supervision.run().code == 0, supervision.story
    failed = next(name for name, script in first.items() if script != STAYS)
    assert supervision.container(failed).restarts == 1
    assert supervision.container(other).restarts == (1 if code else 0)


def test_a_server_that_left_early_while_others_are_asked_is_started_again(job):
    def inspect(containers, ended, then):
        if ended.exit.code != 3:
            return None
        supervision.clock.advance(1.0)
        supervision.soon(lambda: then(None))
        return lambda: None

    leaves = ATTEMPT.format(0) + f"{STAYS}; exit 0"
    fails = ATTEMPT.format(0) + "exit 0; " + LEAVE_ON_GO.format(3)
    supervision = job(
        {"ps.0": leaves, "trainer.0": fails}, mode=Mode.PS, restarts=5, inspect=inspect, pace=SLOWLY
    )
    go = (supervision.folder / "go").touch
    supervision.on("trainer.0 ready", lambda: supervision.once_ended("ps.0", go))
    supervision.on("leaving ps.0", lambda: supervision.loop.after(0, partial(supervision.clock.advance, 1.0)))
    assert supervision.run().code == 0, supervision.story
    assert supervision.container("ps.0").restarts == 1


def test_what_ends_while_others_are_asked_counts_where_the_job_stops(job):
    def inspect(containers, ended, then):
        (supervision.folder / "go").touch()
        supervision.once_ended("trainer.1", lambda: then(None))
        return lambda: None

    scripts = {"ps.0": "exec sleep 100", "trainer.0": "exit 3", "trainer.1": LEAVE_ON_GO.format(4)}
    supervision = job(scripts, mode=Mode.PS, inspect=inspect)
    result = supervision.run()
    assert (result.code, [each.spec.name for each in result.others]) == (3, ["trainer.1"])


def test_a_process_that_cannot_be_started_ends_what_had_started(job, tmp_path):
    supervision = job({"trainer.0": STUBBORN, "trainer.1": tmp_path})
    with pytest.raises(ScriptNotExecutableError):
        supervision.run()
    eventually(lambda: ended(supervision.container("trainer.0").process.pid))
    assert supervision.sweeps == [0.0]


# ---- the hook


def test_the_hook_runs_to_its_end_before_each_start(job):
    supervision = job(
        {"trainer.0": 'tell "ran after $(cat "$NOTES/hooks")"; ' + ATTEMPT.format(1) + "exit 3; exit 0"},
        hook='printf x >>"$NOTES/hooks"',
        restarts=1,
    )
    result = supervision.run()
    assert (result.code, result.restarts) == (0, 1)
    assert [line for line in supervision.story if " ran after " in line] == [
        "trainer.0 ran after x", "trainer.0 ran after xx"
    ]  # fmt: skip


def test_a_hook_that_fails_is_a_failure_and_nothing_starts(job):
    supervision = job({"trainer.0": "tell ran"}, hook="tell hook; exit 4", restarts=2)
    result = supervision.run()
    assert (result.code, result.cause.spec.name, result.restarts) == (4, "pre_hook", 2)
    assert (supervision.told("pre_hook hook"), supervision.told("trainer.0 ran")) == (3, 0)


def test_one_hook_at_a_time(job):
    """With servers, a second failure may come while the hook of the first still runs."""
    hook = (
        'mkdir "$NOTES/in" || { tell together; exit 1; }; tell "begins $PADDLE_RESTART_COUNT"; '
        '[ "$PADDLE_RESTART_COUNT" = 0 ] || while [ ! -e "$NOTES/second" ]; do sleep 0.005; done; '
        'rmdir "$NOTES/in"'
    )
    supervision = job(
        {
            "ps.0": "exec sleep 100",
            "trainer.0": ATTEMPT.format(0) + "exit 0; exit 3",
            "trainer.1": ATTEMPT.format(0)
            + 'exit 0; while [ ! -e "$NOTES/first" ]; do sleep 0.005; done; exit 4',
        },
        mode=Mode.PS,
        restarts=5,
        hook=hook,
    )
    supervision.on("pre_hook begins 1", (supervision.folder / "first").touch)
    second = (supervision.folder / "second").touch
    supervision.on("restarting trainer.1", lambda: supervision.loop.after(0, second))
    supervision.on("leaving ps.0", lambda: supervision.loop.after(0, lambda: supervision.clock.advance(1.0)))
    assert supervision.run().code == 0
    assert supervision.told("pre_hook together") == 0
    assert supervision.container("trainer.0").restarts == 1
    assert supervision.container("trainer.1").restarts == 1


def test_what_waits_for_a_hook_that_ended_while_others_were_asked_is_started(job):
    """Also when the hook has run again since, for others."""
    hook = (
        'tell "begins $PADDLE_RESTART_COUNT"; '
        '[ "$PADDLE_RESTART_COUNT" != 1 ] || while [ ! -e "$NOTES/hook" ]; do sleep 0.005; done'
    )
    fails = ATTEMPT.format(0) + 'exit 0; while [ ! -e "$NOTES/{}" ]; do sleep 0.005; done; exit {}'
    scripts = {f"trainer.{n}": fails.format(f"go{n}", 3 + n) for n in range(3)}

    def touch(name):
        (supervision.folder / name).touch()

    def hook_ends(then):
        touch("hook")
        supervision.once(lambda: not supervision.pod.hook.alive, lambda: then(None))

    def inspect(containers, ended, then):
        if ended.spec.name == "trainer.1":  # in this time trainer 2 ends, and then the hook
            touch("go2")
            supervision.once_ended("trainer.2", lambda: hook_ends(then))
        elif ended.spec.name == "trainer.2":  # in this time trainer 1 is to start again
            supervision.on("pre_hook begins 2", lambda: then(None))
            supervision.clock.advance(1.0)
        else:
            return None
        return lambda: None

    supervision = job(
        {"ps.0": STAYS, **scripts}, mode=Mode.PS, restarts=5, hook=hook, inspect=inspect, backoff=1.0
    )
    touch("go0")
    supervision.on("pre_hook begins 1", lambda: touch("go1"))
    skip = partial(supervision.clock.advance, 30.0)
    for then in ("restarting trainer.2", "leaving ps.0"):
        supervision.on(then, lambda: supervision.loop.after(0, skip))
    assert supervision.run().code == 0, supervision.story
    assert [supervision.container(name).restarts for name in scripts] == [1, 1, 1]


# ---- a loop that goes on with the next pod


def turn(supervision):
    supervision.loop.after(0.0, supervision.loop.stop)
    supervision.loop.run()


def test_what_had_started_before_a_failed_start_is_heard_of_no_more(job, tmp_path):
    supervision = job({"trainer.0": "sleep 100", "trainer.1": tmp_path / "nothing"})
    with pytest.raises(LaunchError, match="the program does not exist"):
        supervision.run()
    process = supervision.container("trainer.0").process
    eventually(lambda: process.ended)
    told = list(supervision.story)
    turn(supervision)
    assert supervision.story == told


def test_nothing_is_left_to_do_when_it_has_ended(job):
    leaves = 'until [ -e "$NOTES/go" ]; do sleep 0.01; done'
    supervision = job({"ps.0": leaves, "trainer.0": "exit 0"}, mode=Mode.PS, pace=SLOWLY)
    supervision.on("leaving ps.0", (supervision.folder / "go").touch)
    assert supervision.run().code == 0
    asked = list(supervision.asked_strays)
    supervision.clock.advance(60)
    turn(supervision)
    assert supervision.asked_strays == asked


def test_a_pod_leaves_no_descriptor_behind(job):
    def opened():
        links = []
        for each in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                links.append(str(each.readlink()))
        return Counter(link for link in links if "kmsg" in link or "pidfd" in link)

    before = opened()
    supervision = job({"trainer.0": "exit 0"})
    supervision.run()
    assert opened() == before


# ---- The stop ladder over real processes that obey, and that do not.


class Climb:
    """A ladder over containers in groups, driven by a loop as the supervisor does."""

    def __init__(self, groups, grace, *, interrupted=False):
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.ended = []
        self.done = 0
        self.on_exit = lambda container: None
        self.left = []
        self.ladder = Ladder(self.loop, groups, grace, self._then, self.left.extend, interrupted=interrupted)
        for container in [each for group in groups for each in group if each.alive]:
            self.loop.add(container.process.fileno(), lambda container=container: self._exited(container))

    def run(self):
        self.ladder.step()
        if not self.done:
            self.loop.run()
        self.loop.close()

    def _exited(self, container):
        self.on_exit(container)
        self.loop.remove(container.process.fileno())
        self.ended.append((container, container.collect(lambda pid: False).exit.code))
        self.ladder.step()

    def _then(self):
        self.done += 1
        self.loop.stop()


READY = 'echo >"$NOTES/ready.$NAME"; '


@pytest.fixture
def running(tmp_path):
    made = []

    def make(*scripts):
        found = []
        for script in scripts:
            container = Container(spec_of(tmp_path, script.format(READY), rank=len(made)))
            container.prepare()
            made.append(container)
            found.append(container)
            os.mkfifo(tmp_path / f"ready.{container.spec.name}")
            container.start()
            (tmp_path / f"ready.{container.spec.name}").read_text()
        return found

    yield make
    for each in made:
        if each.alive:
            each.process.signal_group(signal.SIGKILL)
            each.process.reap()


OBEYS = "{}exec sleep 100"
DEAF = "trap '' TERM; {}while :; do sleep 100; done"


def test_who_obeys_is_not_killed(running):
    climb = Climb([running(OBEYS, OBEYS)], grace=1000.0)
    climb.run()
    assert [code for _, code in climb.ended] == [-15, -15]
    assert climb.done == 1


def test_who_does_not_is_killed_after_the_grace(running):
    deaf, obedient = running(DEAF, OBEYS)
    climb = Climb([[deaf, obedient]], grace=1000.0)
    climb.on_exit = lambda container: climb.clock.advance(1000.0)
    climb.run()
    assert climb.ended == [(obedient, -15), (deaf, -9)]


def test_after_ctrl_c_workers_get_sigint_and_their_servers_sigterm(running):
    climb = Climb([running(OBEYS), running(OBEYS)], grace=1000.0, interrupted=True)
    climb.run()
    assert [code for _, code in climb.ended] == [-2, -15]


def test_a_worker_that_ignores_sigint_gets_sigterm_after_half_of_the_grace(running):
    (ignores,) = running("trap '' INT; {}exec sleep 100")
    climb = Climb([[ignores]], grace=1000.0, interrupted=True)
    climb.loop.after(0.0, lambda: climb.clock.advance(500.0))
    climb.run()
    assert climb.ended == [(ignores, -15)]


def test_one_group_after_the_other(running):
    first, second = running(DEAF, OBEYS)
    climb = Climb([[first], [second]], grace=1000.0)
    climb.loop.after(0.0, lambda: climb.clock.advance(1000.0))
    climb.run()
    assert climb.ended == [(first, -9), (second, -15)], "the second was asked after the first had gone"


def test_each_group_has_its_own_grace(running):
    climb = Climb([running(DEAF), running(DEAF)], grace=0.05)
    climb.run()
    assert [code for _, code in climb.ended] == [-9, -9]


def test_the_grace_of_the_first_does_not_end_that_of_the_second(running, tmp_path):
    slow = (
        "trap 'while [ ! -e \"$NOTES/leave\" ]; do sleep 0.005; done; exit 0' TERM; "
        "{}while :; do sleep 0.01; done"
    )
    first, second = running(OBEYS, slow)
    climb = Climb([[first], [second]], grace=1000.0)

    def almost_over(container):
        if container is first:
            climb.clock.advance(900.0)
            climb.loop.after(0.0, over)

    def over():
        climb.clock.advance(200.0)
        climb.loop.after(0.0, (tmp_path / "leave").touch)

    climb.on_exit = almost_over
    climb.run()
    assert climb.ended == [(first, -15), (second, 0)]


def test_a_stopped_process_hears_its_sigterm(running):
    (made,) = running(OBEYS)
    made.process.signal_leader(signal.SIGSTOP)
    eventually(lambda: state_of(made.process.pid) == "T")
    climb = Climb([[made]], grace=1000.0)
    climb.run()
    assert climb.ended == [(made, -15)]


def test_no_more_patience(running):
    first, second = running(DEAF, DEAF)
    climb = Climb([[first], [second]], grace=1000.0)
    climb.loop.after(0.0, climb.ladder.kill)
    climb.run()
    assert [code for _, code in climb.ended] == [-9, -9]


def test_nobody_to_stop():
    climb = Climb([[], []], grace=1000.0)
    climb.run()
    assert climb.done == 1


# ---- a restart that a user asks for

COMMAND = "`fleetrun top` of alice"


def test_a_restart_that_is_asked_for_is_of_all_in_collective_mode(job):
    supervision = job({"trainer.0": LEAVE_ON_GO.format(0), "trainer.1": LEAVE_ON_GO.format(0)})
    both = {"trainer.0 ready": 1, "trainer.1 ready": 1}

    def restart():
        supervision.after(both, (supervision.folder / "go").touch)
        assert supervision.supervisor.restart("trainer.1", COMMAND) == ""
        assert "already" in supervision.supervisor.restart("trainer.0", COMMAND)

    supervision.after(both, restart)
    result = supervision.run()
    assert (result.code, result.restarts) == (0, 0), "it is no failure"
    assert [supervision.told(each) for each in both] == [2, 2]
    assert supervision.told("restart asked trainer.0 trainer.1") == 1
    assert supervision.decisions == []


@pytest.mark.parametrize("name", ["trainer.1", "ps.0"])
def test_with_servers_only_that_process_starts_again(job, name):
    waits = LEAVE_ON_GO.format(0)
    supervision = job({"trainer.0": waits, "trainer.1": waits, "ps.0": OBEDIENT}, mode=Mode.PS)

    def restart():
        supervision.on(f"{name} ready", (supervision.folder / "go").touch)
        assert supervision.supervisor.restart(name, COMMAND) == ""
        assert "already" in supervision.supervisor.restart(name, COMMAND)

    supervision.after({"trainer.0 ready": 1, "trainer.1 ready": 1, "ps.0 ready": 1}, restart)
    result = supervision.run()
    assert (result.code, result.restarts) == (0, 0)
    again = {each.spec.name for each in supervision.pod.containers if each.restarts}
    assert again == {name}


def test_an_end_takes_over_from_a_restart_of_one(job):
    supervision = job({"trainer.0": OBEDIENT, "trainer.1": STUBBORN}, mode=Mode.PS, stop_timeout=0.05)

    def restart():
        assert supervision.supervisor.restart("trainer.1", COMMAND) == ""
        supervision.supervisor.interrupt(signal.SIGTERM)

    supervision.after({"trainer.0 ready": 1, "trainer.1 ready": 1}, restart)
    assert supervision.run().code == 143
    assert supervision.container("trainer.1").restarts == 0


def test_an_edit_whose_restart_fails_has_counted_anew(job, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nsleep 100\n")
    program.chmod(0o755)
    fails_twice = '[ "$PADDLE_RESTART_COUNT" = 2 ] || exit 3; ' + OBEDIENT
    supervision = job({"trainer.0": fails_twice, "trainer.1": program}, restarts=3)

    def restart():
        program.unlink()
        assert supervision.supervisor.restart("", COMMAND, "edit") == ""

    supervision.on("trainer.0 ready", restart)
    result = supervision.run()
    assert result.reason.startswith("the restart failed: cannot start")
    assert result.restarts == 0


def test_what_cannot_be_started_again(job):
    supervision = job({"trainer.0": OBEDIENT, "trainer.1": "exit 0"}, mode=Mode.PS)
    said = []

    def restart():
        said.extend(supervision.supervisor.restart(name, COMMAND) for name in ("trainer.7", "trainer.1"))
        supervision.supervisor.interrupt(signal.SIGTERM)
        said.append(supervision.supervisor.restart("trainer.0", COMMAND))

    supervision.on("trainer.0 ready", lambda: supervision.once_ended("trainer.1", restart))
    supervision.run()
    assert ["no process" in said[0], "does not run" in said[1], "already" in said[2]] == [True] * 3


def test_the_nodes_of_a_collective_job_start_again_together(job):
    peers = Heard()
    supervision = job({"trainer.0": OBEDIENT}, peers=peers)

    def restart():
        assert supervision.supervisor.restart("trainer.0", COMMAND) == ""
        supervision.supervisor.stop_for("it is asked for", "restart")

    supervision.on("trainer.0 ready", restart)
    supervision.run()
    assert peers.restarts == [COMMAND]
