"""From the answer to `status` to the fields of the status line."""

from fleetrun.console.status_text import CurrentActivity, status_fields
from fleetrun.control.server import JobStatus, facts_of_launch
from fleetrun.envs.contract import Mode, Role
from fleetrun.pod.container import Pod
from fleetrun.pod.spec import PodSpec
from tests.support.pods import spec_of


def status(**more):
    container = {"role": "trainer", "pid": 7, "step": None, "loss": None, "rate": None, "activity": None}
    given = {"elapsed": 1.0, "state": "running", "restarts": 0, "waiting": None, "containers": [], **more}
    return {**given, "containers": [{**container, **each} for each in given["containers"]]}


def test_a_launch_that_has_no_pod_yet(tmp_path):
    """The keys are those that the status answers with."""
    status = JobStatus(facts_of_launch("job", "pod", "ps", tmp_path, 3), clock=iter([5.0, 7.5]).__next__)
    facts = status_fields(status.fields())
    assert (facts.elapsed, facts.up, facts.state, facts.activity) == (2.5, (), "", None)


def test_a_pod_of_which_nothing_runs(tmp_path):
    status = JobStatus(facts_of_launch("job", "pod", "ps", tmp_path, 3))
    specs = [spec_of(tmp_path, "true", Role.SERVER, 0), spec_of(tmp_path, "true", Role.TRAINER, 0)]
    spec = PodSpec(name="x", job_id="x", mode=Mode.PS, containers=tuple(specs), log_dir=tmp_path)
    status.set_pod(Pod(spec), 2)
    facts = status_fields(status.fields())
    assert facts.up == (("trainer", 0, 1), ("ps", 0, 1)), "trainers first"
    assert (facts.state, facts.restarts) == ("starting", 2)


def test_waiting_for_machines(tmp_path):
    status = JobStatus(facts_of_launch("job", "pod", "collective", tmp_path, 3))
    status.waiting(3, 4, ["10.0.0.7"])
    assert status_fields(status.fields()).activity == CurrentActivity("3 of 4 nodes, waiting for 10.0.0.7")
    status.waiting(1, 4, ["a", "b", "c"])
    assert status_fields(status.fields()).activity == CurrentActivity("1 of 4 nodes, waiting for a, b ...")
    status.waiting(1, 4, [])
    assert status_fields(status.fields()).activity == CurrentActivity("1 of 4 nodes, waiting for more")


def test_what_takes_long():
    activity = {"what": "saving", "done": 1, "of": 2}
    facts = status_fields(status(containers=[{"step": 4, "loss": 0.5, "rate": 9.0, "activity": activity}]))
    assert (facts.step, facts.loss, facts.rate, facts.activity) == (
        4,
        0.5,
        9.0,
        CurrentActivity("saving", 1, 2),
    )


def test_how_many_are_up():
    facts = status_fields(
        status(containers=[{}, {"pid": None}, {"role": "ps"}, {"role": "evaluator", "pid": None}])
    )
    assert facts.up == (("trainer", 1, 2), ("ps", 1, 1), ("evaluator", 0, 1))


def test_step_and_loss_are_of_the_first_trainer_that_reports():
    facts = status_fields(
        status(containers=[{"role": "ps", "step": 9}, {}, {"step": 5, "loss": 0.5}, {"step": 6}])
    )
    assert (facts.step, facts.loss) == (5, 0.5)


def test_the_rate_is_that_of_all_trainers():
    assert status_fields(status(containers=[{"rate": 2.0}, {}, {"rate": 3.0}])).rate == 5.0
    assert status_fields(status(containers=[{}])).rate is None


def test_a_trainers_word_about_what_takes_long_comes_first():
    loading = {"what": "loading", "done": None, "of": None}
    saving = {"what": "saving", "done": 1, "of": 2}
    both = [{"role": "ps", "activity": loading}, {"activity": saving}]
    assert status_fields(status(containers=both)).activity == CurrentActivity("saving", 1, 2)
    assert status_fields(status(containers=both[:1])).activity == CurrentActivity("loading")


def test_states_that_are_not_the_usual_have_a_word():
    words = [
        status_fields(status(state=state)).state
        for state in ("running", "restarting", "ending", "leaving", "?")
    ]
    assert words == ["", "restarting", "ending", "leaving", ""]
