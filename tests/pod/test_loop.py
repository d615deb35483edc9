"""One loop for everything: order, deadlines, and no wake-up without a cause."""

import os
import select

import pytest

from fleetrun.pod.loop import READ, WRITE, Loop
from fleetrun.pod.process import Process
from tests.support.pods import Clock


@pytest.fixture
def loop():
    made = Loop(Clock())
    yield made
    made.close()


@pytest.fixture
def pipes():
    made = []

    def make():
        made.append(os.pipe())
        return made[-1]

    yield make
    for pair in made:
        for fd in pair:
            os.close(fd)


def test_timers_fire_in_the_order_of_their_deadlines():
    now = [0.0]
    loop = Loop(lambda: now[0])
    fired = []
    loop.after(3.0, lambda: fired.append("third"))
    loop.after(1.0, lambda: fired.append("first"))
    loop.after(2.0, lambda: fired.append("second"))
    loop.after(4.0, loop.stop)
    now[0] = 5.0
    loop.run()
    loop.close()
    assert fired == ["first", "second", "third"]


def test_what_happened_before_a_deadline_comes_before_it(pipes):
    """Though a handler waited for a disk until the deadline had passed."""
    now = [0.0]
    loop = Loop(lambda: now[0])
    order = []
    (slow, told_slow), (event, told_event) = pipes(), pipes()
    loop.after(5.0, lambda: (order.append("deadline"), loop.stop()))

    def wait():
        loop.remove(slow)
        os.write(told_event, b"x")
        now[0] = 10.0

    loop.add(slow, wait)
    loop.add(event, lambda: (loop.remove(event), order.append("event")))
    os.write(told_slow, b"x")
    loop.run()
    loop.close()
    assert order == ["event", "deadline"]


def test_a_deadline_in_years_is_waited_for(loop):
    """epoll itself takes no more than 24 days."""
    reading, writing = os.pipe()
    loop.after(1e9, lambda: pytest.fail("too early"))
    loop.add(reading, loop.stop)
    os.write(writing, b"x")
    loop.run()
    loop.remove(reading)
    os.close(reading)
    os.close(writing)


def test_timers_of_one_moment_fire_in_the_order_in_which_they_were_set():
    now = [1.0]
    loop = Loop(lambda: now[0])
    fired = []
    for number in range(10):
        loop.after(0.0, lambda number=number: fired.append(number))
    loop.after(0.0, loop.stop)
    loop.run()
    loop.close()
    assert fired == list(range(10))


def test_a_timer_that_was_called_off_does_not_fire(loop):
    fired = []
    timer = loop.after(0.0, lambda: fired.append("no"))
    assert timer.pending
    timer.cancel()
    assert not timer.pending
    loop.after(0.001, loop.stop)
    loop.run()
    assert fired == []


def test_a_timer_may_call_off_another_of_the_same_moment(loop):
    fired = []
    loop.after(0.0, lambda: second.cancel())
    second = loop.after(0.0, lambda: fired.append("no"))
    loop.after(0.001, loop.stop)
    loop.run()
    assert fired == []


def test_a_timer_fires_once(loop):
    fired = []
    timer = loop.after(0.0, lambda: fired.append("once"))
    loop.after(0.001, loop.stop)
    loop.run()
    timer.fire()
    assert fired == ["once"]
    assert not timer.pending


def test_no_timer_fires_early(loop):
    set_at = loop.clock()
    fired = []
    loop.after(0.02, lambda: (fired.append(loop.clock() - set_at), loop.stop()))
    loop.run()
    assert fired[0] >= 0.02


def test_handlers_of_files(loop, pipes):
    read, write = pipes()
    got = []
    loop.add(read, lambda: (got.append(os.read(read, 10)), loop.stop()))
    loop.after(0.0, lambda: os.write(write, b"x"))
    loop.run()
    assert got == [b"x"]


def test_a_file_may_be_waited_for_until_it_takes_something(loop, pipes):
    _, write = pipes()
    loop.add(write, loop.stop, WRITE)
    loop.run()


def test_a_file_that_was_removed_is_silent(loop, pipes):
    read, write = pipes()
    other, told = pipes()
    os.write(write, b"x")
    loop.add(read, lambda: pytest.fail("it was removed"), READ)
    loop.remove(read)
    loop.remove(read)
    os.write(told, b"x")
    loop.add(other, loop.stop)
    loop.run()


def test_a_handler_may_remove_what_is_next_in_line(loop, pipes):
    (first, told_first), (second, told_second) = pipes(), pipes()
    loop.add(first, lambda: (loop.remove(first), loop.remove(second), loop.after(0.0, loop.stop)))
    loop.add(second, lambda: pytest.fail("it was removed"))
    os.write(told_first, b"x")
    os.write(told_second, b"x")
    loop.run()


def test_stopping_stops_at_once(loop, pipes):
    (first, told_first), (second, told_second) = pipes(), pipes()
    loop.add(first, loop.stop)
    loop.add(second, lambda: pytest.fail("the loop was stopped"))
    loop.after(0.0, lambda: pytest.fail("the loop was stopped"))
    os.write(told_first, b"x")
    os.write(told_second, b"x")
    loop.run()


def test_a_loop_can_go_on_after_a_stop(loop):
    fired = []
    loop.after(0.0, loop.stop)
    loop.run()
    loop.after(0.0, lambda: (fired.append(1), loop.stop()))
    loop.run()
    assert fired == [1]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_deaths_are_handled_in_the_order_in_which_they_happened(loop, order):
    """All have died before the loop looks; it must tell the first failure from its consequences."""
    output = os.open(os.devnull, os.O_WRONLY)
    children = [Process.spawn(("/bin/sleep", "100"), {}, output) for _ in order]
    os.close(output)
    handled = []

    def died(number):
        loop.remove(children[number].fileno())
        children[number].reap()
        handled.append(number)
        if len(handled) == len(children):
            loop.stop()

    for number, child in enumerate(children):
        loop.add(child.fileno(), lambda number=number: died(number))
    for number in order:
        children[number].signal_leader(9)
        assert select.select([children[number]], [], [], 60.0)[0]
    loop.run()
    assert handled == list(order)


def test_deadlines_wait_while_the_job_stands_still():
    now = [0.0]
    loop = Loop(lambda: now[0])
    fired = []
    loop.after(5.0, lambda: (fired.append(now[0]), loop.stop()))
    now[0] = 100.0  # continued after a long Ctrl-Z
    loop.postpone(98.0)
    loop.after(0.0, lambda: now.__setitem__(0, 103.0))
    loop.run()
    loop.close()
    assert fired == [103.0]
