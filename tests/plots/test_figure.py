"""The picture of a record, as a file. What it looks like is for eyes; what it has to hold is tested here."""

import math
import os
import stat
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from fleetrun.commands.output import output_path
from fleetrun.errors import UsageError
from fleetrun.plots.figure import ENDINGS, draw, write_plot
from fleetrun.record.history import read
from tests.plots.record import (
    containers,
    course,
    event,
    exited,
    launch,
    over,
    progress,
    started,
    training,
    write,
)

pytestmark = pytest.mark.slow  # matplotlib is imported


def texts(tmp_path, events, *, job="ads", now=None):
    """What stands in the picture."""
    history = read(write(tmp_path / "log", events, job))
    to = tmp_path / "job.svg"
    write_plot(history, to, now)
    return [text.strip() for element in ET.parse(to).iter() for text in [element.text or ""] if text.strip()]


def test_a_job_with_everything(tmp_path):
    name = "trainer.0"
    said = [launch("ps.0", name), started(1, "ps.0"), started(1, name)]
    said += [progress(at, name, step=at, loss=1.0, rate=5.0) for at in (2, 3, 4)]
    said += [
        progress(5, name, step=5, loss="nan"),
        exited(6, name, 3),
        event(7, "restarting"),
        started(8, name, 1),
    ]
    said += [event(9, "hung"), exited(9, "ps.0", -15, 15), exited(9, name), over(10, 3, "trainer 0 failed")]
    found = texts(tmp_path, said)
    assert {
        "loss", "samples per second", "trainer 0", "server 0", "restart", "hang",
        "failed", "completed", "stopped by fleetrun", "ads  (abcdef)",
        "ps on node1  ·  1 restart  ·  exit code 3: trainer 0 failed",
    } <= set(found)  # fmt: skip
    assert any(text.startswith("seconds since 20") for text in found)


def test_a_job_that_reports_nothing_has_lives(tmp_path):
    found = texts(tmp_path, [launch("trainer.0"), started(1, "trainer.0"), exited(9, "trainer.0"), over(10)])
    assert "ps on node1  ·  exit code 0  ·  no process reported progress" in found
    assert "trainer 0" in found
    assert "loss" not in found


def test_of_many_processes_every_few_have_a_name():
    drawn = draw(course(training([f"trainer.{rank}" for rank in range(20)])), "", "")
    panel = panel_of(drawn, "loss")
    assert len(panel.lines) == 20
    assert names_in(panel) == [f"trainer {rank}" for rank in range(0, 20, 3)]
    assert [line.get_color() for line in panel.get_legend().get_lines()] == [
        line.get_color() for line in panel.lines[::3]
    ]


