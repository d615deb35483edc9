"""Event files as TensorBoard itself reads them."""

import logging
import math
from pathlib import Path

import pytest

from tests.support.disks import no_file_longer_than

pytestmark = pytest.mark.slow  # TensorBoard is imported


@pytest.fixture
def make(tmp_path):
    from fleetrun.exporters.tensorboard import EventFile

    made = []

    def one(folder="trainer.0"):
        made.append(EventFile(tmp_path / "runs" / folder))
        return made[-1]

    yield one
    for each in made:
        each.close()


def read(file):
    """Scalars by tag: step, value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    found = EventAccumulator(str(file.path.parent), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_numbers_are_there_as_soon_as_they_are_written(make):
    file = make()
    file.write(1, {"loss": 0.5, "lr": 0.25}, 100.0, restart=True)
    file.write(2, {"loss": 0.125}, 101.0, restart=False)
    assert read(file) == {"loss": [(1, 0.5), (2, 0.125)], "lr": [(1, 0.25)]}


def test_odd_numbers_and_names(make):
    file = make()
    file.write(2**62, {"损失/一": math.inf, "huge": 1e300, "nan": math.nan}, 100.0, restart=True)
    found = read(file)
    assert found["损失/一"] == [(2**62, math.inf)]
    assert found["huge"] == [(2**62, math.inf)], "a float of 32 bits"
    assert math.isnan(found["nan"][0][1])


def test_another_attempt_takes_back_the_steps_that_it_does_again(make):
    file = make()
    for step in (1, 2, 3, 4):
        file.write(step, {"loss": 1.0}, 100.0 + step, restart=step == 1)
    for step in (3, 4, 5):
        file.write(step, {"loss": 2.0}, 200.0 + step, restart=step == 3)
    assert read(file)["loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_a_full_disk_tears_no_record(make):
    """What fits again later is read."""
    file = make()
    file.write(1, {"loss": 1.0}, 100.0, restart=True)
    size = file.path.stat().st_size
    with no_file_longer_than(size + 10):
        for _ in range(2):
            with pytest.raises(OSError, match=r"No space left|File too large"):
                file.write(2, {"loss": 2.0}, 101.0, restart=False)
    assert file.path.stat().st_size == size
    file.write(3, {"loss": 3.0}, 102.0, restart=False)
    assert read(file)["loss"] == [(1, 1.0), (3, 3.0)]


def test_one_that_cannot_begin_leaves_nothing_open_and_nothing_behind(make, tmp_path):
    """A disk stays full for hours, and a report comes twice a second."""
    before = {each.name for each in Path("/proc/self/fd").iterdir()}
    with no_file_longer_than(0):
        for _ in range(3):
            with pytest.raises(OSError, match=r"No space left|File too large"):
                make()
    assert {each.name for each in Path("/proc/self/fd").iterdir()} <= before
    assert list((tmp_path / "runs" / "trainer.0").iterdir()) == []
    file = make()
    file.write(1, {"loss": 1.0}, 100.0, restart=True)
    assert read(file)["loss"] == [(1, 1.0)], "when there is room again"


def test_one_that_was_deleted_knows_it_and_one_that_was_moved_goes_on(make):
    file = make()
    folder = file.path.parent
    folder.rename(folder.with_name("moved"))
    assert not file.deleted
    (folder.with_name("moved") / file.path.name).unlink()
    assert file.deleted


def test_two_files_of_one_run_have_names_of_their_own(make):
    assert make().path != make().path


def test_a_file_in_the_place_of_the_folder_is_an_error(make, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "trainer.7").write_text("not a folder")
    with pytest.raises(OSError, match="File exists"):
        make("trainer.7")
