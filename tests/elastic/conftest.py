"""Loops for stores, and a real etcd for those that want one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.etcd import Etcd, etcd_cluster


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One for all tests that leave it alive; their jobs have ids of their own."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as (member,):
        yield member
