"""From a failure and what has been spent to a decision."""

from functools import partial

import pytest

from fleetrun.pod.policy import (
    NOTHING_SPENT,
    Budget,
    Fault,
    GiveUp,
    Restart,
    Spent,
    error_at,
    is_symptom,
    may_be_machine,
    suspicion,
)
from fleetrun.pod.process import Exit

BUDGET = Budget(3)


def fault(code=1, time=100.0, **more):
    return Fault(exit=Exit(code), time=time, **more)


def spent(restarts, **more):
    return Spent((0.0,) * restarts, **more)


def after(budget, *faults):
    """What is spent when all of them have led to a restart."""
    found = NOTHING_SPENT
    for each in faults:
        found = budget.after(each, found)
    return found


@pytest.mark.parametrize(
    ("code", "restarts", "decision"),
    [
        (1, 0, Restart(0.0, 1, 3)),
        (1, 1, Restart(0.5, 2, 3)),
        (1, 2, Restart(1.0, 3, 3)),
        (1, 3, GiveUp("--max_restart is 3")),
        (1, 4, GiveUp("--max_restart is 3")),
        (0, 0, Restart(0.0, 1, 3)),
        (-9, 0, Restart(0.0, 1, 3)),
        (-2, 0, Restart(0.0, 1, 3)),
        (143, 2, Restart(1.0, 3, 3)),
        (2, 0, GiveUp("exit code 2: a restart will not help")),
        (126, 1, GiveUp("exit code 126: a restart will not help")),
        (127, 0, GiveUp("exit code 127: a restart will not help")),
    ],
)
def test_decisions(code, restarts, decision):
    assert BUDGET.decide(fault(code), spent(restarts)) == decision


def test_restarts_can_be_off():
    assert Budget(0).decide(fault(step=9), NOTHING_SPENT) == GiveUp("restarts are off (--max_restart 0)")


def test_the_wait_doubles_up_to_the_longest():
    budget = Budget(1000)
    waits = [budget.decide(fault(), spent(restarts)).after for restarts in range(10)]
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert budget.decide(fault(), spent(999)).after == 30.0


def test_even_a_million_restarts_have_a_wait():
    assert Budget(1_000_000).decide(fault(), spent(999_999)).after == 30.0


# ---- progress


def test_restarts_after_progress_do_not_count():
    used = after(BUDGET, *(fault(step=100 * number) for number in range(1, 50)))
    assert BUDGET.decide(fault(step=5000), used) == Restart(0.0, 1, 3, step=5000)
    assert len(used.times) == 1, "a job of a year has no longer record"


def test_an_attempt_that_came_no_further_counts():
    used = after(BUDGET, fault(step=100), fault(step=80), fault(step=100))
    assert len(used.times) == 3
    assert BUDGET.decide(fault(step=100), used) == GiveUp("--max_restart is 3")
    assert BUDGET.decide(fault(), used) == GiveUp("--max_restart is 3")
    assert BUDGET.decide(fault(step=101), used) == Restart(0.0, 1, 3, step=101)


# ---- --restart_window


def test_restarts_before_the_window_do_not_count():
    budget = Budget(2, window=60.0)
    used = after(budget, fault(time=100.0), fault(time=130.0))
    assert budget.decide(fault(time=159.0), used) == GiveUp("--max_restart is 2 in --restart_window 60 s")
    assert budget.decide(fault(time=165.0), used) == Restart(0.5, 2, 2)
    assert budget.decide(fault(time=195.0), used) == Restart(0.0, 1, 2)


# ---- what a restart cannot help


@pytest.mark.parametrize("kind", ["SyntaxError", "IndentationError", "ModuleNotFoundError", "ImportError"])
def test_mistakes_before_the_first_step(kind):
    reason = GiveUp(f"{kind} before the first step: a restart will not help")
    assert BUDGET.decide(fault(kind=kind), NOTHING_SPENT) == reason
    assert BUDGET.decide(fault(kind=kind), spent(1)) == reason


def test_the_same_later_may_be_the_file_system():
    for case in (
        (fault(kind="ImportError"), spent(1, step=9)),
        (fault(kind="ImportError", step=9), spent(0)),
    ):
        assert isinstance(BUDGET.decide(*case), Restart)


TRACE = "Traceback...\n  File 'train.py', line 3, in <module>\nValueError: bad <Batch at 0x7f{0}>"


def error(step=7, code=1, message="ValueError: bad", trace=TRACE):
    return error_at(step, Exit(code), message, trace)


def test_the_same_error_at_the_same_step_twice():
    assert error() == error(trace=TRACE.replace("0x7f", "0x81")) != ""
    used = after(BUDGET, fault(step=7, error=error()))
    decision = BUDGET.decide(fault(step=7, error=error()), used)
    assert decision == GiveUp("the same error twice after step 7: a restart will not help")


@pytest.mark.parametrize("trace", [TRACE, TRACE.replace("ValueError", "RuntimeError")])
def test_a_script_that_fails_alike_before_any_step(trace):
    """The mistake of a beginner, which would be shown four times."""
    again = fault(time=110.0, error=error(step=None, message=trace.rpartition("\n")[2], trace=trace))
    decision = BUDGET.decide(again, after(BUDGET, fault(time=100.0, error=again.error)))
    assert decision == GiveUp("the same error twice: a restart will not help")


MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {0} MiB",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:{0}] DefaultCPUAllocator: can't allocate memory",
    "numpy._core._exceptions._ArrayMemoryError: Unable to allocate {0} GiB for an array",
    "MemoryError",
)


