"""Where a supervisor stands between the start of its pod and its end. A value."""

from enum import Enum, auto


class Phase(Enum):
    WATCHING = auto()
    LEAVING = auto()
    RESTARTING = auto()
    ENDING = auto()
