"""A machine without memory, for this process, without one."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_more_memory_than(size: int) -> Iterator[None]:
    """Refuse this process more than `size` bytes of address space beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
