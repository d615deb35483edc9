"""The way between two machines in a check before a start."""

from __future__ import annotations

import threading

from fleetrun.doctor.check import _serve, _visit, fastest
from fleetrun.doctor.node_records import Link
from tests.support.ports import free_port


def test_a_moment_in_which_a_machine_is_busy_does_not_make_its_way_slow():
    busy, free = Link(there=1e8, back=9e9), Link(there=4e9, back=3e9)
    assert fastest([busy, free, busy]) == 3e9
    assert fastest([busy]) == 1e8


def test_both_ends_measure_as_often():
    address = ("127.0.0.1", free_port())
    server = threading.Thread(target=_serve, args=(address, "ticket", lambda: None))
    server.start()
    assert _visit(address, "ticket", lambda: None) > 0
    server.join(60)
    assert not server.is_alive()
