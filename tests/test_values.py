"""What `values.frozen` makes is what the standard library's makes."""

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from fleetrun import values
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.frozen import frozen


@values.frozen(kw_only=True)
class Ours:
    """Of ours."""

    size: int
    name: str = "none"
    hidden: str = values.field(default="", repr=False)
    table: Mapping[str, int] = values.field(default_factory=dict, metadata={"of": "numbers"})

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size is {self.size}")

    @property
    def double(self) -> int:
        return 2 * self.size


@values.frozen
class Point:
    x: float
    y: float = 0.0


@frozen
class Theirs:
    x: float
    y: float = 0.0


def test_a_value_has_its_fields_and_defaults():
    ours = Ours(size=3, name="a")
    assert (ours.size, ours.name, ours.hidden, ours.table, ours.double) == (3, "a", "", {}, 6)
    assert ours.table is not Ours(size=3).table
    assert (Point(1), Point(1, y=2), Point(1, 2)) == (Point(1, 0.0), Point(1, 2), Point(x=1, y=2))
    assert repr(ours) == "Ours(size=3, name='a', table={})"
    assert not hasattr(ours, "__dict__")
    assert Ours.__doc__ == "Of ours."


def test_what_is_no_value_is_refused_at_once():
    with pytest.raises(ValueError, match="size is -1"):
        Ours(size=-1)
    with pytest.raises(ValueError, match="size is -2"):
        values.replace(Ours(size=1), size=-2)


@pytest.mark.parametrize(
    ("values", "named"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((1,), {"z": 2}), ((), {"y": 1}), ((), {"x": 1, "z": 2})],
)
@pytest.mark.parametrize("made", [Point, Theirs])
def test_wrong_fields_are_a_type_error(made, values, named):
    with pytest.raises(TypeError):
        made(*values, **named)


def test_fields_by_name_only():
    with pytest.raises(TypeError):
        Ours(3)  # type: ignore[misc]


def test_it_does_not_change():
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.z = 2  # type: ignore[attr-defined]
    assert values.replace(point, y=5) == Point(1, 5)
    with pytest.raises(TypeError):
        values.replace(point, z=5)  # type: ignore[call-arg]


def test_equality_is_of_all_fields_and_the_class():
    assert Point(1) == Point(1.0)
    assert Point(1) != Point(2)
    assert Point(1) != Theirs(1)
    assert Point(1) != SimpleNamespace(x=1, y=0.0)
    assert len({Point(1), Point(1), Point(2)}) == 2
    assert hash(Point(1, 2)) == hash(Theirs(1, 2))
    with pytest.raises(TypeError):
        hash(Ours(size=1))  # a dict in it


def test_the_standard_library_knows_it():
    ours = Ours(size=3)
    assert dataclasses.is_dataclass(ours)
    assert dataclasses.asdict(ours) == {"size": 3, "name": "none", "hidden": "", "table": {}}
    assert dataclasses.astuple(Point(1)) == (1, 0.0)
    assert dataclasses.replace(ours, name="b") == Ours(size=3, name="b")
    assert [each.name for each in dataclasses.fields(Ours)] == ["size", "name", "hidden", "table"]
    assert dataclasses.fields(Ours)[3].metadata == {"of": "numbers"}
    assert dataclasses.fields(Ours)[0].default is dataclasses.MISSING


def test_a_copy_is_equal():
    for value in (Ours(size=3, table={"a": 1}), Point(1), LaunchSettings(script="x.py")):
        for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert same == value


def test_it_can_be_matched():
    match Point(1, 2):
        case Point(1, y):
            assert y == 2
        case _:
            raise AssertionError("no match")
