"""Generated clicks: repeatable, as described, and the same as arrays and as files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainers.data.click_files import write_slots, write_tsv
from trainers.data.clicks import MISSING, SLOTS, ClickModel, Clicks, feature_signs, scaled
from trainers.errors import UsageError
from trainers.examples.criteo_reader import category_id

SMALL = ClickModel(vocabularies=(50,) * SLOTS)


@pytest.fixture(scope="module")
def clicks() -> Clicks:
    return ClickModel().draw(20_000, seed=3)


def test_equal_seeds_give_equal_rows_of_one_truth():
    first, again, other = SMALL.draw(3000, 1), SMALL.draw(3000, 1), SMALL.draw(3000, 2)
    for name in ("counts", "categories", "ids", "labels", "probability"):
        assert np.array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(getattr(first, name), getattr(other, name))
    assert set(first.ids[:, 4]) == set(other.ids[:, 4]), "the same categories, drawn again"
    truth = replace(SMALL, seed=8).draw(3000, 1)
    assert not np.array_equal(truth.labels, first.labels)


@pytest.mark.slow
def test_nobody_beats_the_best(clicks: Clicks):
    """The probability is calibrated and says all that can be said: a hint that is wrong loses."""
    best = clicks.best()
    assert 0.78 < best.auc < 0.85
    assert 0.4 < best.log_loss < 0.6
    for low, high in ((0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9)):
        inside = (clicks.probability > low) & (clicks.probability < high)
        gap = clicks.labels[inside].mean() - clicks.probability[inside].mean()
        assert abs(gap) < 4 * np.sqrt(0.25 / inside.sum())
    noise = np.random.default_rng(0).normal(0, 0.1, len(clicks))
    blurred = replace(clicks, probability=np.clip(clicks.probability + noise, 0.01, 0.99)).best()
    assert blurred.auc < best.auc
    assert blurred.log_loss > best.log_loss


@pytest.mark.slow
def test_ids_weigh_the_same_wherever_they_are_drawn():
    """Two draws agree on what an id means: with ids alone to go by, one's click rates tell the other's."""
    model = replace(SMALL, signal=2.0, missing=0.0, bias=0.0)
    first, second = model.draw(20_000, 1), model.draw(20_000, 2)
    rates = [
        [
            split.labels[split.ids[:, slot] == key].mean()
            for slot in range(SLOTS)
            for key in np.unique(first.ids[:, slot])[:20]
        ]
        for split in (first, second)
    ]
    assert np.corrcoef(rates)[0, 1] > 0.6


def test_the_distributions_are_those_described(clicks: Clicks):
    missing = clicks.ids == 0
    assert 0.02 < missing.mean() < 0.04
    assert 0.02 < (clicks.counts == MISSING).mean() < 0.04
    assert clicks.ids.min() == 0
    assert clicks.dense.min() == 0
    assert clicks.dense.max() == 1
    assert np.all(clicks.dense[clicks.counts == MISSING] == 0)
    _, counts = np.unique(clicks.ids[~missing[:, 2], 2], return_counts=True)
    shares = np.sort(counts)[::-1] / counts.sum()
    expected = np.arange(1, 1_000_001) ** -1.1
    assert shares[:5] == pytest.approx(expected[:5] / expected.sum(), rel=0.15)


@pytest.mark.slow
def test_slots_share_no_id_and_ranks_no_category():
    ids = [set(SMALL.draw(2000, 0).ids[:, slot]) - {0} for slot in range(SLOTS)]
    assert all(len(each) == 50 for each in ids)
    assert len(set().union(*ids)) == 50 * SLOTS
    everything = np.arange(300_000, dtype=np.uint32)
    assert len(np.unique(feature_signs(3, everything))) == len(everything)


def test_the_tensors_are_what_a_model_takes():
    ids, dense, labels = SMALL.draw(7, 0).tensors()
    assert (ids.shape, dense.shape, labels.shape) == ((7, 26), (7, 13), (7,))
    assert [str(each.dtype) for each in (ids, dense, labels)] == [
        "torch.int64",
        "torch.float32",
        "torch.float32",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5, 8195])
def test_slot_files_say_what_the_arrays_say(tmp_path: Path, rows: int):
    clicks = SMALL.draw(rows, 0)
    ids = clicks.ids.copy()
    ids[0, :6] = [0, 7, 10_000, 9_999, 2**63 - 1, 100_010_000]  # zeros inside and in front of four digits
    paths = [tmp_path / "a", tmp_path / "b"]
    write_slots(replace(clicks, ids=ids), paths)
    lines = [line.split(" ") for path in paths for line in path.read_text().splitlines()]
    assert [len(line) for line in lines] == [14 + 2 * SLOTS + 2] * rows
    table = np.array(lines)
    assert set(table[:, 0]) == {"13"}
    assert set(table[:, 14::2].ravel()) == {"1"}
    assert np.array_equal(table[:, 1:14].astype(np.float32), clicks.dense)
    assert np.array_equal(table[:, 15:-1:2].astype(np.int64), ids)
    assert np.array_equal(table[:, -1].astype(np.float32), clicks.labels)
    assert paths[0].read_bytes().count(b"\n") == rows // 2


def test_tsv_files_say_what_the_arrays_say(tmp_path: Path):
    clicks = SMALL.draw(300, 0)
    write_tsv(clicks, [tmp_path / "all"])
    lines = [line.split("\t") for line in (tmp_path / "all").read_text().splitlines()]
    assert [len(line) for line in lines] == [1 + 13 + SLOTS] * 300
    counts = np.array([[int(word) if word else MISSING for word in line[1:14]] for line in lines])
    assert np.array_equal(counts, clicks.counts)
    assert np.array_equal(scaled(counts.astype(np.int32)), clicks.dense)
    assert [line[0] for line in lines] == [f"{label:.0f}" for label in clicks.labels]
    for slot in range(SLOTS):
        words = [line[14 + slot] for line in lines]
        assert all(len(word) in (0, 8) for word in words)
        assert [category_id(slot, word) for word in words] == clicks.ids[:, slot].tolist()


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="26 vocabularies"):
        ClickModel(vocabularies=(3, 4))
    with pytest.raises(UsageError, match="missing is 1"):
        ClickModel(missing=1)
    with pytest.raises(UsageError, match="rows=0"):
        SMALL.draw(0, 1)
