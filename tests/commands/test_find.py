"""Finding the job that a word names: running or recorded."""

import os
import time
from pathlib import Path

import click
import pytest

from fleetrun.commands.find import (
    EndedJob,
    NoJobError,
    RemoteProcess,
    choose_processes,
    complete_jobs,
    complete_running_jobs,
    describe_end,
    find_any,
    find_ended,
    find_running,
    job_title,
    list_ranks,
    matching_jobs,
    parse_since,
    remote_processes,
)
from fleetrun.control.client import Running
from fleetrun.errors import UsageError
from fleetrun.record.history import History, Known
from fleetrun.record.journal import Journal, journal_path
from fleetrun.verbs import command
from tests.support.serving import serving, status_of

# ---- What `--role`, `--rank` and `--since` mean.

JOB = [
    Known(name=f"{role}.{index}", role=role, rank=rank, index=index, log=Path("x.log"))
    for role, index, rank in [
        ("pre_hook", 0, None),
        ("ps", 0, 0), ("ps", 1, 1),
        ("trainer", 0, 4), ("trainer", 1, 5), ("trainer", 2, 6), ("trainer", 3, 8),
    ]
]  # fmt: skip


@pytest.mark.parametrize(
    ("role", "rank", "names"),
    [
        (None, None, "pre_hook.0 ps.0 ps.1 trainer.0 trainer.1 trainer.2 trainer.3"),
        ("ps", None, "ps.0 ps.1"),
        ("server", None, "ps.0 ps.1"),
        ("Servers", None, "ps.0 ps.1"),
        ("worker", "4", "trainer.0"),
        (None, "4,6", "trainer.0 trainer.2"),
        (None, "5-8", "trainer.1 trainer.2 trainer.3"),
        ("ps,trainer", "0-4", "ps.0 ps.1 trainer.0"),
        ("pre_hook", None, "pre_hook.0"),
        (None, " 4 , 4", "trainer.0"),
    ],
)
def test_whom_they_choose(role, rank, names):
    assert [each.name for each in choose_processes(JOB, role, rank)] == names.split()


@pytest.mark.parametrize(
    ("role", "rank", "message"),
    [
        ("heter", None, "--role heter: this node has no such process"),
        (None, "9", "--rank 9: this node has no such process"),
        (None, "0", "--rank 0: this node has no such process"),
        ("boss", None, "--role boss: this job has no such role"),
        (None, "x", "--rank x: not a list of ranks"),
        (None, "", "--rank : not a list of ranks"),
        (None, "3-1", "--rank 3-1: not a list of ranks"),
        (None, "-1", "--rank -1: not a list of ranks"),
        (None, "0-99999999999", "--rank"),
        (None, "٣", "--rank"),
    ],
)
def test_whom_there_is_not(role, rank, message):
    with pytest.raises(UsageError, match=message):
        choose_processes(JOB, role, rank)


def test_the_hint_names_whom_there_is():
    assert list_ranks(JOB) == "pre_hook, ps 0-1, trainer 4-6,8"
    with pytest.raises(UsageError, match="no processes"):
        choose_processes([], None, None)


AWAY = [
    RemoteProcess("node 0, h1 (10.0.0.1)", "ps", 2),
    *(RemoteProcess("node 0, h1 (10.0.0.1)", "trainer", rank) for rank in range(4)),
    RemoteProcess("node 2, h3 (10.0.0.3)", "trainer", 9),
]


@pytest.mark.parametrize(
    ("role", "rank", "hint"),
    [
        (
            None,
            "3",
            "On node 0, h1 (10.0.0.1): trainer 3\nRun there: fleetrun logs night --rank 3\nThis node has ",
        ),
        (None, "0-3", "On node 0, h1 (10.0.0.1): trainer 0-3\nRun there: fleetrun logs night --rank 0-3\n"),
        (
            "server",
            "2",
            "On node 0, h1 (10.0.0.1): ps 2\nRun there: fleetrun logs night --role server --rank 2",
        ),
        (
            None,
            "3,9",
            "On node 0, h1 (10.0.0.1): trainer 3\nOn node 2, h3 (10.0.0.3): trainer 9\nRun there: ",
        ),
        (None, "99", "This node has pre_hook, ps 0-1, trainer 4-6,8."),
    ],
)
def test_who_is_on_another_machine(role, rank, hint):
    with pytest.raises(UsageError, match="no such process") as error:
        choose_processes(JOB, role, rank, lambda: AWAY, "fleetrun logs night")
    assert error.value.hint.startswith(hint)


