"""Something that takes long and is no step: a load, a save, a wait. Knows how far it is; leaves telling to
the meter.
"""

from __future__ import annotations

from numbers import Integral, Real
from types import TracebackType
from typing import Any, Protocol

from trainers.progress.wire import LONGEST_WHAT, shown


class Teller(Protocol):
    """Who is told that an activity begins, gets on, and is over."""

    def begins(self, activity: Activity) -> None: ...
    def gets_on(self) -> None: ...
    def is_over(self, activity: Activity) -> None: ...


class Activity:
    """`with activity("loading tables", of=10) as loading: ... loading.advance()`"""

    def __init__(self, teller: Teller, what: str, of: float | None = None) -> None:
        self.what = shown(what, LONGEST_WHAT)
        self.of = of
        self.done: float | None = None if of is None else 0
        self.told = False
        """Whether the launcher has heard of it."""
        self._teller = teller

    def advance(self, parts: float = 1) -> None:
        """So many parts more are done."""
        self.at((self.done or 0) + parts)

    def at(self, done: float) -> None:
        """So many parts are done."""
        self.done = done
        self._teller.gets_on()

    def fields(self) -> dict[str, Any]:
        """As a report says it."""
        return {"what": self.what, "done": _counted(self.done), "of": _counted(self.of)}

    def __enter__(self) -> Activity:
        self._teller.begins(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._teller.is_over(self)


def _counted(number: object) -> float | None:
    """None for what is no number of parts. NumPy's numbers are some, which JSON does not know."""
    if not isinstance(number, Real):
        return None
    try:
        amount = float(number)
    except OverflowError:
        return None
    if not 0 <= amount < 1e18:
        return None
    return int(amount) if isinstance(number, Integral) else amount
