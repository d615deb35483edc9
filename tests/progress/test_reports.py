"""What counts as a report, and what does not."""

import json
import math

import pytest

from fleetrun.envs.channels import LARGEST_DATAGRAM
from fleetrun.progress.reports import Activity, Report, read_report

MARK = "zhcwta.trainer.3"


def said(**fields: object) -> bytes:
    return json.dumps({"mark": MARK, **fields}).encode()


def test_everything_that_can_be_said():
    report = read_report(
        said(
            step=12,
            samples=384,
            loss=0.5,
            values={"lr": 0.1, "auc": 1},
            activity={"what": "loading tables", "done": 3, "of": 10},
            time=1e9,
        ),
        received=7.0,
    )
    assert report == Report(
        pod="zhcwta", role="trainer", rank=3, step=12, samples=384, loss=0.5, values={"lr": 0.1, "auc": 1.0},
        activity=Activity("loading tables", 3, 10), received=7.0, time=1e9,
    )  # fmt: skip


def test_the_mark_alone_is_a_sign_of_life():
    assert read_report(said()) == Report(pod="zhcwta", role="trainer", rank=3)


@pytest.mark.parametrize(
    ("mark", "pod", "role", "rank"),
    [("a.b.ps.0", "a.b", "ps", 0), ("p.heter.12", "p", "heter", 12), (".trainer.1", "", "trainer", 1)],
)
def test_a_pod_may_have_dots_in_its_name(mark, pod, role, rank):
    report = read_report(json.dumps({"mark": mark}).encode())
    assert report is not None
    assert (report.pod, report.role, report.rank) == (pod, role, rank)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -2.5, 0])
def test_a_loss_may_be_any_number(loss):
    report = read_report(said(loss=loss, values={"x": loss}))
    assert report is not None
    assert str(report.loss) == str(float(loss)) == str(report.values["x"])


@pytest.mark.parametrize(
    "fields",
    [
        {"step": -1}, {"step": 1.5}, {"step": True}, {"step": "1"}, {"step": 1 << 63}, {"step": [1]},
        {"samples": -5}, {"samples": {}}, {"samples": math.nan},
        {"loss": "0.5"}, {"loss": True}, {"loss": []}, {"loss": 10**400},
        {"values": []}, {"values": {"": 1}}, {"values": {"a": None}}, {"values": {"a": "1"}},
        {"values": {"a\x1b[2J": 1}}, {"values": {"a\nb": 1}}, {"values": {"x" * 101: 1}},
        {"values": {"\ud800": 1}}, {"values": {str(n): 1 for n in range(201)}},
        {"activity": "loading"}, {"activity": {}}, {"activity": {"what": 3}}, {"activity": {"what": ""}},
        {"activity": {"what": "\x1b]0;title\x07"}}, {"activity": {"what": "x" * 121}},
        {"activity": {"what": "x", "done": -1}}, {"activity": {"what": "x", "of": math.inf}},
        {"activity": {"what": "x", "done": math.nan}}, {"time": math.nan}, {"time": "now"},
        {"mark": None}, {"mark": 3}, {"mark": ""}, {"mark": "trainer.3"}, {"mark": "p.trainer.x"},
        {"mark": "p.trainer.-1"}, {"mark": "p.trainer.\u00b2"}, {"mark": "p.boss.1"}, {"mark": "p.trainer."},
    ],
)  # fmt: skip
def test_one_wrong_field_and_it_is_refused(fields):
    assert read_report(said(**fields)) is None


@pytest.mark.parametrize(
    "datagram",
    [
        b"", b"\0" * 100, b"\xff\xfe", b"{", b"[]", b"null", b"3", b'"x"', b'{"step": 1}', b"[" * 8000,
        b'{"mark":' * 1000, b'{"mark": "p.trainer.0", "step": ' + b"9" * 8000 + b"}",
        said(loss=0.5) + b" " * LARGEST_DATAGRAM, said() + said(),
        b'{"mark": "p.trainer.' + b"1" * 5000 + b'"}', b'{"mark": "p.trainer.1234567890"}',
    ],
    ids=range(16),
)  # fmt: skip
def test_garbage_is_refused(datagram):
    assert read_report(datagram) is None
