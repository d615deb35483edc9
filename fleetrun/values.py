"""`@dataclass(frozen=True, slots=True)` for the values of every launch, without compiling anything.

The standard library's compiles six functions for each class, and imports `inspect`, `ast` and `tokenize` to
do so: for the classes of a launch that was a third of all its imports. Type checkers see the standard
library's, and its `replace`, `fields`, `asdict` and `is_dataclass` know these classes too. An instance takes
a few microseconds more to make; where no launch comes by, use the standard library's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:

    def dataclass(*, frozen, slots, kw_only=False):
        """The decorator. There are no others than frozen ones with slots."""
        assert (frozen, slots) == (True, True)
        return lambda cls: _made(cls, kw_only)

    def field(**said):
        """`default`, `default_factory`, `repr` and `metadata`, as there."""
        return _Said(said)

    def replace(value, /, **changes):
        """The same but for these fields."""
        return type(value)(**({name: getattr(value, name) for name in value.__slots__} | changes))


def field_arguments(cls: type[Any]) -> Mapping[str, Mapping[str, Any]]:
    """The fields of such a class, each with the words that `field` got."""
    said: Mapping[str, Mapping[str, Any]] = cls._said
    return said


class _Said(dict[str, Any]):
    pass


def _made(cls: type[Any], kw_only: bool) -> type[Any]:
    assert cls.__bases__ == (object,), "these classes have no others above them"
    names = tuple(cls.__annotations__)
    body = {name: each for name, each in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    said: dict[str, _Said] = {}
    for name in names:
        default = body.pop(name, _Said())  # it would stand where the slot does
        said[name] = default if isinstance(default, _Said) else _Said(default=default)
    body |= {"__slots__": names, "__match_args__": () if kw_only else names, "__qualname__": cls.__qualname__}
    made: Any = type(cls.__name__, (_Value,), body)
    made._said = said
    made._defaults = {name: each["default"] for name, each in said.items() if "default" in each}
    made._factories = {
        name: each["default_factory"] for name, each in said.items() if "default_factory" in each
    }
    made._puts = {name: made.__dict__[name].__set__ for name in names}
    return made  # type: ignore[no-any-return]


class _Asked:
    """`__dataclass_fields__`, by which the standard library knows its classes; made when it asks."""

    def __get__(self, value: object, cls: Any) -> Any:
        from dataclasses import field, make_dataclass  # late: it is what launches do without

        said = [(name, cls.__annotations__[name], field(**words)) for name, words in cls._said.items()]
        twin: Any = make_dataclass(cls.__name__, said, kw_only=True)
        cls.__dataclass_fields__ = twin.__dataclass_fields__
        return twin.__dataclass_fields__


class _Value:
    """What all of these classes have in common."""

    __slots__ = ()
    __dataclass_fields__ = _Asked()
    _said: ClassVar[Mapping[str, _Said]]
    _defaults: ClassVar[Mapping[str, Any]]
    _factories: ClassVar[Mapping[str, Callable[[], Any]]]
    _puts: ClassVar[Mapping[str, Callable[[object, Any], None]]]

    def __init__(self, *values: Any, **named: Any) -> None:
        if values:
            named = self._with(values, named)
        puts = self._puts
        if len(named) < len(puts):
            made = {name: make() for name, make in self._factories.items() if name not in named}
            named = {**self._defaults, **made, **named}
        if named.keys() != puts.keys():
            wrong = sorted(named.keys() ^ puts.keys())
            raise TypeError(f"{type(self).__name__}: missing or unexpected: {', '.join(wrong)}")
        for name, put in puts.items():
            put(self, named[name])
        self.__post_init__()

    def _with(self, values: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        names: tuple[str, ...] = self.__match_args__  # type: ignore[attr-defined]
        if len(values) > len(names) or not named.keys().isdisjoint(names[: len(values)]):
            raise TypeError(f"{type(self).__name__}: too many values")
        return {**dict(zip(names, values, strict=False)), **named}

    def __post_init__(self) -> None:
        pass

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple([getattr(self, name) for name in self._puts])

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for put, value in zip(self._puts.values(), state, strict=True):
            put(self, value)

    def __eq__(self, other: object) -> Any:
        if type(other) is not type(self):
            return NotImplemented
        return self.__getstate__() == other.__getstate__()

    def __hash__(self) -> int:
        return hash(self.__getstate__())

    def __repr__(self) -> str:
        shown = [name for name, said in self._said.items() if said.get("repr", True)]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise _frozen(name)

    def __delattr__(self, name: str) -> None:
        raise _frozen(name)


def _frozen(name: str) -> Exception:
    from dataclasses import FrozenInstanceError

    return FrozenInstanceError(f"cannot assign to field {name!r}")
