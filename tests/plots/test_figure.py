"""The picture of a record, as a file. What it looks like is for eyes; what it has to hold is tested here."""

import math
import os
import stat
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from fleetrun.commands.output import output_path
from fleetrun.errors import UsageError
from fleetrun.plots.course import Fate, course
from fleetrun.plots.figure import ENDINGS, draw, write_plot
from fleetrun.record.history import read
from tests.plots.record import containers, event, exited, launch, over, progress, started, training, write

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
        "loss", "samples per second", "trainer 0", "server 0", "restart", "hang", "loss is nan or inf",
        "failed", "completed", "stopped by fleetrun", "ads  (abcdef)",
        "ps on node1  ·  1 restart  ·  exit code 3: trainer 0 failed",
    } <= set(found)  # fmt: skip
    assert any(text.startswith("seconds since 20") for text in found)


def test_a_job_that_reports_nothing_has_lives(tmp_path):
    found = texts(tmp_path, [launch("trainer.0"), started(1, "trainer.0"), exited(9, "trainer.0"), over(10)])
    assert "ps on node1  ·  exit code 0  ·  no process reported progress" in found
    assert "trainer 0" in found
    assert "loss" not in found


def test_many_processes_are_a_ladder_with_the_slowest_by_name(tmp_path):
    said = training([f"trainer.{rank}" for rank in range(12)])
    for each in said:
        if each["event"] == "progress" and each["rank"] == 7:
            each["rate"] = 20.0
    found = texts(tmp_path, said)
    assert {"rank", "median"} <= set(found)
    assert found.count("trainer 7") == 2, "beside its life and at its line"
    assert found.count("trainer 6") == 1


def test_the_median_of_few_reports_is_one_line():
    drawn = draw(course(training([f"trainer.{rank}" for rank in range(12)])), "", "")
    (median,) = [line for line in panel_of(drawn, "loss").lines if line.get_color() == "black"]
    assert len(median.get_ydata()) > 4
    assert not any(map(math.isnan, median.get_ydata()))


def panel_of(drawn, label):
    return next(each for each in drawn.axes if each.get_ylabel() == label)


def test_names_before_a_slash_share_a_panel():
    said = training(["trainer.0", "trainer.1"])
    said += [progress(5, f"trainer.{rank}", values={"lr": 0.1, "AUC/all": 0.5}) for rank in (0, 1)]
    said += [progress(6, "trainer.0", values={"AUC/new users": 0.25, "/": 1, "$x_y^{": 2})]
    drawn = draw(course(said), "", "")
    shared = panel_of(drawn, "AUC")
    names = [text.get_text() for text in shared.get_legend().get_texts()]
    assert names == ["all, trainer 0", "all, trainer 1", "new users"]
    assert [list(line.get_ydata()) for line in shared.lines] == [[0.5], [0.5], [0.25]]
    assert len(panel_of(drawn, "lr").lines) == 2
    assert panel_of(drawn, "/").lines
    assert panel_of(drawn, "$x_y^{").lines


def test_the_largest_tables_have_panels(tmp_path):
    many = {f"t{number}": {"rows": 10.0 + number, "pulled_keys_s": 1.0} for number in range(9)}
    drawn = draw(course([launch("ps.0"), progress(5, "ps.0", tables=many)]), "", "")
    rows = panel_of(drawn, "rows")
    assert rows.get_legend().get_title().get_text() == "the 8 largest of 9 tables"
    assert [text.get_text() for text in rows.get_legend().get_texts()] == [f"t{n}" for n in range(1, 9)]
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
        upright = [
            line for line in panel.lines if len(set(line.get_xdata())) == 1 and line.get_linestyle() != "None"
        ]
        assert [
            (line.get_xdata()[0], line.get_linestyle()) for line in upright if len(line.get_xdata()) == 2
        ] == [
            (40, "--"),
            (60, "--"),
            (70, ":"),
        ]


def test_thousands_of_restarts_cover_nothing():
    said = [event(at / 100, "restarting") for at in range(5000)]
    for panel in draw(course([*training(["trainer.0"]), *said]), "", "").axes:
        marks = [line for line in panel.lines if line.get_linestyle() == "--"]
        assert 100 < len(marks) < 1000
        assert {line.get_alpha() for line in marks} == {0.1}


