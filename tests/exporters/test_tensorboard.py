"""TensorBoard's event files of all processes."""

import errno
from pathlib import Path

import pytest

from fleetrun.exporters.job_state import MOST_NAMES
from fleetrun.exporters.tensorboard import LOSS, RATE, ChangedScalars, EventFiles
from tests.exporters.messages import pod, report, started

# ---- Whose numbers go into which file, and what is said when they cannot.


class File:
    """Keeps what is written; fails while `full`."""

    full = False

    def __init__(self, folder):
        self.folder = folder
        self.points = []
        self.scalars = []
        self.closed = self.deleted = False

    def write(self, step, scalars, wall, *, restart):
        if File.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.points.append((step, wall, restart))
        self.scalars.append(scalars)

    def close(self):
        self.closed = True


class Made:
    def __init__(self, monkeypatch, make=None):
        self.files = []
        self.warnings = []
        monkeypatch.setattr("fleetrun.exporters.tensorboard.EventFile", make or self._make)
        self.event_files = EventFiles(Path("/runs"), self.warnings.append)

    def _make(self, folder):
        self.files.append(File(folder))
        return self.files[-1]

    def take(self, *lines, now=50_000.0):
        for line in lines:
            self.event_files.take(line, now)


@pytest.fixture
def made(monkeypatch):
    File.full = False
    return Made(monkeypatch)


def test_each_process_has_a_folder_by_its_rank_once_it_reports(made):
    made.take(pod(4, 5), started("trainer.0"), started("trainer.1"), report("trainer.1", step=1, loss=1.0))
    assert [file.folder for file in made.files] == [Path("/runs/trainer.5")]
    made.take(report("trainer.0", step=1, loss=1.0), report("trainer.1", step=2, loss=1.0))
    assert [file.folder.name for file in made.files] == ["trainer.5", "trainer.4"]


def test_tables_of_a_server_are_written_once_a_minute_and_at_the_end(made):
    def said(step, **numbers):
        return report(
            server={"step": step}, tables={"user": {"pulled_keys_s": 8, "missed_keys_s": 2, **numbers}}
        )

    made.take(pod(), started(), said(1, rows=1), now=100.0)
    made.take(said(2, rows=2), report(tables={"item": {"rows": 5}}, server={"step": 2}), now=130.0)
    made.take(said(3, rows=3), now=160.0)
    made.take(said(4, rows=4), now=170.0)
    (file,) = made.files
    assert file.points == [(1, 100.0, True), (3, 160.0, False)]
    assert file.scalars[1] == {"tables/user/rows": 3, "tables/user/miss_ratio": 0.25, "tables/item/rows": 5}
    made.event_files.close()
    assert (file.points[2], file.scalars[2]["tables/user/rows"]) == ((4, 170.0, False), 4)


def test_after_a_restart_the_tables_of_a_server_begin_anew(made):
    made.take(pod(), started(), report(server={"step": 9}, tables={"user": {"rows": 1}}), now=100.0)
    made.take(started(attempt=1), report(server={"step": 7}, tables={"item": {"rows": 2}}), now=110.0)
    (file,) = made.files
    assert file.points == [(9, 100.0, True), (7, 110.0, True)]
    assert file.scalars[1] == {"tables/item/rows": 2}


def test_of_very_many_tables_the_first_ones_are_written(made):
    tables = {f"t{number}": {"rows": number} for number in range(150)}
    made.take(pod(), started(), report(server={"step": 1}, tables=tables))
    assert len(made.files[0].scalars[0]) == 100


def test_after_a_restart_the_file_is_the_same_and_begins_anew(made):
    made.take(pod(), started(), report(step=1, loss=1.0), report(step=2, loss=1.0))
    made.take(started(attempt=1), report(step=1, loss=1.0), report(step=2, loss=1.0))
    (file,) = made.files
    assert [(step, restart) for step, _, restart in file.points] == [
        (1, True),
        (2, False),
        (1, True),
        (2, False),
    ]


@pytest.mark.parametrize(
    ("said", "written"),
    [(49_990.5, 49_990.5), (None, 50_000), (0.0, 50_000), (1e300, 50_000), (54_000.0, 50_000)],
)
def test_the_time_is_the_process_own_unless_its_clock_is_far_off(made, said, written):
    made.take(pod(), report(step=1, loss=1.0, time=said))
    assert made.files[0].points[0][1] == written


def test_a_full_disk_is_told_once_and_what_fits_later_is_written(made):
    made.take(pod())
    File.full = True
    made.take(*(report(step=step, loss=1.0) for step in (1, 2, 3)))
    File.full = False
    made.take(report(step=4, loss=1.0))
    (warning,) = made.warnings
    assert "/runs" in warning
    assert "No space left on device" in warning
    assert [step for step, *_ in made.files[0].points] == [4]