def test_of_many_machines_a_few_are_named():
    many = [RemoteProcess(f"node {number}, h{number}", "trainer", number) for number in range(100, 120)]
    with pytest.raises(UsageError) as error:
        choose_processes(JOB, None, "100-200", lambda: many, "fleetrun logs")
    lines = error.value.hint.splitlines()
    assert (len(lines), lines[8]) == (11, "and on 12 more")


def history(*events):
    return History(path=Path("x"), job="night", pod="abcdef", events=events, damaged=0, owner=0, running=None)


def met(rank, processes, nodes=("h1", "h2")):
    return {"time": 1.0, "event": "node", "rank": rank, "nodes": list(nodes), "processes": processes}


def test_the_record_knows_where_others_are():
    first = met(0, [{"trainer": "0-1"}, {"trainer": "2-3"}])
    again = met(1, [{"trainer": "0", "ps": "0"}, {"trainer": "1"}])
    gone = {"time": 3.0, "event": "node", "text": "h1 is gone"}
    assert remote_processes(history(first, again, gone)) == [
        RemoteProcess("node 0, h1", "trainer", 0),
        RemoteProcess("node 0, h1", "ps", 0),
    ]
    assert remote_processes(history(first)) == [
        RemoteProcess("node 1, h2", "trainer", 2),
        RemoteProcess("node 1, h2", "trainer", 3),
    ]
    assert remote_processes(history()) == []


@pytest.mark.parametrize(
    "event",
    [
        met(0, None), met(0, 7), met(0, [1, 2]), met(0, [{}, {"trainer": None}]), met(0, [{}, {"x": "9-1"}]),
        met(0, [{}]), {"time": 1.0, "event": "node"},
    ],
)  # fmt: skip
def test_a_record_that_says_nonsense_of_it(event):
    assert remote_processes(history(event)) == []


NOW = time.mktime((2026, 11, 22, 7, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("30s", 30),
        ("90", 90),
        ("10m", 600),
        ("1.5h", 5400),
        ("2d", 172800),
        ("10m ago", 600),
        ("07:15", 900),
        ("7:15", 900),
        ("1.5d", 129600),
        ("07:29:30", 30),
        ("08:00", 86400 - 1800),
        ("2026-11-22 07:00", 1800),
        ("2026-11-22T07:29:59", 1),
        ("2026-11-22", 27000),
    ],
)
def test_since_when(text, ago):
    assert parse_since(text, NOW) == pytest.approx(NOW - ago)


@pytest.mark.parametrize("text", ["", "x", "-5m", "10 parsecs", "25:00", "2026-13-01", "nan", "1e9", "٣m"])
def test_what_is_no_moment(text):
    with pytest.raises(UsageError, match="--since"):
        parse_since(text, NOW)


# ---- Which job is meant.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where launches of this test run."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run" / "fleetrun"


@pytest.fixture
def runs(folder):
    """`runs("job", "abcdef")`: such a launch runs."""
    open_ones = []

    def start(job: str, pod: str, **more: object) -> None:
        server = serving(folder / f"{pod}.sock", lambda _: status_of(job, pod, **more))
        server.__enter__()
        open_ones.append(server)

    yield start
    for server in open_ones:
        server.__exit__(None, None, None)


def ran(log_dir: Path, job: str, pod: str, heard: float, **over: object) -> Path:
    """Such a launch ran, and was heard of last at this time."""
    log_dir.mkdir(exist_ok=True)
    path = journal_path(log_dir, job, pod)
    journal = Journal(path)
    journal.write("launch", job=job, pod=pod)
    if over:
        journal.write("over", **over)
    journal.close()
    os.utime(path, (heard, heard))
    return path


def past(job: str, pod: str) -> EndedJob:
    return EndedJob(job=job, pod=pod, log_dir=Path(), record=Path(), written=0.0)


JOBS = [
    past("resnet", "abcdef"),
    past("resnet50", "ghijkl"),
    past("bert", "aresne"),
    past("ghijkl", "zzzzzz"),
]


