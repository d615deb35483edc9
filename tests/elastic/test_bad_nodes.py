"""Faults of machines: which count, who is left out for them and when, and how many losses a job survives."""

import pytest

from fleetrun.elastic.rendezvous.actions import Policy
from fleetrun.elastic.rendezvous.checks import Measured
from fleetrun.elastic.rendezvous.records import Cause, CauseKind
from fleetrun.envs.contract import NodeLoss
from fleetrun.pod.policy import Budget
from fleetrun.record.faults import MachineFault, counted, excluded, merged
from tests.support.simulation import Player, SimulatedJob

LEASE = 10.0
TWICE = (MachineFault(1.0, "h2 (10.0.0.2)", "it was lost"), MachineFault(2.0, "h2 (10.0.0.2)", "lost again"))


def job_of(count: int, *, spares: int = 1, fewest: int = 2, most: int = 2, **policy) -> SimulatedJob:
    job = SimulatedJob(fewest=fewest, most=most, spares=spares, lease=LEASE, exclude_after=2, **policy)
    for _ in range(count):
        job.add()
    return job


def running(job: SimulatedJob) -> set[str]:
    return {player.node.id for player in job.players if player.running}


def lose(job: SimulatedJob, player: Player, step: int | None = None) -> None:
    for each in job.players:
        each.step = step
    player.crash()
    there = [each for each in job.players if each.running and not each.over]
    job.until(lambda: any(len(each.runs) > len(each.stops) > 0 for each in there) or job.all_over())
    job.loop.run_for(30)


def test_a_machine_that_was_lost_twice_is_left_out_when_it_comes_again():
    job = job_of(3)
    job.until(lambda: running(job) == {"n1", "n2"})
    lose(job, job.players[1])
    assert running(job) == {"n1", "n3"}
    again = job.add(host="10.0.0.2", name="h2")
    job.loop.run_for(LEASE + 5)
    assert again.error is None
    lose(job, job.players[2])
    assert running(job) == {"n1", again.node.id}
    job.add()
    lose(job, again)
    assert running(job) == {"n1", "n5"}
    bad = job.add(host="10.0.0.2", name="h2")
    job.loop.run_for(5)
    assert bad.error.exit_code == 123
    assert "h2 (10.0.0.2) is excluded from this job after 2 faults" in bad.error.message
    assert "--reset" in bad.error.hint
    assert counted(job.players[0].faults).keys() == {"h2 (10.0.0.2)", "h3 (10.0.0.3)"}


def test_faults_of_earlier_launches_count_and_the_others_hear_of_them():
    job = job_of(0)
    job.add()
    bad = job.add(faults=TWICE)
    job.loop.run_for(5)
    assert running(job) == set()
    job.add()
    job.until(lambda: len(running(job)) == 2)
    assert running(job) == {"n1", "n3"}
    assert "lost again" in bad.error.message
    assert job.players[0].faults == TWICE


def test_a_bad_machine_is_better_than_none():
    """At once where no spare is to come, else when the time for one is over."""
    for spares, within in ((0, 1.0), (1, 61.0)):
        job = job_of(0, spares=spares, rdzv_timeout=60.0)
        job.add()
        job.add(faults=TWICE)
        job.until(lambda: len(running(job)) == 2, within=within)  # noqa: B023


@pytest.mark.parametrize("spares", [0, 1])
def test_the_bad_machine_that_has_the_store_stays_and_waits(spares):
    """Its launcher serves the others."""
    fewest = 2 if spares else 1
    job = job_of(0, spares=spares, fewest=fewest, elastic_timeout=5.0)
    host = job.add(faults=TWICE, host="10.0.0.2", name="h2", has_store=True)
    for number in range(fewest):
        job.add(name=f"other{number}")
    others = job.players[1:]
    job.until(lambda: all(player.running for player in others))
    job.loop.run_for(30)
    assert (host.over, host.runs, host.notes[-1].spare) == (False, [], True)
    for player in others:
        player.complete()
    job.until(job.all_over)
    assert [player.code for player in job.players] == [0] * len(job.players)


def test_the_bad_machine_that_has_the_store_takes_part_when_another_is_lost():
    job = job_of(0, elastic_timeout=5.0)
    host = job.add(faults=TWICE, host="10.0.0.2", name="h2", has_store=True)
    job.add(name="other")
    job.add()
    job.until(lambda: running(job) == {"n2", "n3"})
    lose(job, job.players[2])
    assert running(job) == {"n1", "n2"}
    assert host.error is None


@pytest.mark.parametrize("spares", [0, 1])
def test_the_job_ends_when_the_launcher_with_the_store_leaves(spares):
    """For whatever reason: no generation begins that would end with the store."""
    job = job_of(
        2 + spares, spares=spares, elastic_timeout=5.0, on_loss=NodeLoss.FAIL if spares else NodeLoss.SHRINK
    )
    job.until(lambda: len(running(job)) == 2)
    killed = "fleetrun-guard, the launcher's parent, was killed"
    cause = Cause(why=CauseKind.LOST, node="", headline=killed, code=125)
    job.players[0].membership.leave(cause, last=True)
    job.players[0].crashed = True
    job.until(job.all_over)
    assert job.players[1].code == 125
    assert len(job.players[1].runs) == 1


