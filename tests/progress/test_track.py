"""What counts as a report, and what does not."""

import json
import math

import pytest

from fleetrun.envs.channels import LARGEST_DATAGRAM
from fleetrun.envs.progress_report import Activity, Report, encode_reports, read_report
from fleetrun.progress.track import Track, json_number

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
            saved=True,
            server={"log_bytes": 7},
            tables={"user": {"rows": 3, "pulls_s": 0.5}},
            hot={"user": {"17": 0.5}},
            time=1e9,
        ),
        received=7.0,
    )
    assert report == Report(
        pod="zhcwta", role="trainer", rank=3, step=12, samples=384, loss=0.5, values={"lr": 0.1, "auc": 1.0},
        activity=Activity("loading tables", 3, 10), saved=True, server={"log_bytes": 7},
        tables={"user": {"rows": 3, "pulls_s": 0.5}}, hot={"user": {"17": 0.5}}, received=7.0, time=1e9,
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
        {"tables": []}, {"tables": {"t": 1}}, {"tables": {"t": {"rows": "1"}}}, {"tables": {"a\n": {}}},
        {"tables": {"x" * 201: {}}}, {"server": [1]}, {"server": {"step": None}},
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


def test_tables_come_in_several_datagrams_and_keep_their_last_numbers():
    many = {f"t{number}": {"rows": number, "bytes": 1.5} for number in range(500)}
    datagrams = list(encode_reports({"mark": MARK, "server": {"step": 3}}, many, "tables"))
    assert len(datagrams) > 1
    track = Track()
    for each in datagrams:
        report = read_report(each)
        assert report is not None
        track.take(report)
    latest = read_report(said(tables={"t7": {"rows": 70}}))
    assert latest is not None
    track.take(latest)
    assert track.latest is not None
    assert track.latest.tables == {**many, "t7": {"rows": 70}}
    assert track.latest.server == {"step": 3}
    assert track.unnoted


# ---- The pace of a process, and what of it goes into the record.


def report(at: float, **fields: object) -> Report:
    return Report(pod="p", role="trainer", rank=3, received=at, **fields)  # type: ignore[arg-type]


def tracked(*points: tuple[float, int]) -> Track:
    track = Track()
    for at, samples in points:
        track.take(report(at, samples=samples))
    return track


STEADY = [(0.5 * n, 50 * n) for n in range(100)]  # 100 a second


@pytest.mark.parametrize(
    ("points", "now", "rate"),
    [
        ([], 0.0, None),
        ([(1.0, 32)], 1.0, None),
        ([(1.0, 32), (2.0, 64)], 2.0, 32.0),
        (STEADY, 49.5, 100.0),
        ([*STEADY, (59.5, 4950)], 59.5, 0.0),  # of the last ten seconds only
        ([(0.0, 0), (30.0, 60), (60.0, 180)], 60.0, 4.0),  # slower steps than ten seconds
        ([(0.0, 0), (30.0, 60)], 119.0, 2.0),
        ([(0.0, 0), (30.0, 60)], 121.0, None),  # three times as long as a step takes: it is stuck
        (STEADY, 59.6, None),
        ([*STEADY, (50.0, 10), (51.0, 30)], 51.0, 20.0),  # a process that counts anew
        ([(5.0, 10), (5.0, 20)], 5.0, None),
        ([(4.0, 10), (5.0, 20), (5.0, 30)], 5.0, 20.0),
    ],
)
def test_the_pace_is_of_the_last_ten_seconds(points, now, rate):
    found = tracked(*points).rate(now)
    assert found == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        # received, by its own clock, samples
        ([(3.0, 100.0, 0), (3.0, 101.0, 32), (3.1, 102.0, 64)], 32.0),  # read late, all at once
        ([(3.0, 100.0, 0), (4.0, 100.0, 32)], 32.0),
        ([(3.0, 100.0, 0), (4.0, 40.0, 32)], 32.0),  # its clock was set back
        ([(3.0, None, 0), (4.0, 102.0, 32)], 32.0),
        ([(3.0, 100.0, 0), (3.0, 100.0, 32)], None),
    ],
)
def test_a_launcher_that_reads_late_makes_no_process_quicker(points, rate):
    track = Track()
    for received, sent, samples in points:
        track.take(report(received, time=sent, samples=samples))
    assert track.rate(5.0) == rate


@pytest.mark.parametrize(
    ("points", "now", "seconds"),
    [
        ([], 0.0, None),
        ([(1.0, 3)], 1.0, None),
        ([(1.0, 3), (1.5, 4)], 1.5, 0.5),
        ([(0.0, 1), (30.0, 2)], 40.0, 30.0),
        ([(0.0, 1), (30.0, 2)], 121.0, None),  # it is stuck
        ([(0.0, 10), (1.0, 20), (2.0, 1), (2.5, 2)], 2.5, 0.5),  # a process that begins anew
        ([(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 2)], 3.0, 3.0),  # told several times in a step
    ],
)
def test_how_long_a_step_takes(points, now, seconds):
    track = Track()
    for at, step in points:
        track.take(report(at, step=step))
    assert track.step_seconds(now) == seconds


