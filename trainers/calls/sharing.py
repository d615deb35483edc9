"""The fleet API's calls by which trainers tell each other something: `fleet.util` and `fleet.metrics`."""

from __future__ import annotations

import functools

from trainers.calls.begun import Begun
from trainers.calls.metrics import DistributedMetrics
from trainers.calls.util import Util


class Sharing(Begun):
    """Both are there before `init`, and raise UsageError until then."""

    @functools.cached_property
    def util(self) -> Util:
        return Util(self._who, self._ready)

    @functools.cached_property
    def metrics(self) -> DistributedMetrics:
        return DistributedMetrics(self.util)