def names_in(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


def panel_of(drawn, label):
    return next(each for each in drawn.axes if each.get_ylabel() == label)


def test_names_before_a_slash_share_a_panel():
    said = training(["trainer.0", "trainer.1"])
    said += [progress(5, f"trainer.{rank}", values={"lr": 0.1, "AUC/all": 0.5}) for rank in (0, 1)]
    said += [progress(6, "trainer.0", values={"AUC/new users": 0.25, "/": 1, "$x_y^{": 2})]
    drawn = draw(course(said), "", "")
    shared = panel_of(drawn, "AUC")
    assert names_in(shared) == ["all, trainer 0", "all, trainer 1", "new users"]
    assert [list(line.get_ydata()) for line in shared.lines] == [[0.5], [0.5], [0.25]]
    assert len(panel_of(drawn, "lr").lines) == 2
    assert panel_of(drawn, "/").lines
    assert panel_of(drawn, "$x_y^{").lines


def test_the_largest_tables_have_panels(tmp_path):
    many = {f"t{number}": {"rows": 10.0 + number, "pulled_keys_s": 1.0} for number in range(9)}
    drawn = draw(course([launch("ps.0"), progress(5, "ps.0", tables=many)]), "", "")
    rows = panel_of(drawn, "rows\n8 largest of 9 tables")
    assert names_in(rows) == [f"t{n}" for n in range(1, 9)]
    long = {f"features.user_profile_embedding_{name}.weight": each for name, each in many.items()}
    wide = draw(course([launch("ps.0"), progress(5, "ps.0", tables=long)]), "", "")
    wide.savefig(tmp_path / "tables.png")
    assert min(panel.get_position().width for panel in wide.axes) > 0.7, "legends leave the panels room"


def test_nothing_is_below_the_lives_of_processes_that_all_completed(tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = draw(course(training(["trainer.0"])), "", "")
    drawn.savefig(tmp_path / "all.png")
    renderer = FigureCanvasAgg(drawn).get_renderer()
    artists = drawn.axes[-1].get_default_bbox_extra_artists()
    assert all(artist.get_tightbbox(renderer).y0 > 1 for artist in artists if artist.get_tightbbox(renderer))


def test_restarts_and_hangs_are_lines_through_all_panels():
    said = [event(40, "restarting"), event(60, "restarting"), event(70, "hung")]
    found = course([*training(["trainer.0"]), *said])
    for panel in draw(found, "", "").axes:
        marks = [each for each in panel.collections if each.get_label() in ("restart", "hang")]
        assert [[path.vertices[0][0] for path in each.get_paths()] for each in marks] == [[40, 60], [70]]


def test_thousands_of_restarts_cover_nothing():
    said = [event(at / 100, "restarting") for at in range(5000)]
    for panel in draw(course([*training(["trainer.0"]), *said]), "", "").axes:
        assert [each.get_alpha() for each in panel.collections if each.get_label() == "restart"] == [0.1]


def test_every_life_has_its_bar_and_a_failure_its_cross():
    from matplotlib.colors import to_rgba

    from fleetrun.plots.figure import FATES

    said = [
        launch("trainer.0", "trainer.1"), started(0, "trainer.0"), started(0, "trainer.1"),
        exited(10, "trainer.0", 1), exited(11, "trainer.1", -15, asked=15),
        started(20, "trainer.0", attempt=1), started(20, "trainer.1", attempt=1),
        exited(30, "trainer.0", 1), exited(30, "trainer.1", 0), over(1),
    ]  # fmt: skip
    panel = draw(course(said), "", "").axes[-1]
    bars = {(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_facecolor()) for bar in panel.patches}
    failed, stopped, completed = (
        to_rgba(FATES[fate]) for fate in ("failed", "stopped by fleetrun", "completed")
    )
    assert bars == {(0, 10, failed), (20, 30, failed), (0, 11, stopped), (20, 30, completed)}
    (crosses,) = (line for line in panel.lines if line.get_marker() == "x")
    assert sorted(zip(*crosses.get_data(), strict=True)) == [(10, 0), (30, 0)]


@pytest.mark.parametrize(
    "events",
    [
        [],
        [over(0)],
        [launch(), over(0)],
        [progress(0, "trainer.0", step=0, loss=1.0, rate=1.0)],
        [progress(0, "trainer.0", loss="nan")],
        [launch("a\n\x1b[31m$x^2$.0"), started(0, "a\n\x1b[31m$x^2$.0")],
        [
            progress(at, "trainer.0", step=at, loss=loss, rate=loss)
            for at, loss in enumerate([-1e29, 1e29, 0, 1e-300])
        ],
        [progress(at, "trainer.0", step=at, loss=math.exp(at)) for at in range(60)],
        [launch("trainer.0"), event(1e7, "hung"), *(event(at, "restarting") for at in range(500))],
    ],
    ids=["nothing", "an end", "no process", "one point", "no number", "odd names", "huge", "log", "long"],
)
def test_whatever_stands_in_a_record_can_be_drawn(tmp_path, events):
    assert texts(tmp_path, events)


def test_names_are_shown_as_they_are(tmp_path):
    found = texts(tmp_path, training(["trainer.0"]), job="$a_b$ <&>")
    assert "$a_b$ <&>  (abcdef)" in found


@pytest.mark.parametrize(("name", "begin"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_kinds(tmp_path, name, begin):
    history = read(write(tmp_path / "log", training(["trainer.0"])))
    old = os.umask(0o027)
    try:
        write_plot(history, output_path(str(tmp_path / name), ENDINGS), None)
    finally:
        os.umask(old)
    assert (tmp_path / name).read_bytes().startswith(begin)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["log", name]), "nothing else is left"


@pytest.mark.parametrize("name", ["job", "job.jpg", ".png", "no/such/folder/job.png"])
def test_names_that_are_none(name):
    with pytest.raises(UsageError, match=f"--output {name}"):
        output_path(name, ENDINGS)


def test_a_folder_in_its_place(tmp_path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UsageError, match="is a directory"):
        output_path(str(tmp_path / "a.png"), ENDINGS)


def test_a_place_that_takes_nothing(tmp_path):
    history = read(write(tmp_path / "log", training(["trainer.0"])))
    with pytest.raises(UsageError, match=r"cannot write /proc/a\.png"):
        write_plot(history, output_path("/proc/a.png", ENDINGS), None)


def test_late_ranks_are_lines():
    late = [event(60 * at, "lateness", late=[{"rank": 2, "share": 0.5}]) for at in (1, 2)]
    panel = panel_of(draw(course([*training(["trainer.0", "trainer.2"]), *late]), "ads", ""), "waited for, %")
    assert names_in(panel) == ["trainer 2"]
    assert list(panel.lines[0].get_ydata()) == [50, 50]


def test_points_that_no_line_shows_are_dots():
    """Of a job that fails after each report no line can be drawn at all."""
    said = []
    for at in range(4):
        said += [started(2 * at, "trainer.0", at), progress(2 * at + 1, "trainer.0", loss=1.0)]
    again = [progress(at, "trainer.0", loss=1.0 + at) for at in (9, 10)]
    (line,) = panel_of(draw(course([*said, *again]), "", ""), "loss").lines
    assert [line.get_xdata()[at] for at in line.get_markevery()] == [1, 3, 5]


def test_a_loss_that_is_no_number_is_a_cross():
    said = [progress(at, "trainer.0", loss=loss) for at, loss in ((1, 1.0), (2, "nan"), (3, "inf"), (4, 2.0))]
    cross, line = panel_of(draw(course(said), "", ""), "loss").lines
    assert (cross.get_marker(), list(cross.get_xdata())) == ("x", [1])
    assert [math.isnan(value) for value in line.get_ydata()] == [False, True, True, False]


def test_gaps_stay_gaps_in_a_long_line():
    said = [progress(at, "trainer.0", loss=1.0 + at) for at in range(9000) if at != 4001]
    said.insert(4001, started(4001, "trainer.0", 1))
    (line,) = panel_of(draw(course(said), "", ""), "loss").lines
    assert 1000 < len(line.get_xdata()) < 2500
    assert [at for at, value in zip(*line.get_data(), strict=True) if math.isnan(value)] == [4001 / 60]


def test_lines_that_are_equal_are_all_seen():
    """Ranks that report the loss of all of them."""
    drawn = draw(course(training([f"trainer.{rank}" for rank in range(3)])), "", "")
    widths = [line.get_linewidth() for line in panel_of(drawn, "loss").lines]
    assert len(widths) == 3
    assert all(below > above + 0.5 for below, above in pairwise(widths)), "the last one is drawn on top"


def test_the_use_of_the_time_is_a_bar_with_a_legend():
    name = "trainer.0"
    ready = event(0, "ready", attempt=0, containers=containers(name))
    said = [progress(at, name, step=at, loss=1 / at) for at in range(25, 100, 10)]
    drawn = draw(course([launch(name), ready, started(0, name), *said, exited(100, name), over(100)]), "", "")
    spans = {
        bars.get_label(): (bars.get_paths()[0].get_extents().x0, bars.get_paths()[0].get_extents().x1)
        for bars in drawn.axes[-2].collections
    }
    assert spans == {"start-up 25 %": (0, 25), "steps 70 %": (25, 95), "after the last step 5 %": (95, 100)}
    assert spans.keys() <= {text.get_text() for text in drawn.legends[0].get_texts()}


def test_the_legend_of_lines_takes_nothing_from_their_width(tmp_path):
    drawn = draw(course(training(["trainer.0", "trainer.1"])), "ads", "collective on node1")
    drawn.savefig(tmp_path / "legend.png")
    assert min(panel.get_position().x1 for panel in drawn.axes) > 0.98
