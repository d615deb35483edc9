"""A real notebook: functions of its cells, its outputs as a reader sees them, and its interrupt."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

from tests.support.traces import BOUND

pytestmark = pytest.mark.slow


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[NotebookNode]]:
    """Runs cells in one kernel, in the folder of the test; returns them with their outputs. With
    `interrupt`, the reader presses "interrupt" once the last cell shows a step.
    """
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))

    def run(*cells: str, interrupt: bool = False) -> list[NotebookNode]:
        document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
        place = {"metadata": {"path": str(tmp_path)}}
        client = NotebookClient(document, timeout=BOUND, resources=place, allow_errors=True)

        def shown() -> str:
            return "".join(progress_of(document.cells[-1]))

        async def execute() -> None:
            running = asyncio.create_task(client.async_execute())
            while interrupt and "step" not in shown() and not running.done():
                await asyncio.sleep(0.01)
            if interrupt:
                await client.km.interrupt_kernel()
            await running

        asyncio.run(execute())
        cells_run: list[NotebookNode] = document.cells
        return cells_run

    return run


def progress_of(cell: NotebookNode) -> list[str]:
    return [each.data["text/plain"] for each in cell.outputs if each.output_type == "display_data"]


def printed(cell: NotebookNode, stream: str = "stdout") -> str:
    return "".join(each.text for each in cell.outputs if each.output_type == "stream" and each.name == stream)


def test_a_function_of_a_cell(notebook):
    cells = notebook(
        "import os, fleetrun\nscale = 10\ndef rank():\n"
        "    print('here', flush=True)\n    return scale * int(os.environ['RANK'])",
        "fleetrun.run(rank, nproc_per_node=2).values",
        "def fails():\n    nothing = 0\n    return 1 / nothing\nfleetrun.run(fails)",
    )
    assert printed(cells[1]) == "here\n"
    assert cells[1].outputs[-1].output_type == "execute_result"
    assert cells[1].outputs[-1].data["text/plain"] == "[0, 10]"
    # A job of more than a second also has a line of progress.
    assert {each.output_type for each in cells[1].outputs[:-1]} <= {"stream", "display_data"}
    error = cells[2].outputs[-1]
    assert (error.output_type, error.ename) == ("error", "JobError")
    assert "return 1 / nothing" in error.evalue  # the cell's own line
    assert "ZeroDivisionError" in error.evalue


def test_progress_is_one_line_and_an_interrupt_stops_the_job(notebook, tmp_path):
    (cell,) = notebook(
        """
import fleetrun
def train():
    import pathlib, time
    from trainers import progress
    try:
        for step in range(100_000):
            progress.report(step=step, loss=0.5)
            time.sleep(0.01)
    finally:
        pathlib.Path("saved").touch()
fleetrun.run(train)""",
        interrupt=True,
    )
    (shown,) = progress_of(cell)
    assert "ended | step" in shown
    assert cell.outputs[-1].ename == "KeyboardInterrupt"
    assert (tmp_path / "saved").exists()