@pytest.mark.parametrize(
    ("word", "pods"),
    [
        ("resnet", ["abcdef"]),  # a whole name, though it begins another
        ("res", ["abcdef", "ghijkl"]),
        ("resnet5", ["ghijkl"]),
        ("b", ["aresne"]),
        ("are", ["aresne"]),
        ("ghijkl", ["ghijkl", "zzzzzz"]),  # a pod, and a job of that name
        ("esnet", []),
        ("RESNET", []),
        (None, ["abcdef", "ghijkl", "aresne", "zzzzzz"]),
    ],
)
def test_what_a_word_can_mean(word, pods):
    assert [each.pod for each in matching_jobs(word, JOBS)] == pods


def test_the_only_one_needs_no_word(runs):
    runs("resnet", "abcdef")
    found = find_running()
    assert (found.job, found.pod, found.log_dir) == ("resnet", "abcdef", Path("/logs"))
    assert find_running("res").pod == find_running("abc").pod == "abcdef"


def test_no_job_runs(folder):
    with pytest.raises(NoJobError, match="no job") as error:
        find_running()
    assert error.value.exit_code == 1
    assert error.value.hint == "`fleetrun report` shows how a job ended."
    with pytest.raises(NoJobError, match="no job 'bert'") as error:
        find_running("bert")
    assert error.value.hint == "`fleetrun report bert` shows how a job ended."


def test_no_such_job_runs_but_others(runs):
    runs("resnet", "abcdef")
    with pytest.raises(NoJobError, match="no job 'bert'") as error:
        find_running("bert")
    assert "resnet (pod abcdef" in error.value.hint


def test_several_are_listed_with_what_tells_them_apart(runs):
    runs("default", "abcdef", started=0.0, log_dir="/one")
    runs("default", "ghijkl", started=10.0, log_dir="/two")
    for word in (None, "default", "def"):
        with pytest.raises(UsageError, match="2 jobs") as error:
            find_running(word)
        first, second = error.value.hint.splitlines()
        assert first.startswith("default (pod abcdef, since 19")
        assert second.endswith("logs in /two)")
    assert find_running("gh").pod == "ghijkl"


def test_a_job_of_another_folder_is_named(runs, capsys):
    runs("default", "abcdef", script="train.py", cwd="/home/me/exp")
    named = "fleetrun: default (train.py, pod abcdef) was started in /home/me/exp\n"
    for find in (find_running, find_any):
        assert find().pod == "abcdef"
        assert capsys.readouterr().err == named
    find_running("default")
    assert capsys.readouterr().err == ""


def test_a_job_of_this_folder_is_not_named(folder, runs, capsys):
    runs("default", "abcdef", cwd=str(Path.cwd()))
    assert find_running().pod == find_any().pod == "abcdef"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("others", [0, 1, 2])
def test_where_the_job_of_this_folder_has_ended_no_other_is_meant(folder, runs, others):
    ran(Path("log"), "night", "aaaaaa", 100, code=0)
    for number in range(others):
        runs("default", "abcde" + "xyz"[number], cwd="/elsewhere")
    with pytest.raises(NoJobError, match=r"^the job of this directory ended .+ ago$") as error:
        find_running()
    assert error.value.hint.startswith("`fleetrun report` shows how a job ended.")
    assert error.value.hint.count("default (pod abcde") == others
    assert find_any().pod == "aaaaaa"


def test_a_job_is_called_by_its_script_too(runs):
    """`default` alone tells nothing."""
    runs("default", "abcdef", script="src/train.py")
    assert job_title(find_running()) == "default (train.py, pod abcdef)"


def test_only_what_tells_them_apart_is_asked_for(runs):
    runs("default", "abcdef", script="train.py")
    runs("default", "ghijkl", script="eval.py")
    with pytest.raises(UsageError, match=r"name one by its pod or script$"):
        find_running()
    assert find_running("eval").pod == "ghijkl"