def test_every_life_has_its_bar_and_a_failure_its_cross():
    from matplotlib.colors import to_hex

    from fleetrun.plots.figure import FATES, draw

    said = [
        launch("trainer.0", "trainer.1"), started(0, "trainer.0"), started(0, "trainer.1"),
        exited(10, "trainer.0", 1), exited(11, "trainer.1", -15, asked=15),
        started(20, "trainer.0", attempt=1), started(20, "trainer.1", attempt=1),
        exited(30, "trainer.0", 1), exited(30, "trainer.1", 0), over(1),
    ]  # fmt: skip
    panel = draw(course(said), "", "").axes[-1]
    bars = {
        (box.x0, box.x1, to_hex(bars.get_facecolor()[0]).upper())
        for bars in panel.collections
        for box in (path.get_extents() for path in bars.get_paths())
    }
    assert bars == {
        (0, 10, FATES[Fate.FAILED]), (20, 30, FATES[Fate.FAILED]),
        (0, 11, FATES[Fate.STOPPED]), (20, 30, FATES[Fate.OK]),
    }  # fmt: skip
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
    found = texts(tmp_path, training(["trainer.0"]), job="$a_b^{ <&>")
    assert "$a_b^{ <&>  (abcdef)" in found


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
    with pytest.raises(UsageError, match="is a folder"):
        output_path(str(tmp_path / "a.png"), ENDINGS)


def test_a_place_that_takes_nothing(tmp_path):
    history = read(write(tmp_path / "log", training(["trainer.0"])))
    with pytest.raises(UsageError, match=r"cannot write /proc/a\.png"):
        write_plot(history, output_path("/proc/a.png", ENDINGS), None)


@pytest.mark.parametrize("looks", [1, 3, 2000])
def test_late_ranks_are_a_heat_map(tmp_path, looks):
    names = [f"trainer.{rank}" for rank in range(4)]
    late = [event(60 * (1 + at), "lateness", late=[{"rank": 2, "share": 0.5}]) for at in range(looks)]
    drawn = draw(course([*training(names), *late]), "ads", "")
    panel = next(each for each in drawn.axes if each.get_ylabel() == "rank")
    (cells,) = panel.collections
    values = cells.get_array()
    assert values.shape == (3, looks if looks < 10 else 400)
    assert values[2].min() == 50.0
    assert values[:2].max() == 0.0
    drawn.savefig(tmp_path / "late.png")


def test_two_scales_of_colours_are_beside_each_other(tmp_path):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    late = [event(60, "lateness", late=[{"rank": 2, "share": 0.5}])]
    drawn = draw(course([*training([f"trainer.{rank}" for rank in range(12)]), *late]), "ads", "")
    drawn.savefig(tmp_path / "scales.png")
    renderer = FigureCanvasAgg(drawn).get_renderer()
    bars = [axes.get_tightbbox(renderer) for axes in drawn.axes if axes.get_label() == "<colorbar>"]
    assert len(bars) == 2
    assert not bars[0].overlaps(bars[1])


def test_no_colour_means_two_things():
    """Of lines, of how processes ended, of what the time went into: also not nearly the same."""
    from matplotlib.colors import to_rgb

    from fleetrun.plots.figure import FATES, PALETTE, SPENT

    colours = [to_rgb(each) for each in (*PALETTE, *FATES.values(), *SPENT.values())]
    assert len(set(colours)) == len(colours)
    failed = to_rgb(FATES[Fate.FAILED])
    for each in (
        *map(to_rgb, PALETTE),
        *(to_rgb(each) for fate, each in FATES.items() if fate != Fate.FAILED),
    ):
        assert math.dist(failed, each) > 0.35


def test_lines_that_are_equal_are_all_seen():
    """Ranks that report the loss of all of them."""
    drawn = draw(course(training([f"trainer.{rank}" for rank in range(3)])), "", "")
    widths = [line.get_linewidth() for line in panel_of(drawn, "loss").lines]
    assert len(widths) == 3
    assert all(below > above + 0.5 for below, above in pairwise(widths)), "the last one is drawn on top"


@pytest.mark.parametrize(("first", "named"), [(30, True), (1, False)])
def test_the_time_before_the_first_step_is_named_where_there_is_room(tmp_path, first, named):
    name = "trainer.0"
    said = [progress(at, name, step=at, loss=1 / at, rate=1.0) for at in range(first, 100, 10)]
    begin = [launch(name), event(0.1, "ready", attempt=0, containers=containers(name)), started(0.5, name)]
    drawn = draw(course([*begin, *said, exited(100, name), over(100)]), "", "")
    loss = panel_of(drawn, "loss")
    (shaded,) = loss.patches
    assert shaded.get_x() + shaded.get_width() == first
    assert [text.get_text() for text in loss.texts] == ["start-up"] * named
    drawn.savefig(tmp_path / "start.png")


def test_the_legend_of_lines_takes_nothing_from_their_width(tmp_path):
    drawn = draw(course(training(["trainer.0", "trainer.1"])), "ads", "collective on node1")
    drawn.savefig(tmp_path / "legend.png")
    assert min(panel.get_position().x1 for panel in drawn.axes) > 0.98
