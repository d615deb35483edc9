"""Provide `@frozen` for the value classes of every launch, without compiling code.

The standard library compiles six functions for each class, and imports `inspect`, `ast` and `tokenize` to do
so. For the classes of a launch, this took a third of all import time. Type checkers see the standard
library's decorator. The standard library's `replace`, `fields`, `asdict` and `is_dataclass` accept these
classes too. Creating an instance takes a few microseconds longer. In code that no launch loads, use
`fleetrun.frozen`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fleetrun.aliases import Document, Fields, Strings

if TYPE_CHECKING:
    from dataclasses import field as field
    from dataclasses import replace as replace

    from fleetrun.frozen import frozen as frozen
    from fleetrun.frozen import frozen_by_name as frozen_by_name
else:

    def frozen(cls=None, *, kw_only=False):
        """Decorate a class like `fleetrun.frozen`."""
        return _made(cls, kw_only) if cls else lambda each: _made(each, kw_only)

    def frozen_by_name(cls):
        """Decorate a class whose fields are passed by name."""
        return _made(cls, True)

    def field(**arguments):
        """Declare `default`, `default_factory`, `repr` and `metadata` of a field, as in the standard
        library.
        """
        return _FieldArguments(arguments)

    def replace(value, /, **changes):
        """Return a copy with these fields changed."""
        return type(value)(**({name: getattr(value, name) for name in value.__slots__} | changes))


def field_arguments(cls: type[Any]) -> Mapping[str, Fields]:
    """Return the fields of such a class, each with its arguments of `field`."""
    arguments: Mapping[str, Fields] = cls._field_arguments
    return arguments


class _FieldArguments(Document):
    pass


def _made(cls: type[Any], kw_only: bool) -> type[Any]:
    assert cls.__bases__ == (object,), "no inheritance"
    names = tuple(cls.__annotations__)
    body = {name: each for name, each in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    arguments: dict[str, _FieldArguments] = {}
    for name in names:
        default = body.pop(name, _FieldArguments())  # a class attribute would conflict with the slot
        arguments[name] = (
            default if isinstance(default, _FieldArguments) else _FieldArguments(default=default)
        )
    body |= {"__slots__": names, "__match_args__": () if kw_only else names, "__qualname__": cls.__qualname__}
    made: Any = type(cls.__name__, (_Value,), body)
    made._field_arguments = arguments
    made._defaults = {name: each["default"] for name, each in arguments.items() if "default" in each}
    made._factories = {
        name: each["default_factory"] for name, each in arguments.items() if "default_factory" in each
    }
    made._setters = {name: made.__dict__[name].__set__ for name in names}
    return made  # type: ignore[no-any-return]


class _StandardFields:
    """`__dataclass_fields__`, which marks a dataclass for the standard library. Made on first access."""

    def __get__(self, value: object, cls: Any) -> Any:
        from dataclasses import field, make_dataclass  # late: launches work without it

        arguments = [
            (name, cls.__annotations__[name], field(**words)) for name, words in cls._field_arguments.items()
        ]
        twin: Any = make_dataclass(cls.__name__, arguments, kw_only=True)
        cls.__dataclass_fields__ = twin.__dataclass_fields__
        return twin.__dataclass_fields__


class _Value:
    """The base of all value classes."""

    __slots__ = ()
    __dataclass_fields__ = _StandardFields()
    _field_arguments: ClassVar[Mapping[str, _FieldArguments]]
    _defaults: ClassVar[Fields]
    _factories: ClassVar[Mapping[str, Callable[[], object]]]
    _setters: ClassVar[Mapping[str, Callable[[object, object], None]]]

    def __init__(self, *values: Any, **named: Any) -> None:
        if values:
            named = self._with(values, named)
        setters = self._setters
        if len(named) < len(setters):
            made = {name: make() for name, make in self._factories.items() if name not in named}
            named = {**self._defaults, **made, **named}
        if named.keys() != setters.keys():
            wrong = sorted(named.keys() ^ setters.keys())
            raise TypeError(f"{type(self).__name__}: missing or unexpected: {', '.join(wrong)}")
        for name, set_field in setters.items():
            set_field(self, named[name])
        self.__post_init__()

    def _with(self, values: Sequence[object], named: Document) -> Document:
        names: Strings = self.__match_args__  # type: ignore[attr-defined]
        if len(values) > len(names) or not named.keys().isdisjoint(names[: len(values)]):
            raise TypeError(f"{type(self).__name__}: too many values")
        return {**dict(zip(names, values, strict=False)), **named}

    def __post_init__(self) -> None:
        pass

    def __getstate__(self) -> tuple[object, ...]:
        return tuple([getattr(self, name) for name in self._setters])

    def __setstate__(self, state: tuple[object, ...]) -> None:
        for set_field, value in zip(self._setters.values(), state, strict=True):
            set_field(self, value)

    def __eq__(self, other: object) -> Any:
        if type(other) is not type(self):
            return NotImplemented
        return self.__getstate__() == other.__getstate__()

    def __hash__(self) -> int:
        return hash(self.__getstate__())

    def __repr__(self) -> str:
        shown = [name for name, arguments in self._field_arguments.items() if arguments.get("repr", True)]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def __setattr__(self, name: str, value: object) -> None:
        raise _frozen(name)

    def __delattr__(self, name: str) -> None:
        raise _frozen(name)


def _frozen(name: str) -> Exception:
    from dataclasses import FrozenInstanceError

    return FrozenInstanceError(f"cannot assign to field {name!r}")