def test_a_folder_that_cannot_be_made_is_told_once_and_tried_again(monkeypatch):
    def make(folder):
        if tries:
            raise tries.pop()
        return File(folder)

    tries = [PermissionError(errno.EACCES, "Permission denied") for _ in range(2)]
    made = Made(monkeypatch, make)
    made.take(pod(), *(report(step=step, loss=1.0) for step in (1, 2, 3)))
    (warning,) = made.warnings
    assert "/runs" in warning
    assert "Permission denied" in warning
    assert not tries


def test_a_file_that_was_deleted_is_told_once_and_another_goes_on(made):
    made.take(pod(4, 5), report("trainer.0", step=1, loss=1.0), report("trainer.1", step=1, loss=1.0))
    for file in made.files:
        file.deleted = True
    for step in (2, 3):
        made.take(report("trainer.0", step=step, loss=1.0), report("trainer.1", step=step, loss=1.0))
    (warning,) = made.warnings
    assert "/runs were deleted" in warning
    assert [file.closed for file in made.files] == [True, True, False, False]
    assert [[step for step, *_ in file.points] for file in made.files[2:]] == [[2, 3], [2, 3]]


def test_too_many_names_are_told_once(made):
    names = {f"n{number}": 1.0 for number in range(MOST_NAMES + 1)}
    made.take(pod(), report(step=1, values=names), report(step=2, values=names))
    (warning,) = made.warnings
    assert "trainer.0 reports more than 200" in warning


def test_strangers_have_no_file(made):
    made.take(report(step=1, loss=1.0), pod(), report("../../etc", step=1, loss=1.0))
    assert made.files == []


def test_closing_closes_all(made):
    made.take(pod(), report("trainer.0", step=1, loss=1.0), report("trainer.1", step=1, loss=1.0))
    made.event_files.close()
    assert [file.closed for file in made.files] == [True, True]


# ---- Which numbers of a report belong into an event file.


def points(scalars, *reports):
    return [scalars.take(each) for each in reports]


def test_everything_that_is_a_number_at_its_step():
    (point,) = points(ChangedScalars(), report(step=7, loss=0.5, values={"lr": 0.1}, rate=100.0))
    assert point.step == 7
    assert point.scalars == {LOSS: 0.5, RATE: 100.0, "lr": 0.1}


def test_a_number_is_written_once_for_a_step_unless_it_changes():
    said = [
        report(step=1, loss=0.5, values={"lr": 0.1}),
        report(step=1, loss=0.5, values={"lr": 0.1}),
        report(step=1, loss=0.5, values={"lr": 0.2}),
        report(step=2, loss=0.5, values={"lr": 0.2}),
    ]
    assert [point and point.scalars for point in points(ChangedScalars(), *said)] == [
        {LOSS: 0.5, "lr": 0.1},
        None,
        {"lr": 0.2},
        {LOSS: 0.5, "lr": 0.2},
    ]


def test_the_pace_is_written_once_for_a_step():
    said = [report(step=1, rate=5.0), report(step=1, rate=4.0), report(step=2, rate=3.0)]
    assert [point and point.scalars for point in points(ChangedScalars(), *said)] == [
        {RATE: 5.0},
        None,
        {RATE: 3.0},
    ]


def test_reports_without_a_step_are_counted():
    found = points(ChangedScalars(), report(values={"a": 1.0}), report(values={"a": 2.0}))
    assert [point.step for point in found] == [1, 2]


def test_a_sign_of_life_is_no_point():
    assert points(ChangedScalars(), report(), report(step=3)) == [None, None]


def test_the_first_of_each_attempt_begins_anew():
    scalars = ChangedScalars()
    said = [report(step=step, loss=1.0) for step in (5, 6)]
    assert [point.restart for point in points(scalars, *said)] == [True, False]
    scalars.restart()
    assert [(point.restart, point.step) for point in points(scalars, *said)] == [(True, 5), (False, 6)]


def test_names_are_bounded_and_those_that_came_first_stay():
    scalars = ChangedScalars()
    points(scalars, report(step=1, loss=0.1, rate=1.0, values={"first": 1.0}))
    assert not scalars.refused
    (point,) = points(scalars, report(step=2, loss=0.1, values={f"n{n}": 1.0 for n in range(MOST_NAMES)}))
    assert len(point.scalars) == MOST_NAMES - 1 + 1, "and the loss"
    assert scalars.refused
    (point,) = points(scalars, report(step=3, values={"first": 2.0, "another": 1.0}))
    assert point.scalars == {"first": 2.0}


def test_a_loss_that_is_no_number_is_written():
    (point,) = points(ChangedScalars(), report(step=1, loss=float("nan")))
    assert point.scalars[LOSS] != point.scalars[LOSS]