def test_an_elastic_job_goes_on_without_the_bad_machine():
    job = job_of(0, spares=0, fewest=1, most=2, elastic_timeout=5.0)
    job.add()
    job.until(lambda: len(running(job)) == 1)
    bad = job.add(host="10.0.0.2", name="h2", faults=TWICE)
    job.loop.run_for(30)
    assert bad.error.exit_code == 123
    assert len(job.players[0].runs) == 1


def test_a_crash_counts_for_its_machine_and_an_exception_for_none():
    job = job_of(2, spares=0)
    job.until(job.all_run())
    job.players[1].fail(1, restart=True)
    job.until(job.all_run_again(*job.players))
    assert job.players[0].faults == ()
    job.players[1].fail(139, restart=True, machine="h2 (10.0.0.2)")
    job.until(lambda: len(job.players[0].runs) == 3)
    (fault,) = job.players[0].faults
    assert (fault.node, fault.what) == ("h2 (10.0.0.2)", "trainer 1 exited with code 139")


def blame(job: SimulatedJob, rank: int, suspicion: str = "", *, after: float = 1.0, step: int = 0) -> None:
    """The machine of this rank has a fault `after` some seconds, in which the job came to this step."""
    job.loop.run_for(after)
    for each in job.players:
        each.step = step
    there = [each for each in job.players if each.running]
    player = next(each for each in there if each.running.rank == rank)
    runs = len(there[0].runs)
    player.fail(139, restart=True, machine=player.node.known_as, suspicion=suspicion)
    job.until(lambda: any(len(each.runs) > runs and each.running for each in there) or job.all_over())
    job.loop.run_for(1)


def machines_out(job: SimulatedJob) -> set[str]:
    return set(excluded(job.players[0].faults, 2))


@pytest.mark.parametrize("suspicion", ["", "crash"])
def test_a_machine_that_fails_soon_after_each_start_is_out_after_two(suspicion):
    """A few steps between its faults do not make up for them."""
    job = job_of(3, budget=Budget(9))
    job.until(lambda: len(running(job)) == 2)
    for step in (10, 20):
        blame(job, 1, suspicion, after=30, step=step)
    assert machines_out(job) == {"h2 (10.0.0.2)"}
    assert running(job) == {"n1", "n3"}
    assert job.players[1].error.exit_code == 123


def test_what_happens_on_several_machines_is_not_the_fault_of_one():
    """Crashes of a library, kills by an operator: here and there, so that each machine has several."""
    job = job_of(3, spares=1, budget=Budget(9))
    job.until(lambda: len(running(job)) == 2)
    for rank in (0, 1, 0, 1, 0, 1):
        blame(job, rank, "kill")
    assert machines_out(job) == set()
    blame(job, 1, "kill")
    assert counted(job.players[0].faults) == {}
    for _ in range(2):
        blame(job, 1, "crash")  # another kind
    assert machines_out(job) == {"h2 (10.0.0.2)"}


def test_what_speaks_of_the_machine_itself_is_not_refuted_by_other_machines():
    job = job_of(4, spares=2, budget=Budget(9))
    job.until(lambda: len(running(job)) == 2)
    for rank in (1, 0, 1):
        blame(job, rank)
    assert machines_out(job) == {"h2 (10.0.0.2)"}


@pytest.mark.parametrize(
    ("window", "works", "out"), [(None, 3600.0, False), (None, 3500.0, True), (60.0, 70.0, False)]
)
def test_work_makes_a_fault_forgiven(window, works, out):
    """It adds up over generations that ended for something else."""
    job = job_of(3, budget=Budget(99, window))
    job.until(lambda: len(running(job)) == 2)
    blame(job, 1, step=1)
    for step in (2, 3):
        job.loop.run_for(works / 2)
        for each in job.players:
            each.step = step
        job.players[0].fail(1, restart=True)
        job.until(lambda step=step: len(job.players[0].runs) == step + 1)
    blame(job, 1, step=4)
    assert machines_out(job) == ({"h2 (10.0.0.2)"} if out else set())
    assert [fault.what != "" for fault in job.players[0].faults] == (
        [True] * 2 if out else [True, False, True]
    )


def test_time_without_a_new_step_forgives_nothing():
    job = job_of(3, budget=Budget(99))
    job.until(lambda: len(running(job)) == 2)
    blame(job, 1, step=5)
    blame(job, 1, after=5000, step=5)
    assert machines_out(job) == {"h2 (10.0.0.2)"}


def test_a_job_that_completes_forgives_the_machines_that_worked_for_it():
    job = job_of(2)
    job.until(lambda: len(running(job)) == 2)
    blame(job, 1, step=5)
    job.loop.run_for(4000)
    for player in job.players:
        player.complete()
    job.until(job.all_over)
    assert counted(job.players[0].faults) == {}