def test_the_time_that_is_left_is_that_of_the_steps_that_are_left():
    track = Track()
    track.take(report(100.0, step=10, of=110))
    assert track.left(100.0) is None, "no step has been timed"
    track.take(report(120.0, step=20))
    assert track.left(120.0) == pytest.approx(180)
    track.take(report(125.0, loss=0.5))
    assert track.left(125.0) == pytest.approx(175), "it counts down between steps"
    assert track.left(999.0) == 0
    track.take(report(1000.0, step=5))
    assert track.left(1000.0) is None, "the script counts from the start again"
    assert tracked((0.0, 1)).left(1.0) is None


def test_the_average_is_over_all_reports():
    assert tracked((0.0, 0), (1.0, 10), (100.0, 1000)).average == 10
    assert tracked((0.0, 5000), (10.0, 0), (12.0, 100)).average == 50, "a new process counts from 0"
    assert tracked((0.0, 5)).average is None
    assert Track().average is None


def test_the_pace_of_all_steps():
    track = Track()
    assert track.pace is None
    for seconds, step in ((10.0, 3), (11.0, 4), (14.0, 9)):
        track.take(Report(pod="p", role="trainer", rank=0, step=step, received=seconds))
        assert track.pace == (None if step == 3 else pytest.approx((seconds - 10) / (step - 3)))


def test_points_do_not_add_up_for_ever():
    track = tracked(*((n / 1000, n) for n in range(10_000)))
    assert len(track._points) < 200
    assert track.rate(10.0) == pytest.approx(1000)


def test_what_a_report_leaves_out_is_as_it_was():
    track = Track()
    track.take(report(1.0, step=5, loss=0.5, samples=40, values={"lr": 0.1, "auc": 0.7}))
    track.take(report(2.0, step=6, values={"lr": 0.2}, activity=Activity("saving")))
    assert track.latest == report(
        2.0, step=6, loss=0.5, samples=40, values={"lr": 0.2, "auc": 0.7}, activity=Activity("saving")
    )
    track.take(report(3.0))
    assert track.latest is not None
    assert track.latest.activity is None, "which is said each time"


def test_only_so_many_names_are_remembered():
    track = Track()
    for number in range(500):
        track.take(report(number, values={f"loss of example {number}": 1.0, "lr": float(number)}))
    assert track.latest is not None
    assert len(track.latest.values) == 200
    assert track.latest.values["lr"] == 499.0


def notes(track: Track, reports: list[Report]) -> list[float]:
    """When something was noted."""
    times = []
    for each in reports:
        track.take(each)
        if track.due:
            track.note(each.received)
            times.append(each.received)
    return times


def test_the_record_gets_the_first_and_then_one_a_second():
    assert notes(Track(), [report(n / 4, step=n) for n in range(2, 20)]) == [0.5, 1.5, 2.5, 3.5, 4.5]


def test_and_after_a_minute_fewer_and_after_an_hour_one_a_minute():
    times = notes(Track(), [report(float(n), step=n) for n in range(5000)])
    assert times[:64] == [*range(61), 62, 64, 66]
    assert [time for time in times if 600 <= time < 630] == [605, 616, 627]
    assert times[-3:] == [4868, 4928, 4988]


def test_signs_of_life_and_activities_are_not_for_the_record():
    track = Track()
    assert (
        notes(track, [report(0.0), report(1.0, activity=Activity("loading")), report(2.0, samples=0)]) == []
    )
    assert not track.unnoted
    assert notes(track, [report(3.0, step=1)]) == [3.0]


def test_of_tables_the_record_gets_what_is_drawn_of_the_largest():
    track = Track()
    tables = {f"t{number}": {"rows": number, "bytes": 1} for number in range(52)}
    assert notes(track, [report(1.0, tables=tables)]) == [1.0]
    said = track.note(1.0)["tables"]
    assert (len(said), said["t51"], "t1" in said, "t2" in said) == (50, {"rows": 51}, False, True)


def test_a_note_says_all_that_is_known_in_plain_numbers():
    track = Track()
    track.take(report(0.0, step=1, samples=32, values={"lr": math.nan, "x": 2.0}))
    track.take(report(1.0, step=2, samples=64, loss=-math.inf))
    track.take(report(2.0, activity=Activity("loading")))
    assert track.note(2.5) == {
        "rank": 3, "step": 2, "samples": 64, "loss": "-inf", "values": {"lr": "nan", "x": 2.0}, "rate": 32.0,
        "age": 1.5,
    }  # fmt: skip
    assert not track.unnoted


@pytest.mark.parametrize("number", [0.0, -1.5, 1e300, math.inf, -math.inf, math.nan])
def test_numbers_that_json_lacks_can_be_read_again(number):
    text = json_number(number)
    assert text is not None
    assert str(float(text)) == str(number)
