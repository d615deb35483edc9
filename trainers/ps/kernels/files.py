"""Reading records of a file by calls of the C library: many at once, and without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import types

from trainers.kernels.compiled import Keys, Scalar, compiled

_word = types.int64
_pread = cast(Callable[..., Any], types.ExternalFunction("pread", _word(types.int32, _word, _word, _word)))
_advise = cast(
    Callable[..., Any],
    types.ExternalFunction("posix_fadvise", types.int32(types.int32, _word, _word, types.int32)),
)
_WILLNEED = np.int32(3)
_PAGE = 4096


@compiled
def read_records(file: Scalar, places: Keys, order: Keys, size: Scalar, target: Scalar) -> int:
    """Read record number places[i] of a file, of `size` bytes, to the address target + i * size. `order`
    sorts the places. Returns how many were read, in that order, before one that could not be.

    All are requested before the first is awaited, so that the disk reads many at once.
    """
    requested = np.int64(-1)  # with a literal numba would compile the loop twice
    for i in order:
        start = places[i] * size
        first, last = max(start // _PAGE, requested + 1), (start + size - 1) // _PAGE
        if first <= last:
            _advise(np.int32(file), first * _PAGE, (last - first + 1) * _PAGE, _WILLNEED)
            requested = last
    done = np.int64(0)
    for i in order:
        if _pread(np.int32(file), target + i * size, size, places[i] * size) != size:
            break
        done += 1
    return int(done)
