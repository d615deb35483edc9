"""The warning that ranks wait for another: from a fake clock, and from findings that the test makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fleetrun.envs.contract import Role
from fleetrun.pod.container import Container
from fleetrun.pod.events import Ending, Findings, Late, Started, Verdict
from fleetrun.pod.hangs import FIRST_LOOK, LATENESS_PERIOD, AloneWatch, LateWatch, WaitWatch
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import ContainerSpec
from tests.support.pods import Clock


def waits(number: int, rank: int = 1) -> Findings:
    call = f"all_reduce #{number} of group 0"
    return Findings(verdict=Verdict(kind="not entered", sentence=call, ranks=(rank,), call=call))


class Place:
    """`findings` are what the looks find, one after the other; the last one again and again."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.findings: list[Findings] = []
        self.looks: list[float] = []
        self.warned: list[str] = []
        self.logs = [folder / f"{rank}.log" for rank in range(2)]
        for log in self.logs:
            log.touch()
        self.trainers = [
            Container(ContainerSpec(role=Role.TRAINER, rank=rank, index=rank, argv=("x",), env={}, log=log))
            for rank, log in enumerate(self.logs)
        ]
        self.busy = False
        self.watch = WaitWatch(
            self.loop,
            self._find,
            lambda verdict: self.warned.append(verdict.sentence),
            lambda container: self.busy,
        )

    def _find(self, containers: Sequence[Container], then: Callable[[Findings], None]) -> Callable[[], None]:
        self.looks.append(self.clock())
        found = self.findings.pop(0) if len(self.findings) > 1 else self.findings[0]
        return self.loop.after(0.0, lambda: then(found)).cancel

    def run(
        self,
        seconds: float,
        prints: Callable[[float], bool] = lambda left: False,
        who: tuple[int, ...] = (1,),
        rarely: tuple[int, int] = (0, 0),
    ) -> None:
        """So long, in steps of 5 seconds; those trainers print in those for which `prints` is true, and the
        first of `rarely` every so many seconds.
        """

        def tick(left: float) -> None:
            if left <= 0:
                self.loop.stop()
                return
            rank, every = rarely
            printing = [*(who if prints(left) else ()), *([rank] if every and left % every == 0 else ())]
            for each in printing:
                with self.logs[each].open("a") as log:
                    log.write("step\n")
            self.clock.advance(5.0)
            self.loop.after(0.0, lambda: tick(left - 5))

        self.loop.after(0.0, lambda: tick(seconds))
        self.loop.run()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    made.watch.handle(Started(made.trainers))
    yield made
    made.watch.close()
    made.loop.close()


@pytest.mark.parametrize("kind", ["mismatch", "deadlock", "transport"])
def test_a_verdict_on_no_single_call_is_told_once_too(place: Place, kind: str):
    place.findings = [Findings(verdict=Verdict(kind=kind, sentence="they differ", ranks=(0, 1)))]
    place.run(600)
    assert place.warned == ["they differ"]


def test_a_save_at_a_server_may_take_its_time(place: Place):
    place.findings = [Findings(verdict=Verdict(kind="server", sentence="it saves", ranks=()))]
    place.run(600)
    assert place.warned == []


def test_the_same_wait_in_two_looks_is_told_once(place: Place):
    place.findings = [waits(4)]
    place.run(20 * FIRST_LOOK)
    assert place.warned == ["all_reduce #4 of group 0"]


def test_another_wait_is_told_too(place: Place):
    place.findings = [waits(4), waits(4), waits(9), waits(9)]
    place.run(30 * FIRST_LOOK)
    assert place.warned == ["all_reduce #4 of group 0", "all_reduce #9 of group 0"]


def test_a_wait_for_a_rank_that_told_what_it_does_is_not_told(place: Place):
    """The first rank evaluates, and the others wait in a barrier."""
    place.findings = [waits(4)]
    place.busy = True
    place.run(10 * FIRST_LOOK)
    assert place.warned == []
    place.busy = False
    place.run(10 * FIRST_LOOK)
    assert place.warned == ["all_reduce #4 of group 0"]


