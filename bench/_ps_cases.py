"""The rows of the parameter servers' table: what is trained how, and what is wanted of ours. Pure."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 1_000_001
"""Rows of Paddle's table in geo training, which takes no ids beyond a fixed size: there ids are folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration. `options` go to both scripts. `wanted`: examples/s of ours, and `ratio`: ours over
    Paddle's. `paddle_files`, `our_files`: the folder of the training files. `paddle_rows`: where Paddle is
    given the first so many examples only. `paddle`: whether it is measured at all. `piped`: through a Python
    reader; with --lines ours has a generator too. `note` is shown below the table.
    """

    name: str
    title: str
    options: tuple[str, ...]
    wanted: float
    ratio: float = 0.0
    dim: int = 9
    hidden: str = "128,64"
    batch_size: int = 512
    our_files: str = "slot"
    paddle_files: str = "slot"
    piped: str = ""
    paddle_rows: int | None = None
    paddle: bool = True
    note: str = ""

    @property
    def model(self) -> tuple[str, ...]:
        """Options that say what is computed, for all scripts."""
        return ("--dim", str(self.dim), "--hidden", self.hidden, "--batch_size", str(self.batch_size))


_GEO = ("--mode", "geo", "--k_steps", "100", "--in_memory")
_BIG = "400,400,400"

CASES = (
    Case(name="async", title="async, dim 9, 128x64, in memory", options=("--in_memory",),
         wanted=120_000, ratio=3),
    Case(name="queue", title="the same, streamed", options=(), wanted=120_000, ratio=3),
    Case(name="async400", title="async, dim 9, 400x400x400", options=("--in_memory",), hidden=_BIG,
         wanted=30_000, ratio=2.5),
    Case(name="batch64", title="async, 128x64, batch 64", options=("--in_memory",), batch_size=64,
         wanted=30_000),
    Case(name="geo", title="geo, k = 100, 128x64", options=_GEO, paddle_files="folded", wanted=150_000),
    Case(name="geo400", title="geo, k = 100, 400x400x400", options=_GEO, hidden=_BIG, paddle_files="folded",
         wanted=35_000),
    Case(name="pipe", title="async, 128x64, TSV through a Python pipe_command", options=(), piped="--blocks",
         our_files="tsv", paddle_files="tsv", wanted=30_000,
         note="Through a pipe_command Paddle reads with its MultiSlotDataGenerator, a line at a time; ours "
              "with trainers.examples.criteo_reader, in the row below with its MultiSlotDataGenerator."),
    Case(name="lines", title="the same, a line at a time", options=(), piped="--lines", our_files="tsv",
         paddle=False, wanted=0),
    Case(name="sync", title="sync, 128x64", options=("--mode", "sync", "--in_memory"), wanted=100_000,
         paddle_files="short", paddle_rows=20_480,
         note="Paddle's sync training is measured over 20 steps: the barrier of its server loses a wake-up "
              "sooner or later, and it hangs. So it has no AUC there."),
)  # fmt: skip

SERVER_CPU_WANTED = 5.0
"""Seconds per million examples, case `async`."""
AUC_WANTED = 0.003
"""How far test AUCs may be apart."""
