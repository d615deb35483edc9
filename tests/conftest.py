"""For all tests: how they share a machine."""

import os

import pytest

# One thread of computing in each process: several processes run at once, and threads that wait for each other
# in turn wait for the processors too. Before torch is imported, and for what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: at the end workers should not wait for one of them."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
