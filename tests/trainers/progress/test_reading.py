"""Numbers out of what a script has."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch

from trainers.progress.reading import Reader, kept, whole


class Stranger(torch.Tensor):
    """A tensor of another kind, whose value may be a matter of all ranks."""


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5), (3, 3.0), (True, 1.0), ("0.5", 0.5), (np.float32(0.5), 0.5), (np.array([2]), 2.0),
        (np.array(2.0), 2.0), (torch.tensor(0.5), 0.5), (torch.tensor([[0.5]]), 0.5),
        (torch.tensor(3, dtype=torch.int64), 3.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        (torch.tensor(math.inf), math.inf), (torch.nn.Parameter(torch.tensor(0.5)), 0.5),
        (torch.ones(2), None), (torch.ones(0), None), (torch.tensor(1j), None), (np.ones(2), None),
        (torch.empty((), device="meta"), None), (None, None), ("much", None), (10**400, None),
        (torch.tensor(0.5).as_subclass(Stranger), None),
    ],
)  # fmt: skip
def test_one_number_or_none(value, number):
    given = {"x": value}
    assert Reader().read(given) == ({} if number is None else {"x": number})
    assert not given


@pytest.mark.parametrize(
    ("value", "count"),
    [(3, 3), (3.0, 3), (np.int64(3), 3), (np.array([3]), 3), (torch.tensor(3), 3), ("3", 3),
     (-1, None), (1 << 62, None),
     (math.nan, None), (math.inf, None), (None, None), ([], None), (torch.ones(2), None)],
)  # fmt: skip
def test_counts(value, count):
    assert whole(value) == count


def test_a_loss_is_kept_without_what_it_was_computed_from():
    weight = torch.nn.Parameter(torch.ones(3))
    hidden = weight * 2
    loss = kept(hidden.sum())
    alive = weakref.ref(hidden)
    del hidden
    gc.collect()
    assert alive() is None
    assert not loss.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_on_a_device_comes_with_a_later_report():
    reader = Reader()
    given = {"x": torch.tensor(0.5, device="cuda"), "y": 1.0}
    assert reader.read(given) == {"y": 1.0}
    assert reader.waits
    torch.cuda.synchronize()
    given = {"x": torch.tensor(0.25, device="cuda")}
    assert reader.read(given) == {"x": 0.5}
    torch.cuda.synchronize()
    assert reader.read({}) == {"x": 0.25}
    assert not reader.waits


class Device:
    """Stands in for CUDA: a copy is there when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_a_copy_that_is_under_way_is_not_waited_for():
    reader, event = Reader(), Device()
    reader._waiting = [("x", torch.tensor(0.5), event)]
    assert reader.read({"y": 1}) == {"y": 1.0}
    assert reader.waits
    event.done = True
    assert reader.read({"x": 0.25}) == {"x": 0.5}
    assert not reader.waits


def test_nobody_asks_a_device_while_a_graph_is_made(monkeypatch):
    class Captured(Device):
        def query(self) -> bool:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    reader = Reader()
    reader._waiting = [("x", torch.tensor(0.5), Captured())]
    assert reader.read({"y": 1}) == {"y": 1.0}
    assert reader.waits, "it comes after the graph"


def test_what_another_thread_says_meanwhile_is_left_for_the_next_time():
    reader, given = Reader(), {"x": 0.5}
    reader._send_for(given)
    assert given == {"x": 0.5}
    assert not reader.waits
