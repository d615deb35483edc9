"""Numbers out of what a script has."""

import gc
import math
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainers.progress.values import Accelerator, Reader, kept, whole


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


@pytest.mark.slow
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
    assert whole(torch.tensor(3, device="cuda")) is None, "that would have to be waited for"


class Device:
    """What a tensor is on, and the event after which its copy is there: when the test says so."""

    def __init__(self, taken: bool = True) -> None:
        self.taken = taken
        self.done = self.captured = False

    def capturing(self) -> bool:
        return self.captured

    def fetch(self, tensor):
        if not self.taken:
            raise RuntimeError("the device has no events")
        return tensor.clone(), self

    def query(self) -> bool:
        if self.captured:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.done


ON_DEVICE = torch.tensor(0.5)
ELSEWHERE = torch.tensor(0.25)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def reader(device):
    """`ON_DEVICE` is on that device, `ELSEWHERE` on one of which nobody can tell when a copy is there."""
    others = Device(taken=False)
    return Reader(lambda value: device if value is ON_DEVICE else others if value is ELSEWHERE else None)


def test_a_copy_that_is_under_way_is_not_waited_for(reader, device):
    assert reader.read({"x": ON_DEVICE}) == {}
    given = {"x": ON_DEVICE, "y": 1}
    assert reader.read(given) == {"y": 1.0}
    assert reader.waits
    assert list(given) == ["x"], "it waits for its turn"
    device.done = True
    assert reader.read({"x": 0.25}) == {"x": 0.5}
    assert not reader.waits


def test_what_cannot_be_fetched_is_left_out_and_the_rest_comes(reader, device):
    given = {"a": ELSEWHERE, "x": ON_DEVICE, "b": ELSEWHERE}
    assert reader.read(given) == {}
    assert not given
    device.done = True
    assert reader.read({}) == {"x": 0.5}


def test_nobody_asks_a_device_while_a_graph_is_made(reader, device):
    given = {"x": ON_DEVICE}
    reader.read(given)
    device.captured = True
    given = {"x": ON_DEVICE, "y": 1}
    assert reader.read(given) == {"y": 1.0}
    assert reader.waits, "it comes after the graph"
    assert list(given) == ["x"]


def test_into_a_graph_nothing_is_sent(reader, device):
    device.captured = True
    given = {"x": ON_DEVICE}
    assert reader.read(given) == {}
    assert list(given) == ["x"]
    assert not reader.waits


def test_what_another_thread_says_meanwhile_is_left_for_the_next_time():
    reader, given = Reader(), {"x": 0.5}
    reader._send_for(given)
    assert given == {"x": 0.5}
    assert not reader.waits


class Module:
    """As `torch.xpu`: streams, events, graphs."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []
        self.started = self.captured = False

    def is_initialized(self):
        return self.started

    def is_current_stream_capturing(self):
        assert self.started, "that would have started it"
        return self.captured

    def current_stream(self, device):
        return f"stream of {device}"

    def Event(self):
        return SimpleNamespace(record=lambda *stream: self.events.append(stream))


class Memory(Accelerator):
    """Its memory needs no device."""

    @staticmethod
    def memory(tensor):
        return torch.empty((), dtype=tensor.dtype)


def test_a_device_is_known_by_its_module():
    module = Module()
    device = Memory(module)
    assert not device.capturing()
    copy, _ = device.fetch(torch.tensor([0.5], dtype=torch.bfloat16))
    assert float(copy) == 0.5
    assert module.events == [("stream of cpu",)]
    module.started = True
    assert not device.capturing()
    module.captured = True
    assert device.capturing()


def test_a_device_with_one_stream_and_one_without_events():
    said: list[tuple[object, ...]] = []
    module = SimpleNamespace(Event=lambda: SimpleNamespace(record=lambda *stream: said.append(stream)))
    assert not Memory(module).capturing()
    Memory(module).fetch(torch.tensor(0.5))
    assert said == [()]
    for none in (None, SimpleNamespace()):
        assert not Memory(none).capturing()
        with pytest.raises(RuntimeError, match="no events"):
            Memory(none).fetch(torch.tensor(0.5))