def test_a_wait_like_one_before_is_not_told(place: Place):
    """After each epoch; one that is far longer is."""
    place.findings = [waits(4)]
    place.run(5 * FIRST_LOOK)
    place.run(5 * FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    place.findings = [waits(9)]
    place.run(5 * FIRST_LOOK)
    place.run(5 * FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    assert place.warned == ["all_reduce #4 of group 0"]
    place.findings = [waits(14)]
    place.run(40 * FIRST_LOOK)
    assert place.warned == ["all_reduce #4 of group 0", "all_reduce #14 of group 0"]


def test_a_job_that_goes_on_is_looked_at_less_and_less_and_never_warned_of(place: Place):
    """It prints rarely: at each look somebody waits, but in another collective, or for another rank."""
    place.findings = [found for number in range(100) for found in (waits(number), waits(number, rank=0))]
    place.run(10 * FIRST_LOOK)
    assert place.warned == []
    place.findings = [Findings()]
    place.looks.clear()
    place.run(50 * FIRST_LOOK)
    assert 3 <= len(place.looks) <= 10
    assert place.warned == []


def test_a_trainer_that_prints_is_not_looked_at(place: Place):
    place.findings = [waits(4)]
    place.run(10 * FIRST_LOOK, prints=lambda left: left % 20 == 0)
    assert (place.looks, place.warned) == ([], [])


def test_one_trainer_that_falls_silent_is_told_once(place: Place):
    place.findings = [Findings()]
    place.run(6 * FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    place.run(25 * FIRST_LOOK, prints=lambda left: True, who=(1,))
    assert len(place.warned) == 1
    assert place.warned[0].startswith("trainer 0 has printed and reported nothing for ")
    place.run(6 * FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    assert len(place.warned) == 1


def test_a_trainer_that_is_silent_because_it_waits_is_not_named(place: Place):
    place.findings = [waits(4)]
    place.run(6 * FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    place.run(50 * FIRST_LOOK, prints=lambda left: True, who=(1,))
    assert place.warned == ["all_reduce #4 of group 0"]


def test_a_trainer_that_reports_is_not_silent(place: Place):
    place.findings = [Findings()]
    name = place.trainers[0].spec.name
    place.run(6 * FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    for _ in range(50):
        place.watch.reported(name)
        place.run(FIRST_LOOK, prints=lambda left: True, who=(1,))
    assert place.warned == []


def test_a_trainer_that_told_what_it_does_may_be_silent(place: Place):
    """A checkpoint, an evaluation."""
    place.findings = [Findings()]
    place.busy = True
    place.run(6 * FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    place.run(25 * FIRST_LOOK, prints=lambda left: True, who=(1,))
    assert place.warned == []
    place.busy = False
    place.run(6 * FIRST_LOOK, prints=lambda left: True, who=(1,))
    assert len(place.warned) == 1


def test_a_trainer_that_was_once_silent_for_long_may_be_again(place: Place):
    """Of steps of four minutes."""
    place.findings = [Findings()]
    place.run(80 * FIRST_LOOK, prints=lambda left: True, who=(1,), rarely=(0, 240))
    place.run(60 * FIRST_LOOK, prints=lambda left: True, who=(1,))
    assert place.warned == []


def test_a_trainer_that_prints_only_at_the_start_is_not_expected_to(place: Place):
    place.findings = [Findings()]
    place.run(FIRST_LOOK, prints=lambda left: True, who=(0, 1))
    place.run(50 * FIRST_LOOK, prints=lambda left: True, who=(1,))
    assert place.warned == []


def test_not_while_the_job_is_stopped(place: Place):
    place.findings = [waits(4)]
    place.run(FIRST_LOOK)
    place.watch.handle(Ending("interrupted"))
    place.run(20 * FIRST_LOOK)
    assert (place.looks, place.warned) == ([], [])


# ---- A trainer that hangs alone, where --hang_timeout is given


class Alone(Place):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hung: list[tuple[str, float]] = []
        self.watch = AloneWatch(
            self.loop, 120.0, self._find, lambda each, quiet: self.hung.append((each.spec.name, quiet)),
            lambda container: self.busy,
        )  # fmt: skip
        self.watch.handle(Started(self.trainers))

    def falls_silent(self, *found: Findings) -> list[str]:
        """Trainer 0, when it had printed in each of 40 looks. Who hangs then, if looks find this."""
        self.findings = [*found]
        self.run(1200, prints=lambda left: True, who=(0, 1))
        assert self.looks == []
        self.run(1200, prints=lambda left: True, who=(1,))
        self.watch.close()
        self.loop.close()
        assert self.looks
        return [name for name, quiet in self.hung if quiet >= 120]


def stands(line: int) -> Findings:
    stack = [["/job/train.py", line, "main", ""]]
    return Findings(states=({"title": "trainer 0", "stack": stack, "probe": None},))


def test_one_that_stands_still_hangs(tmp_path: Path) -> None:
    assert Alone(tmp_path).falls_silent(stands(7)) == ["trainer.0"]


@pytest.mark.parametrize(("longest", "hangs"), [(100, True), (500, False)])
def test_three_times_its_longest_silence_is_enough(tmp_path: Path, longest: int, hangs: bool) -> None:
    """Of a trial that was slow to start, say."""
    alone = Alone(tmp_path)
    alone.findings = [stands(7)]
    alone.run(300, prints=lambda left: True, who=(0, 1))
    alone.run(longest, prints=lambda left: True, who=(1,))
    alone.run(100, prints=lambda left: True, who=(0, 1))
    alone.hung.clear()
    alone.run(900, prints=lambda left: True, who=(1,))
    alone.watch.close()
    alone.loop.close()
    assert bool(alone.hung) == hangs


def test_one_that_moves_does_not_hang(tmp_path: Path) -> None:
    assert Alone(tmp_path).falls_silent(*map(stands, range(100))) == []


def test_one_that_waits_for_others_does_not_hang(tmp_path: Path) -> None:
    assert Alone(tmp_path).falls_silent(replace(stands(7), waiting=frozenset({0}))) == []


def test_one_that_goes_on_after_three_looks_does_not_hang(tmp_path: Path) -> None:
    lines = [7, 7, 7, 8, 8, 8] * 10
    assert Alone(tmp_path).falls_silent(*map(stands, lines)) == []


# ---- Ranks that keep the others waiting


def late(*ranks: int) -> Findings:
    """The first of them is a straggler if there are any."""
    told = tuple(
        Late(rank=each, title=f"trainer {each}", node="", share=0.3, seconds=0.04, behind=90, of=100)
        for each in (*ranks, 7)
    )
    straggler = Verdict(kind="straggler", sentence=f"late: {ranks}", ranks=ranks) if ranks else None
    return Findings(late=told, straggler=straggler)


class Lockstep(Place):
    """The same with a watch for lateness."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.began = self.clock()
        self.told: list[int | None] = []
        self.late_watch = LateWatch(
            self.loop,
            self._find,
            lambda late: self.told.append(late[0].rank if late else None),
            lambda verdict: self.warned.append(verdict.sentence),
        )
        self.late_watch.handle(Started(containers=tuple(self.trainers)))

    def looked(self, *seconds: float) -> bool:
        """Whether it was looked after these seconds, give or take the test's own step."""
        return [each - self.began for each in self.looks] == pytest.approx(list(seconds), abs=30)


def test_a_straggler_is_told_once_when_it_was_late_in_five_looks(tmp_path: Path) -> None:
    """Whatever other ranks are late now and then."""
    place = Lockstep(tmp_path)
    place.findings = [late(1), late(0), *4 * [late(1)], late(1, 0), late(1), late(1)]
    place.run(12.5 * LATENESS_PERIOD)
    assert place.told[:3] == [1, 0, 1]
    assert place.warned == ["late: (1, 0)"]


def test_what_was_late_and_is_not_known_to_be_any_more_is_told(tmp_path: Path) -> None:
    place = Lockstep(tmp_path)
    place.findings = [late(1), Findings()]
    place.run(3.5 * LATENESS_PERIOD)
    assert place.told == [1, None]


def test_ranks_without_collectives_are_asked_less_and_less_often(tmp_path: Path) -> None:
    place = Lockstep(tmp_path)
    place.findings = [Findings()]
    place.run(1200.0)
    assert place.looked(60, 180, 420, 720, 1020)
    assert set(place.told) == {None}


def test_no_rank_is_asked_while_processes_are_being_stopped(tmp_path: Path) -> None:
    place = Lockstep(tmp_path)
    place.findings = [late(1)]
    place.late_watch.handle(Ending(reason="SIGTERM"))
    place.run(200.0)
    assert place.looks == []
    place.late_watch.handle(Started(containers=tuple(place.trainers)))
    place.run(130.0)
    assert place.looked(260, 320)
