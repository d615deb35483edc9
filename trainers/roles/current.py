"""Who this process is, for those that are called without a Fleet: what `fleet.init` found out, else what the
environment says.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from trainers.roles.environment import EnvironmentRoleMaker
from trainers.roles.identity import Identity

Source = Callable[[], Identity | None]

_sources: list[Source] = []


def ask_first(source: Source) -> Source | None:
    """From now on `source` is asked before the environment, and no longer the one that is given back. It
    answers None while it does not know.
    """
    former = _sources.pop() if _sources else None
    _sources.append(source)
    return former


def current_identity() -> Identity:
    """Raises UsageError as EnvironmentRoleMaker does."""
    found = _sources[0]() if _sources else None
    return EnvironmentRoleMaker(os.environ).identity() if found is None else found
