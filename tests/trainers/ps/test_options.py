"""What a script can ask of its tables and settings, kept in real jobs."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tests.support.forking import Forker
from trainers.ps import read_values

pytestmark = pytest.mark.slow

EXTREMES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**62, 2**63 - 1]


def command(scenario: str, folder: Path, *more: object) -> list[str]:
    return ["-m", "tests.support.scripts.ps_options", scenario, str(folder), *map(str, more)]


def run(forker: Forker, words: list[str], *, trainers: int, servers: int) -> list[str]:
    """What the trainers printed."""
    with forker.job(Path(words[3]), trainers=trainers, servers=servers) as job:
        job.start_all(words)
        job.expect_success()
        return [trainer.output for trainer in job.trainers]


def saved_rows(folder: Path, name: str) -> dict[int, list[float]]:
    table = read_values(folder / "saved").sparse[name]
    return dict(zip(table.keys.tolist(), table.values.tolist(), strict=True))


@pytest.mark.parametrize(("mode", "servers"), [("sync", 3), ("async", 1), ("geo", 2)])
def test_the_smallest_and_the_largest_keys_are_trained_saved_and_read(
    forker: Forker, tmp_path: Path, mode: str, servers: int
) -> None:
    run(forker, command("extremes", tmp_path, mode), trainers=2, servers=servers)
    wanted = 0.5 + 6 * (2 if mode == "async" else 1)
    for name, dim in (("0.weight", 1), ("1.weight", 512)):
        assert saved_rows(tmp_path, name) == {key: [wanted] * dim for key in EXTREMES}


@pytest.fixture(scope="module")
def options(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The folder of a job with each number of servers."""
    folders = {servers: tmp_path_factory.mktemp("options") for servers in (1, 3)}
    for servers, folder in folders.items():
        run(forker, command("options", folder), trainers=1, servers=servers)
    return folders


@pytest.mark.parametrize("servers", [1, 3])
def test_every_table_follows_its_own_wishes(options: dict[int, Path], servers: int) -> None:
    folder = options[servers]
    rows = {
        name: {key: row[0] for key, row in saved_rows(folder, f"tables.{name}.weight").items()}
        for name in ("counted", "drawn", "bounded", "plain", "own", "lean")
    }
    assert rows["plain"] == {key: min(key, 39.0) for key in range(1, 41)}, "as every table without its own"
    assert rows["counted"] == {key: key - 2 for key in range(3, 41)}, "pulled for the third time"
    assert 8 <= len(rows["drawn"]) <= 32
    assert rows["drawn"] == {key: key for key in rows["drawn"]}
    assert rows["bounded"] == {key: min(key, 2.5) for key in range(1, 41)}
    for key, value in rows["own"].items():  # Adagrad's n-th step on gradients of 1 is lr / sqrt(n)
        assert value == pytest.approx(sum(0.5 / n**0.5 for n in range(1, key + 1)), rel=1e-5)
        assert rows["lean"][key] == pytest.approx(value, rel=0.02), "the same, row-wise, in float16"
    short = saved_rows(folder, "short.weight")
    assert {key: row[0] for key, row in short.items()} == {key: min(key, 39.0) for key in range(41)}


def test_a_lottery_draws_the_same_keys_on_any_number_of_servers(options: dict[int, Path]) -> None:
    one, three = (saved_rows(folder, "tables.drawn.weight") for folder in options.values())
    assert one == three


def test_shows_and_clicks_decide_who_is_shrunk_away(forker: Forker, tmp_path: Path) -> None:
    run(forker, command("shown", tmp_path), trainers=1, servers=2)
    for name in ("0.weight", "1.weight"):
        assert saved_rows(tmp_path, name).keys() == {0, 1, 2}, name