def test_where_all_are_there_and_too_few_are_good_the_least_blamed_takes_part_at_once():
    job = job_of(0, spares=1, rdzv_timeout=600.0)
    worse = (*TWICE, MachineFault(3.0, "h2 (10.0.0.2)", "a third time"))
    twice = tuple(fault._replace(node="h3 (10.0.0.3)") for fault in TWICE)
    job.add()
    job.add(faults=worse)
    job.loop.run_for(10)
    assert running(job) == set()  # another may come
    job.add(faults=twice)
    job.until(lambda: running(job) == {"n1", "n3"}, within=1.0)


def test_the_start_waits_for_a_good_machine_as_long_as_a_later_one_would():
    job = job_of(0, spares=1, rdzv_timeout=600.0, elastic_timeout=20.0)
    job.add()
    job.add(faults=TWICE)
    job.loop.run_for(15)
    assert running(job) == set()
    job.until(lambda: len(running(job)) == 2, within=10.0)


def test_a_machine_that_a_check_has_found_waits_for_a_better_one():
    """Though it was a member, and the job stopped for something else."""
    job = job_of(2, check="fast", rdzv_timeout=600.0, elastic_timeout=20.0, budget=Budget(9))
    first, second = job.players
    job.until(lambda: len(running(job)) == 2)
    second.measure = lambda round, members, rank: Measured(error="its GPU is gone")
    first.fail(1, restart=True)
    job.loop.run_for(15)
    assert running(job) == set()
    job.until(lambda: len(running(job)) == 2, within=10)


def test_a_generation_with_a_bad_machine_starts_again_at_once_unless_it_failed_again():
    job = job_of(0, spares=1, rdzv_timeout=600.0, elastic_timeout=20.0, budget=Budget(9))
    first = job.add()
    job.add(faults=TWICE)
    job.until(lambda: len(running(job)) == 2, within=30)
    first.fail(1, restart=True)
    job.until(lambda: len(first.runs) == 2 and len(running(job)) == 2, within=3)
    job.players[1].fail(139, restart=True, machine="h2 (10.0.0.2)")
    job.loop.run_for(15)
    assert running(job) == set()
    job.until(lambda: len(running(job)) == 2, within=10)


def test_a_job_that_loses_its_nodes_one_by_one_without_a_step_ends():
    job = job_of(6, spares=4, fewest=2, most=2)
    job.until(lambda: len(running(job)) == 2)
    for _ in range(4):
        player = next(each for each in job.players if each.running and each is not job.players[0])
        lose(job, player, step=7)
    code, cause = job.players[0].end
    assert code == 125
    assert cause.lines[-1] == "No restart: 3 nodes were lost before, and the job made no step after 7"


def test_losses_with_steps_between_them_do_not_end_a_job():
    job = job_of(8, spares=6, fewest=2, most=2)
    job.until(lambda: len(running(job)) == 2)
    for number in range(6):
        player = next(each for each in job.players if each.running and each is not job.players[0])
        lose(job, player, step=number)
    assert len(running(job)) == 2


def test_the_losses_of_a_job_have_a_budget_of_their_own():
    assert Policy(fewest=2, most=2, budget=Budget(0)).losses.limit == 3
    assert Policy(fewest=2, most=64, budget=Budget(3)).losses.limit == 64


def test_an_acquittal_forgets_what_was_before():
    faults = merged(TWICE, [MachineFault(1.5, "h3", "crash")])
    assert excluded(faults, 2).keys() == {"h2 (10.0.0.2)"}
    assert excluded(faults, 0) == {}
    once = merged(faults, [MachineFault(1.7, "h2 (10.0.0.2)")])
    assert {node: len(own) for node, own in counted(once).items()} == {"h2 (10.0.0.2)": 1, "h3": 1}
    assert counted(merged(faults, [MachineFault(3.0, "")])) == {}


def kill(time: float, node: str) -> MachineFault:
    return MachineFault(time, node, "killed", "kill")


def test_what_happens_on_several_machines_blames_none_of_them():
    """Nor the one on which it happens most often."""
    assert counted([kill(1.0, "m1"), kill(2.0, "m2"), kill(3.0, "m2"), kill(4.0, "m2")]) == {}
    assert counted([kill(1.0, "m2"), kill(2.0, "m2"), kill(3.0, "m1")]) == {}
    other = MachineFault(4.0, "m2", "SIGBUS")
    assert counted([kill(1.0, "m1"), kill(2.0, "m2"), other]) == {"m2": [other]}
    acquitted = [kill(1.0, "m1"), MachineFault(1.5, "m1"), kill(2.0, "m2"), kill(3.0, "m2")]
    assert counted(acquitted) == {"m2": acquitted[2:]}
    refuted = [kill(1.0, "m1"), kill(2.0, "m2"), MachineFault(2.5, "m2")]
    assert counted(refuted) == {}, "what is refuted stays so"
    assert counted([*refuted, kill(3.0, "m1"), MachineFault(3.5, "")]) == {}