@pytest.mark.parametrize("word", [None, "night"])
def test_nodes_on_one_machine_are_one_job(runs, word):
    """As in the first trial of several machines, in two terminals."""
    for pod, own, log_dir in (("abcdef", 1, "/logs"), ("ghijkl", 0, "/logs2")):
        nodes = [{"rank": rank, "title": f"h{rank}", "this": rank == own} for rank in range(2)]
        runs("night", pod, nodes=nodes, url="h1:6768/night", log_dir=log_dir)
    assert find_running(word).pod == find_any(word).pod == "ghijkl"
    assert find_running("abc").pod == "abcdef"
    runs("night", "mnopqr", url="h2:6768/night")
    with pytest.raises(UsageError, match=r"2 jobs.*; name one by its pod$"):
        find_running(word)


def test_names_do_nothing_to_a_terminal(runs):
    runs("a\x1b[2Jb", "abcdef")
    runs("a\nb", "ghijkl")
    with pytest.raises(UsageError) as error:
        find_running()
    assert "\x1b" not in error.value.hint
    assert len(error.value.hint.splitlines()) == 2


def test_of_the_past_the_newest_is_meant(folder):
    ran(Path("log"), "default", "aaaaaa", 100)
    ran(Path("log"), "default", "bbbbbb", 300)
    ran(Path("log"), "other", "cccccc", 200)
    assert find_ended().pod == "bbbbbb"
    assert find_ended("default").pod == "bbbbbb"
    assert find_ended("aaa").pod == "aaaaaa"
    assert find_ended("oth").record == Path("log/other.cccccc.events.jsonl")
    assert find_ended("oth").written == 200


def test_a_beginning_of_several_jobs_of_the_past_is_not_enough(folder):
    ran(Path("log"), "resnet", "aaaaaa", 100)
    ran(Path("log"), "resnext", "bbbbbb", 300)
    with pytest.raises(UsageError, match="fits 2 jobs"):
        find_ended("res")


def test_what_runs_is_not_past(folder, runs):
    ran(Path("log"), "default", "aaaaaa", 100)
    ran(Path("log"), "default", "bbbbbb", 300)
    runs("default", "bbbbbb")
    assert find_ended().pod == "aaaaaa"


@pytest.mark.parametrize("word", [None, "default"])
def test_no_record_of_it(folder, word):
    with pytest.raises(NoJobError, match="event log in log"):
        find_ended(word)


def test_what_runs_comes_first(folder, runs):
    ran(Path("log"), "default", "aaaaaa", 100)
    assert isinstance(find_any(), EndedJob)
    runs("default", "bbbbbb")
    assert isinstance(find_any(), EndedJob), "it ran here, the other runs elsewhere"
    runs("default", "cccccc", cwd=str(Path.cwd()))
    assert find_any().pod == "cccccc"
    assert isinstance(find_any("bbb"), Running)
    assert isinstance(find_any("aaaa"), EndedJob)


def test_a_whole_name_that_ran_goes_before_the_beginning_of_one_that_runs(folder, runs):
    ran(Path("log"), "night", "aaaaaa", 100)
    runs("night2", "bbbbbb")
    assert find_any("night").pod == "aaaaaa"
    assert find_any("nigh").pod == "bbbbbb"
    assert find_any("b").pod == "bbbbbb"


def test_a_folder_of_logs_narrows_it(folder, runs, tmp_path):
    ran(tmp_path / "logs", "old", "aaaaaa", 100)
    runs("one", "bbbbbb", log_dir=str(tmp_path / "one"))
    runs("two", "cccccc", log_dir=str(tmp_path / "two"))
    assert find_any(None, Path("two")).pod == "cccccc"
    assert find_any(None, tmp_path / "logs").pod == "aaaaaa"
    with pytest.raises(NoJobError):
        find_any("one", tmp_path / "two")
    with pytest.raises(UsageError, match="2 jobs"):
        find_any()


def test_neither_runs_nor_ran_while_others_run(folder, runs, tmp_path):
    runs("one", "bbbbbb", log_dir=str(tmp_path / "one"))
    with pytest.raises(
        NoJobError, match="no such job is running here, and no job 'x' has an event log in log"
    ) as error:
        find_any("x")
    among, where = error.value.hint.splitlines()[1:]
    assert among.startswith("one (pod bbbbbb")
    assert where.startswith("Use --log_dir")


