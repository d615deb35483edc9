"""The launcher reads every report that a process writes."""

import json
import math

import pytest

from fleetrun.envs import progress_report
from fleetrun.envs.channels import LARGEST_DATAGRAM, LONGEST_NAME
from fleetrun.envs.progress_report import encode_reports, valid_name
from trainers.progress.meter import Activity

SAID = {"mark": "p.trainer.0", "step": 1 << 60, "samples": 1 << 60, "loss": math.nan, "time": 1e9}


class Nobody:
    """Whom an activity tells."""

    def begins(self, activity): ...
    def gets_on(self): ...
    def is_over(self, activity): ...


@pytest.mark.parametrize("letter", ["x", "ü", "\u6e2f", "\U0001f600", '"', "\\", "\x1b", "\ud800"])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_however_long_names_are_all_values_arrive(letter, count):
    values = {valid_name(f"{number}{letter * 200}", LONGEST_NAME): number * 1.5 for number in range(count)}
    sent = list(encode_reports(SAID, values))
    assert all(len(each) <= LARGEST_DATAGRAM for each in sent)
    read = [progress_report.read_report(each) for each in sent]
    assert all(report is not None and report.step == 1 << 60 for report in read)
    assert {name: value for report in read for name, value in report.values.items()} == values


@pytest.mark.parametrize("what", ["", "x" * 500, "\x1b[31mred", "a\nb", 3, None])
def test_every_activity_can_be_told(what):
    fields = Activity(Nobody(), what, of=1e30).fields()
    report = progress_report.read_report(json.dumps({"mark": "p.trainer.0", "activity": fields}).encode())
    assert report is not None
    assert report.activity is not None
