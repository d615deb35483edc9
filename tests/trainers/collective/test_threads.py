from pathlib import Path

from trainers.collective.group import GLOO_WORKER, wait_until_idle


def task(folder: Path, number: int, name: str, state: str) -> None:
    (folder / str(number)).mkdir()
    (folder / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 2 3\n")


def test_a_worker_that_runs_is_waited_for_within_bounds(tmp_path: Path) -> None:
    task(tmp_path, 1, GLOO_WORKER, "S")
    task(tmp_path, 2, GLOO_WORKER, "R")
    assert not wait_until_idle(tmp_path, looks=20, pause=0.001)


def test_workers_that_sleep_are_not_waited_for_whatever_others_do(tmp_path: Path) -> None:
    task(tmp_path, 1, GLOO_WORKER, "S")
    task(tmp_path, 2, "py) R (thon", "R")
    (tmp_path / "3").mkdir()  # a thread that ends while it is looked at
    assert wait_until_idle(tmp_path, looks=2)
    assert wait_until_idle()  # this very process