def test_numbers_that_are_not_finite_end_the_trainer_or_are_left_out(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=1, servers=1) as job:
        job.start_all(command("bad_numbers", tmp_path, "refuse"))
        (trainer,) = job.trainers
        assert trainer.wait() == 1
        assert "pushed 1\n" in trainer.output
        assert "pushed 2\n" not in trainer.output
        assert (
            f"ServerError: server 0 at {job.cluster.servers[0]} refused PUSH (NOT_FINITE)" in trainer.output
        )
    run(forker, command("bad_numbers", tmp_path, "skip"), trainers=1, servers=1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_says_nothing_is_named_after_the_request_timeout(
    forker: Forker, tmp_path: Path, mode: str
) -> None:
    with forker.job(tmp_path, trainers=1, servers=2) as job:
        job.start_all(command("silent", tmp_path, mode))
        (trainer,) = job.trainers
        trainer.wait_for("held")
        silent = job.servers[1]
        silent.stop()
        started = time.monotonic()
        (tmp_path / "go").touch()
        trainer.wait_for("ServerError")
        assert time.monotonic() - started >= 6.0
        endpoint = job.cluster.servers[1]
        assert f"ServerError server 1 at {endpoint} did not answer P" in trainer.output
        assert "within 6 s. It may have failed or be unreachable" in trainer.output
        silent.go_on()


@pytest.mark.parametrize(("merged", "queued"), [(1, 1), (1, 4), (3, 2)])
def test_a_step_waits_while_the_queue_of_pushes_is_full(
    forker: Forker, tmp_path: Path, merged: int, queued: int
) -> None:
    """So many pushes are under way, and one more is what waits: its step is the first that is not done."""
    with forker.job(tmp_path, trainers=1, servers=1) as job:
        job.start_all(command("queue", tmp_path, merged, queued))
        (trainer,) = job.trainers
        trainer.wait_for("held")
        job.servers[0].stop()
        (tmp_path / "go").touch()
        last = merged * (queued + 1) - 1
        trainer.wait_for(f"pushed {last}\n")
        with pytest.raises(AssertionError):
            trainer.wait_for(f"pushed {last + 1}\n", timeout=0.5)
        job.servers[0].go_on()
        job.expect_success()
        assert "end 40.0\n" in trainer.output


def test_dense_values_come_with_every_nth_push(forker: Forker, tmp_path: Path) -> None:
    run(forker, command("receives", tmp_path), trainers=1, servers=1)


def test_geo_sends_what_was_touched_every_k_steps_and_not_before(forker: Forker, tmp_path: Path) -> None:
    outputs = run(forker, command("exchanges", tmp_path), trainers=2, servers=2)
    assert "between [2.5, 0.0]\n" in outputs[1], "five of seven steps, divided by two trainers"
    assert all("end [3.5, 0.5]\n" in output for output in outputs)


def test_a_server_with_much_more_to_do_is_told_and_what_it_says_to_set_mends_it(
    forker: Forker, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    outputs = run(forker, command("uneven", before, "{}"), trainers=2, servers=2)
    (said,) = re.findall(
        r"sends 2\.0 times as many .* of 2 servers.*sparse_table_configs: (\{.*\})\n", "".join(outputs)
    )
    assert json.loads(said) == {"used.weight": {"servers": 2}}
    outputs = run(forker, command("uneven", after, said), trainers=2, servers=2)
    assert "times as many bytes" not in "".join(outputs)


def test_a_data_set_trains_and_evaluates_a_served_table(forker: Forker, tmp_path: Path) -> None:
    for rank in range(2):
        lines = [f"x2 {100 + number % 5} {20 * rank + number} 1 0.5\n" for number in range(20)]
        (tmp_path / f"part-{rank}").write_text("broken\n" + "".join(lines))
    outputs = run(forker, command("dataset", tmp_path), trainers=2, servers=1)
    assert all("skipped 1 examples 40\n" in output for output in outputs)
    said = [re.findall(r"batch: \[(\d+)\], minus\[1\]:\[-", output) for output in outputs]
    assert all(batches and batches == [str(3 * n + 3) for n in range(len(batches))] for batches in said)