@pytest.mark.parametrize("message", MEMORY)
@pytest.mark.parametrize("step", [None, 7])
def test_memory_that_is_not_enough_twice(message, step):
    """How much was free, and so the message, differs."""
    errors = {
        error(step, message=text, trace=TRACE.replace("ValueError: bad", text))
        for text in (message.format(20), message.format(31))
    }
    assert len(errors) == 1
    again = fault(time=110.0, step=step, error=errors.pop())
    decision = BUDGET.decide(again, after(BUDGET, fault(time=100.0, step=step, error=again.error)))
    assert isinstance(decision, GiveUp)
    assert decision.reason.startswith("the same error twice")


@pytest.mark.parametrize("message", ["OSError: busy", "RuntimeError: CUDA error: busy", "KeyError"])
def test_where_no_step_is_known_what_may_pass_is_tried_again(message):
    """A device that is not free yet, or an error that comes after hours."""
    late = 10_000.0 if message == "KeyError" else 110.0
    again = fault(time=late, error=error(step=None, message=message))
    assert isinstance(BUDGET.decide(again, after(BUDGET, fault(time=100.0, error=again.error))), Restart)


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("urllib.error.HTTPError: HTTP Error 503: Service Unavailable", True),
        ("requests.exceptions.ConnectionError: HTTPSConnectionPool(host='h', port=443)", True),
        ("OSError: [Errno 116] Stale file handle: '/data/x'", True),
        ("RuntimeError: the server answered 429 Too Many Requests", True),
        ("ssl.SSLEOFError: EOF occurred in violation of protocol", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x'", False),
        ("IndexError: index 503 is out of range", False),
        ("ValueError: 500 is not a label", False),
    ],
)
def test_an_outage_of_a_service_is_not_the_same_error_twice(message, passes):
    again = fault(step=7, error=error(message=message))
    decision = BUDGET.decide(again, after(BUDGET, again))
    assert isinstance(decision, Restart if passes else GiveUp)


@pytest.mark.parametrize(
    ("step", "second"),
    [
        (8, error()),
        (7, error(trace=TRACE.replace("line 3", "line 4"))),
        (None, error(step=None)),
        (7, error(trace="")),
    ],
    ids=["a later step", "elsewhere", "no step is known", "no error is known"],
)
def test_another_error(step, second):
    used = after(BUDGET, fault(step=7, error=error()))
    assert isinstance(BUDGET.decide(fault(step=step, error=second), used), Restart)
    assert isinstance(BUDGET.decide(fault(step=7), after(BUDGET, fault(step=7))), Restart)


def test_the_same_error_as_many_steps_further_each_time_is_no_progress():
    """A trainer of a parameter server counts on, and fails where its script did: it would never end."""
    error_at_step = partial(fault, error=error(), counts_on=True)
    first, second = error_at_step(step=5), error_at_step(step=10)
    used = after(BUDGET, first)
    assert isinstance(BUDGET.decide(second, used), Restart)
    used = BUDGET.after(second, used)
    assert BUDGET.decide(error_at_step(step=15), used) == GiveUp(
        "the same error again 5 steps further, as before: a restart will not help"
    )
    other = error(trace=TRACE.replace("line 3", "line 4"))
    for later in (error_at_step(step=16), fault(step=15, error=other, counts_on=True)):
        assert isinstance(BUDGET.decide(later, used), Restart)


@pytest.mark.parametrize("saved", [(2,), (3,), (1, 2, 3)])
def test_as_many_steps_further_each_time_are_progress_if_a_checkpoint_was_made(saved: tuple[int, ...]):
    """A leak that ends each attempt after as many steps."""
    first, second, third = (
        fault(step=200 * number, error=error(), counts_on=number not in saved) for number in (1, 2, 3)
    )
    used = after(BUDGET, first, second)
    assert BUDGET.decide(third, used) == Restart(0.0, 1, 3, step=600)


def test_what_may_be_the_fault_of_another_is_no_such_error():
    assert error(message="RuntimeError: Connection reset by peer") == ""
    assert error(code=-6) == ""


def test_a_process_that_says_so():
    assert BUDGET.decide(fault(hopeless=True), NOTHING_SPENT) == GiveUp("a restart will not help")


@pytest.mark.parametrize(
    ("message", "symptom"),
    [
        ("RuntimeError: Timed out waiting 8000ms for send operation to complete", True),
        ("DistNetworkError: Connection reset by peer", True),
        ("ServerError: server 1 at 127.0.0.1:5 did not answer PULL within 60 s. See its log.", True),
        ("TrainerLostError: trainer 1 is lost", True),
        ("ServerError: server 0 refused PUSH (FAILED): the journal cannot be written", False),
        ("ValueError: bad input", False),
    ],
)
def test_which_errors_may_be_the_fault_of_another(message: str, symptom: bool):
    assert is_symptom(Exit(1), message) is symptom


@pytest.mark.parametrize(
    ("exit", "message", "blamed", "kind"),
    [
        (Exit(1), "ValueError: no", False, ""),
        (Exit(-15), "", False, ""),
        (Exit(-40), "", False, ""),
        (Exit(-9), "", True, "kill"),
        (Exit(-11), "", True, "crash"),
        (Exit(-7), "", True, ""),
        (Exit(-4), "", True, ""),
        (Exit(1), "RuntimeError: CUDA error: uncorrectable ECC error encountered", True, ""),
        (Exit(-9), "GPU has fallen off the bus", True, ""),
    ],
)
def test_which_ends_may_be_the_fault_of_the_machine(exit, message, blamed, kind):
    """Those with a kind may be a script's or a person's as well."""
    assert may_be_machine(exit, message) is blamed
    assert suspicion(exit, message) == kind