@pytest.mark.parametrize(("typed", "meant"), [("nihgt", "night"), ("restnet", "resnet"), ("x", None)])
def test_a_name_that_is_almost_one(folder, runs, tmp_path, typed, meant):
    ran(tmp_path / "log", "night", "aaaaaa", 100)
    runs("resnet", "bbbbbb")
    with pytest.raises(NoJobError) as error:
        find_any(typed)
    assert error.value.hint.splitlines()[0] == (f"Did you mean {meant}?" if meant else "Jobs:")


def test_one_that_has_ended_while_others_run(folder, runs, tmp_path):
    ran(tmp_path / "log", "night", "aaaaaa", 100)
    runs("resnet", "bbbbbb")
    with pytest.raises(NoJobError, match="no job 'night'") as error:
        find_running("night")
    assert error.value.hint.splitlines()[0] == "`fleetrun report night` shows how a job ended."
    with pytest.raises(NoJobError) as error:
        find_running("restnet")
    assert error.value.hint.splitlines()[:2] == ["Did you mean resnet?", "Jobs:"]


def test_nothing_anywhere(folder):
    with pytest.raises(
        NoJobError, match="no such job is running here, and no job 'x' has an event log in log"
    ):
        find_any("x")


def test_how_it_ended(folder, runs, tmp_path):
    runs("default", "aaaaaa", log_dir=str(tmp_path / "log"))
    found = find_running()
    assert describe_end(found) == ""
    ran(tmp_path / "log", "default", "aaaaaa", 100, code=143, reason="got \x1bSIGTERM")
    assert describe_end(found) == ": got \\x1bSIGTERM, exit code 143"


def test_a_launcher_that_was_killed_has_not_said_how_it_ended(folder, runs, tmp_path):
    runs("default", "aaaaaa", log_dir=str(tmp_path / "log"))
    ran(tmp_path / "log", "default", "aaaaaa", 100)
    assert describe_end(find_running()) == ": its launcher was killed"
    held = Journal(journal_path(tmp_path / "log", "default", "aaaaaa"))
    assert describe_end(find_running()) == ""
    held.close()


def test_how_it_ended_well(folder, runs, tmp_path):
    runs("default", "aaaaaa", log_dir=str(tmp_path / "log"))
    found = find_running()
    ran(tmp_path / "log", "default", "aaaaaa", 100, code=0, reason="")
    assert describe_end(found) == ": exit code 0"


# ---- What a shell offers where a job is to be named.


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Three that run, two of them with one name. Tab has time."""
    monkeypatch.setattr("fleetrun.commands.find._COMPLETION_TIMEOUT", 60.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "fleetrun"
    there = {"abcdef": "day", "bcdefg": "twice", "cdefgh": "twice"}
    with (
        serving(folder / "abcdef.sock", lambda _: status_of(there["abcdef"], "abcdef")),
        serving(folder / "bcdefg.sock", lambda _: status_of(there["bcdefg"], "bcdefg")),
        serving(folder / "cdefgh.sock", lambda _: status_of(there["cdefgh"], "cdefgh")),
    ):
        yield


def offered(which, start="", **params):
    context = click.Context(click.Command("x"))
    context.params = params
    return sorted(which(context, click.Argument(["job"]), start))


def test_jobs_that_run_or_their_pods_where_a_name_says_too_little(jobs):
    assert offered(complete_running_jobs) == ["bcdefg", "cdefgh", "day"]
    assert offered(complete_running_jobs, "d") == ["day"]
    assert offered(complete_running_jobs, "x") == []


def test_jobs_that_ran_each_once(jobs, tmp_path):
    logs = tmp_path / "elsewhere"
    logs.mkdir()
    for name in ("night.aaaaaa", "night.bbbbbb", "a b.cccccc", "day.dddddd", "训练.eeeeee"):
        (logs / f"{name}.events.jsonl").touch()
    assert offered(complete_jobs, "d") == ["day"]
    assert offered(complete_jobs, log_dir=logs) == ["bcdefg", "cdefgh", "day", "night", "训练"]


@pytest.mark.parametrize(
    ("verb", "which"),
    [
        *((verb, complete_running_jobs) for verb in ("status", "stop", "stacks")),
        *((verb, complete_jobs) for verb in ("logs", "report", "plot", "again")),
    ],
)
def test_each_command_offers_its_own(verb, which):
    (argument,) = (each for each in command(verb).params if each.name == "job")
    assert argument._custom_shell_complete is which
