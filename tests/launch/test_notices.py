"""Which machine of a job tells people what has happened, and in which form."""

import pytest

from fleetrun.elastic.rendezvous.records import Cause, CauseKind
from fleetrun.errors import RendezvousError, StoreLostError
from fleetrun.launcher.nodes import notifies_for_job
from fleetrun.launcher.notices import for_slack

FAILED, LEFT, LOST = CauseKind.FAILED, CauseKind.LEFT, CauseKind.LOST


@pytest.mark.parametrize(
    ("why", "rank", "error", "served", "machine"),
    [
        (None, -1, None, True, 0),
        (FAILED, 0, None, True, 0),
        (FAILED, 3, None, True, 0),
        (LEFT, 0, None, True, 0),
        (LOST, 2, None, True, 0),
        (LOST, 0, None, True, 1),
        (LOST, -1, None, True, 0),
        (None, -1, StoreLostError("gone"), True, 1),
        (None, -1, StoreLostError("gone"), False, 0),
        (None, -1, RendezvousError("late"), True, 0),
    ],
)
def test_one_machine_tells(why, rank, error, served, machine):
    cause = None if why is None else Cause(why=why, node="h", rank=rank)
    found = [each for each in range(-1, 4) if notifies_for_job(each, cause, error, served=served)]
    assert found == [machine]


def test_text_for_slack_has_no_markup():
    assert for_slack("<!channel> a & b") == "&lt;!channel&gt; a &amp; b"
