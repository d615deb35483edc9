"""Launches of the past, for commands to find: their records, logs and marks in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetrun.record.journal import Journal, journal_path

BEGAN = 1_795_330_000.0


class PastJob:
    """One launch in `folder/log`; `over` ends it. Time passes by `now`."""

    def __init__(self, folder: Path, job: str = "night", pod: str = "abcdef", trainers: int = 2) -> None:
        self.log_dir = folder / "log"
        self.log_dir.mkdir(exist_ok=True)
        self.now = BEGAN
        self.journal = Journal(journal_path(self.log_dir, job, pod), wall=lambda: self.now)
        self.logs = [self.log_dir / f"{job}.{pod}.trainer.{rank}.log" for rank in range(trainers)]
        self._marks = self.log_dir / f"{job}.{pod}.marks"
        self._marks.write_text(f"# {' '.join(f'trainer.{rank}' for rank in range(trainers))}\nrest 1\n")
        containers = [
            {"name": f"trainer.{rank}", "role": "trainer", "rank": rank, "index": rank, "log": str(log)}
            for rank, log in enumerate(self.logs)
        ]
        for log in self.logs:
            log.touch()
        self.event(
            "launch", job=job, pod=pod, host="here", cwd="/work", argv=["a b.py"], containers=containers
        )

    def event(self, event: str, **fields: Any) -> None:
        self.journal.write(event, **fields)

    def prints(self, rank: int, data: bytes) -> None:
        with self.logs[rank].open("ab") as file:
            file.write(data)
        with self._marks.open("a") as file:
            file.write(f"{self.now:.2f} {rank}:{self.logs[rank].stat().st_size}\n")

    def over(self, code: int = 0, **fields: Any) -> None:
        self.event("over", **{"code": code, "reason": "", "restarts": 0, "report": [], **fields})
        self.journal.close()
