"""What the console says of a launch: configuration, failures, hangs and the failure report."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleetrun.console import narrator
from fleetrun.console.console import Console
from fleetrun.console.frames import folded, library_of, place_of
from fleetrun.console.narrator import (
    Narrator,
    error_line,
    failure_headline,
    failure_summary,
    format_failure,
    hang_places,
    hang_report,
)
from fleetrun.console.text import MASK, Tail, columns, parse_tail
from fleetrun.envs import channels
from fleetrun.envs.channels import ErrorRecord
from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.parsing import byte_size
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import banner as rows
from fleetrun.pod.container import Ended
from fleetrun.pod.events import HUNG, Failure, Hang, JobResult, Verdict
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.pod.process import Exit
from fleetrun.pod.spec import ContainerSpec, PodSpec
from tests.support.pods import spec_of

ROOT = Path(narrator.__file__).parents[2]

# ---- What is told of a failure while the job goes on.


class Lines:
    def __init__(self):
        self.text = ""

    def write(self, data):
        self.text += data.decode()


def test_words_of_a_script_do_nothing_to_a_terminal(tmp_path):
    failed, before = (spec_of(tmp_path, "exit 3", rank=rank) for rank in (0, 1))
    ended = Ended(spec=failed, exit=Exit(3), pid=1, started=1.0, ended=2.0, attempt=0)
    record = ErrorRecord("ValueError: \x1b[2Jbad\nand more", "", 1.0)
    restart = Restart(after=0.0, number=1, limit=3)
    failure = Failure(ended=ended, decision=restart, earlier=((before, record),), alive=1)
    pod = PodSpec(name="abcdef", job_id="j", mode=Mode.COLLECTIVE, containers=(), log_dir=tmp_path)
    lines = Lines()
    Narrator(Console(lines, lines), pod, lambda: None).handle(failure)
    assert "; trainer 1 had failed before: ValueError: bad; restart 1 of 3" in lines.text
    assert lines.text.count("\n") == 1


# ---- The first lines of a launch, as in the documents that users come from.


def container(role, rank, **env):
    log = Path("/srv/log") / f"{role}.{rank}.log"
    return ContainerSpec(role=role, rank=rank, index=rank, argv=("x",), env=env, log=log)


@pytest.fixture
def spec():
    return PodSpec(
        name="evjsyn",
        job_id="default",
        mode=Mode.PS,
        log_dir=Path("/srv/log"),
        containers=(
            container(Role.SERVER, 0, TRAINING_ROLE="PSERVER"),
            container(Role.TRAINER, 0, PADDLE_TRAINER_ID="0", HOME="/root", FLEETRUN_TOKEN="x"),
            container(Role.TRAINER, 1, PADDLE_TRAINER_ID="1"),
        ),
    )


SEED = """\
-----------  Configuration  ----------------------
devices: None
elastic_level: -1
elastic_timeout: 30
gloo_port: 6767
host: None
job_id: default
legacy: False
log_dir: log
log_level: INFO
master: None
max_restart: 3
nnodes: 1
nproc_per_node: None
rank: -1
run_mode: ps  (from --server_num)
server_num: 1  (from --server_num)
servers: \n\
trainer_num: 2  (from --trainer_num)
trainers: \n\
training_script: train.py
training_script_args: []
with_gloo: 1
--------------------------------------------------
"""
"""Seed 002, lines 154 to 177; its run_mode says collective, which the job line after it belies."""


def test_the_configuration_of_the_document():
    resolved = resolve(read(["--server_num=1", "--trainer_num=2", "train.py"]), {})
    assert "\n".join(narrator.configuration_lines(rows(resolved))) + "\n" == SEED


def test_what_is_no_default_says_where_it_comes_from():
    resolved = resolve(
        read(["--nproc-per-node", "4", "train.py", "--lr", "0.1"]), {"PADDLE_LOG_DIR": "/logs"}
    )
    lines = narrator.configuration_lines(rows(resolved))
    assert "nproc_per_node: 4  (from --nproc-per-node)" in lines
    assert "log_dir: /logs  (from PADDLE_LOG_DIR)" in lines
    assert "training_script_args: ['--lr', '0.1']" in lines
    assert "rank: -1" in lines


def test_the_job_and_its_pod(spec):
    line = narrator.job_line("default", Mode.PS, (1, 1))
    assert line == "Job: default, mode ps, replicas 1[1:1], elastic False"
    assert narrator.pod_line("Run", spec, "ready") == "Run Pod: evjsyn, replicas 3, status ready"
    assert (
        narrator.pod_line("Watching", spec, "running") == "Watching Pod: evjsyn, replicas 3, status running"
    )


def test_what_runs_where_and_with_which_settings(spec):
    line = narrator.pod_facts(spec, "train.py", "gpu", [], "log")
    assert line == "1 server, 2 trainers of train.py on CPU; logs: log/default.evjsyn.*.log"
    unbound = narrator.pod_facts(spec, "train.py", "gpu", ["0"], "log")
    assert " of train.py on gpu 0, not bound to any process; " in unbound
    bound = dataclasses.replace(spec.containers[1], env={"FLAGS_selected_gpus": "0"})
    spec = dataclasses.replace(spec, containers=(spec.containers[0], bound, spec.containers[2]))
    assert " of train.py on gpu 0,1; " in narrator.pod_facts(spec, "train.py", "gpu", ["0", "1"], "log")
    uuids = [f"GPU-{number:08}" for number in range(8)]
    assert narrator.pod_facts(spec, "x", "gpu", uuids, "log").count("GPU-") == 3
    rows = [("servers", "h:1," * 99, "--servers"), ("timeout", "9", "job.toml:3")]
    assert narrator.settings_line(rows) == (
        f"Settings: servers={('h:1,' * 99)[:37]}..., timeout=9 (job.toml:3) (-v shows more)"
    )
    assert "and 8 more (-v" in narrator.settings_line(rows * 10)


def test_an_elastic_job():
    line = narrator.job_line("ads", Mode.COLLECTIVE, (2, 4))
    assert line == "Job: ads, mode collective, replicas 4[2:4], elastic True"


def test_a_table_for_the_first_of_each_role(spec):
    lines = narrator.environment_tables(spec)
    heads = [line for line in lines if line.startswith("Local")]
    assert heads == [
        "Local ps start 1 processes. First process distributed environment info (Only For Debug):",
        "Local trainer start 2 processes. First process distributed environment info (Only For Debug):",
    ]
    text = "\n".join(lines)
    assert "PADDLE_TRAINER_ID" in text
    assert "HOME" not in text, "only what the launcher sets"
    assert MASK in text


def test_a_long_value_shows_its_start(spec):
    endpoints = ",".join(f"127.0.0.1:{port}" for port in range(6000, 6064))
    env = {"PADDLE_TRAINER_ENDPOINTS": endpoints}
    long = PodSpec(
        name="x",
        job_id="x",
        mode=Mode.PS,
        log_dir=spec.log_dir,
        containers=(container(Role.TRAINER, 0, **env),),
    )
    (row,) = [line for line in narrator.environment_tables(long) if "PADDLE_TRAINER_ENDPOINTS" in line]
    assert row == f"    PADDLE_TRAINER_ENDPOINTS={endpoints[:37]}..."


# ---- What a person reads of a hang.

SPEC = ContainerSpec(role=Role.TRAINER, rank=0, index=0, argv=("x",), env={}, log=Path("/job/log/x.log"))
LINES = ("trainer 2: load (train.py:7)", "trainers 0, 1, 3: wait (train.py:3)")


def hang(*stacks: str, decision: GiveUp | Restart | None = None) -> Hang:
    why = decision or GiveUp("--max_restart is 3")
    return Hang(silent_for=600.0, containers=(SPEC,), decision=why, stacks=stacks)


def test_the_report():
    assert hang_report(hang(*LINES), 3, 200) == [
        "=" * 80,
        "Hang: no trainer printed or reported anything for 600 s (--hang_timeout); --max_restart is 3, "
        "after 3 restarts",
        "  trainer 2: load (train.py:7)",
        "  trainers 0, 1, 3: wait (train.py:3)",
        "Logs, with the stacks: /job/log",
        "no trainer printed or reported anything for 600 s (--hang_timeout): trainer 2: load (train.py:7)",
    ]


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_a_terminal(width: int):
    long = f"trainers 0-7: {'wait ' * 60}(train.py:3)"
    assert max(map(columns, hang_report(hang(long), 0, width)[:-1])) <= width


def test_without_stacks_it_says_so():
    assert hang_places(hang(), 80) == ["  The places of the processes are unknown."]


def test_nothing_that_a_terminal_obeys_comes_through():
    assert "\x1b" not in "\n".join(hang_report(hang("trainer 0: \x1b[2Jwait"), 0, 80))


@pytest.mark.parametrize(
    ("decision", "reason"),
    [(GiveUp("restarts are off"), "; restarts are off"), (Restart(0.0, 1, 3), "")],
)
def test_the_headline_ends_alike_everywhere_and_the_reason_says_more(decision, reason: str):
    said = hang(decision=decision)
    assert said.headline.endswith(HUNG)
    assert said.reason == said.headline + reason


# ---- The report of a failure: what it says, on one screen.

NOON = time.mktime((2022, 5, 18, 12, 0, 0, 0, 0, -1))
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in <module>',
    "    main()",
    "    ^^^^^^",
    "ValueError: bad input",
)


@pytest.fixture
def ended(tmp_path):
    def make(code=3, rank=1, role=Role.TRAINER, **changes):
        spec = ContainerSpec(
            role=role,
            rank=rank,
            index=rank,
            argv=("x",),
            env={},
            log=tmp_path / f"default.evjsyn.{role}.{rank}.log",
        )
        known = {
            "spec": spec,
            "exit": Exit(code),
            "pid": 4711,
            "started": NOON - 2.5,
            "ended": NOON,
            "attempt": 0,
        }
        return Ended(**{**known, **changes})

    return make


NOTHING = Tail(())


def lines_of(cause, tail=NOTHING, *, width=100, log_full=False, **result):
    return format_failure(
        JobResult(code=3, cause=cause, **result), tail, width=width, log_full=log_full, hints=()
    )


# ---- one failure in few words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "trainer 1 exited with code 3"),
        ({"code": -9}, "trainer 1 was killed by SIGKILL"),
        ({"code": -11}, "trainer 1 was killed by SIGSEGV"),
        ({"role": Role.SERVER, "rank": 0}, "server 0 exited with code 3"),
        ({"role": Role.SERVER, "code": 0}, "server 1 exited with code 0 before the trainers had ended"),
        (
            {"code": -9, "out_of_memory": True},
            "trainer 1 was killed by SIGKILL for lack of memory (the kernel's OOM killer)",
        ),
        ({"code": -9, "asked": 15}, "trainer 1 failed and did not end by itself"),
        ({"code": -15, "asked": 15}, "trainer 1 failed and did not end by itself"),
        ({"code": 4, "asked": 15}, "trainer 1 exited with code 4"),
        (
            {"code": -15, "asked": 15, "record": ErrorRecord("ValueError: bad", "", 1.0)},
            "trainer 1 raised an exception, and was stopped before it had ended",
        ),
    ],
)
def test_headline(ended, changes, words):
    assert failure_headline(ended(**changes)) == words


def test_a_sigkill_of_unknown_origin(ended):
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    killed = ended(code=-9, peak_memory=memory // 2)
    peak = f"peak memory {byte_size(memory // 2)}"
    lines = "\n".join(lines_of(killed))
    assert peak in lines
    assert "Hint: fleetrun did not send this SIGKILL. Probably memory ran out" in lines
    assert lines.endswith(f"perhaps out of memory, {peak}")
    assert f"perhaps out of memory, {peak}" in failure_summary(killed, NOTHING)


def test_a_sigkill_of_a_small_process_is_not_taken_for_lack_of_memory(ended):
    killed = ended(code=-9, peak_memory=1 << 20)
    lines = lines_of(killed)
    assert "Probably memory ran out" not in "\n".join(lines)
    assert any(line.startswith("Hint: fleetrun did not send this SIGKILL") for line in lines)
    assert lines[-1] == "trainer 1 was killed by SIGKILL"
    assert failure_summary(killed, NOTHING) == "trainer 1 was killed by SIGKILL after 2.5 s"


BOOM = ("Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "RuntimeError: boom")


@pytest.mark.parametrize("wrote_it_down", [True, False])
def test_all_lines_of_a_message_belong_to_the_traceback(ended, wrote_it_down):
    record = ErrorRecord("RuntimeError: boom\nsecond line", "\n".join([*BOOM, "second line"]), NOON)
    after = ("second line", "", "closing")
    failed = ended(code=1, record=record if wrote_it_down else None)
    lines = lines_of(failed, Tail((), BOOM, after))
    start = lines.index("  RuntimeError: boom")
    assert lines[start + 1 : start + 4] == ["  second line", "After that:", "  closing"]
    assert lines[-1] == "trainer 1: RuntimeError: boom at train.py:3"


def test_a_place_is_named_once(ended):
    traceback = ('  File "/srv/syn.py", line 2', "    x = = 1", "SyntaxError: invalid syntax")
    record = ErrorRecord("SyntaxError: invalid syntax (syn.py, line 2)", "\n".join(traceback), NOON)
    assert (
        lines_of(ended(code=1, record=record))[-1]
        == "trainer 1: SyntaxError: invalid syntax (syn.py, line 2)"
    )


def test_a_sigkill_of_the_oom_killer(ended):
    lines = "\n".join(lines_of(ended(code=-9, peak_memory=300 << 20, out_of_memory=True)))
    assert "peak memory 300 MiB" in lines
    assert "Hint" not in lines


def test_a_crash_in_paddles_own_code_is_told_by_its_summary(ended):
    rule = "----------------------"
    said = ["C++ Traceback (most recent call last):", rule, "No stack trace in paddle", "", rule,
            "Error Message Summary:", rule, "FatalError: `Segmentation fault` is detected by the system.",
            "  [TimeInfo: *** Aborted at 1763896000 ***]"]  # fmt: skip
    assert "FatalError: `Segmentation fault`" in failure_summary(ended(code=-11), parse_tail([rule, *said]))


@pytest.mark.parametrize("changes", [{"code": -9, "asked": 15}, {"code": -11}, {"code": 1}])
def test_other_ends_tell_no_memory(ended, changes):
    lines = "\n".join(lines_of(ended(peak_memory=3 << 30, **changes)))
    assert "peak memory" not in lines
    assert "did not send" not in lines


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (2.5, "2.5 s"),
        (125, "2m05s"),
        (-1, "0.0 s"),
    ],
)
def test_how_long_it_took(ended, seconds, words):
    assert (
        failure_summary(ended(started=NOON - seconds), Tail(()))
        == f"trainer 1 exited with code 3 after {words}"
    )


def test_the_line_of_a_failure_that_is_followed_by_a_restart(ended):
    assert failure_summary(ended(), Tail((), TRACEBACK)) == (
        "trainer 1 exited with code 3 after 2.5 s: ValueError: bad input"
    )


def test_the_error_is_what_the_process_wrote_of_itself_else_what_is_in_its_log(ended):
    record = ErrorRecord("KeyError: 'x'\nand more", "Traceback", NOON)
    assert error_line(ended(record=record), Tail((), TRACEBACK)) == "KeyError: 'x'"
    assert error_line(ended(), Tail((), TRACEBACK)) == "ValueError: bad input"
    assert error_line(ended(), Tail(("no traceback",))) == ""


# ---- the report


def test_an_error_that_says_everything_is_shown_in_place_of_a_traceback(ended):
    record = ErrorRecord("DamagedError: the file x", "", NOON, restart_helps=False)
    lines = lines_of(ended(record=record), Tail(("last line",)))
    assert "  DamagedError: the file x" in lines
    assert "  last line" not in lines


def test_the_end_of_a_server_comes_before_that_of_the_trainer_that_failed_by_it(ended):
    lines = lines_of(ended(), began=ended(ended=NOON - 1))
    assert lines[1] == "Began with: trainer 1 exited with code 3 at 11:59:59.000"
    assert lines[2].startswith("First failure: ")


def test_restarts_of_other_processes_are_theirs(ended):
    server = ended(rank=0, role=Role.SERVER)
    lines = lines_of(ended(), restarts=2, forgiven=(server, server))
    assert "after 2 restarts of server 0" in lines[2]
    again = ended(attempt=2)
    assert "after 2 restarts" in lines_of(again, restarts=2, forgiven=(again, ended(rank=0)))[2]
    assert " of trainer" not in lines_of(again, restarts=2, forgiven=(again, ended(rank=0)))[2]


def test_it_says_who_how_when_and_where(ended):
    lines = lines_of(ended(), Tail(("epoch 1",)), reason="--max_restart is 3", restarts=3)
    text = "\n".join(lines)
    assert lines[1] == "First failure: trainer 1 exited with code 3, after 2.5 s"
    assert "pid 4711, at 12:00:00.000, after 3 restarts (--max_restart is 3)" in text
    assert "Its last lines:\n  epoch 1\n" in text
    assert lines[-2].startswith("Log: ")
    assert lines[-2].endswith("default.evjsyn.trainer.1.log")


NATIVE = (
    "Exception raised from run at /pytorch/ProcessGroupNCCL.cpp:2125 (most recent call first):",
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f in /site-packages/torch/lib/libc10.so)",
    "frame #1: <unknown function> + 0x68ef03 (0x7f in /site-packages/torch/lib/libtorch_cuda.so)",
    "",
)


def test_torchs_watchdog_is_quoted_and_its_calls_in_cpp_are_not(ended):
    said = "[PG ID 1 PG GUID 1 Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6)"
    aborted = "terminate called after throwing an instance of 'c10::DistBackendError'"
    log = ["step 5", *NATIVE, aborted, f"  what():  {said}", *NATIVE, *NATIVE]
    lines = lines_of(ended(-6), parse_tail(log))
    assert lines[-1] == f"trainer 1 was killed by SIGABRT: {said}"
    assert f"  {aborted}" in lines
    assert not any("frame #" in line or "most recent call first" in line for line in lines)
    assert any("`fleetrun why` names this rank" in line for line in lines)


def test_what_only_looks_like_calls_in_cpp_is_shown(ended):
    lines = lines_of(
        ended(1), parse_tail([*TRACEBACK[:-1], "ValueError: cannot decode", "frame #1: corrupt"])
    )
    assert "  frame #1: corrupt" in lines


def test_of_an_exception_at_whose_end_threads_abort_the_exception_is_the_cause(ended):
    log = [*TRACEBACK, "terminate called without an active exception"]
    line = lines_of(ended(-6), parse_tail(log))[-1]
    assert line == "trainer 1 was killed by SIGABRT: ValueError: bad input at train.py:7"


NCCL = [
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, invalid usage",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "Last error:",
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60",
]


@pytest.mark.parametrize("wrote_it_down", [True, False])
def test_of_an_error_of_nccl_the_last_line_is_the_cause(ended, wrote_it_down):
    traceback = [TRACEBACK[0], '  File "train.py", line 7, in <module>', "    main()", *NCCL]
    record = ErrorRecord("\n".join(NCCL), "\n".join([*traceback, *NATIVE]), NOON)
    tail = parse_tail([f"[rank0]: {line}" for line in traceback])
    lines = lines_of(ended(1, record=record if wrote_it_down else None), tail)
    assert lines[-1] == f"trainer 1: torch.distributed.DistBackendError: {NCCL[-1]} at train.py:7"
    assert "After that:" not in lines
    assert not any("frame #" in line for line in lines)


def test_its_traceback_is_the_one_in_the_log(ended):
    lines = lines_of(ended(), Tail(("noise",) * 100, TRACEBACK, ("", "closing")))
    assert "  ValueError: bad input" in lines
    assert "  noise" not in lines
    assert lines[lines.index("After that:") + 1] == "  closing"
    assert not any("^^^" in line for line in lines)


def test_or_the_one_that_the_process_wrote_down(ended):
    record = ErrorRecord("KeyError: 'x'", "Traceback (most recent call last):\nKeyError: 'x'\n", NOON - 1.25)
    lines = lines_of(ended(record=record), Tail((), TRACEBACK))
    assert "  KeyError: 'x'" in lines
    assert "  ValueError: bad input" not in lines
    assert any("at 11:59:58.750" in line for line in lines)


def test_what_a_process_wrote_does_nothing_to_the_terminal(ended):
    record = ErrorRecord("\x1b[2Jboom \ud83d", "Traceback\n  \x1b[2J\nboom \ud83d", NOON)
    text = "\n".join(lines_of(ended(record=record)))
    assert "\x1b" not in text + error_line(ended(record=record), Tail(()))
    assert text.encode()


def test_silence(ended):
    assert "The process printed nothing." in lines_of(ended())


def test_chinese(ended):
    assert "  ValueError: 数据为空" in lines_of(ended(), Tail((), (*TRACEBACK[:-1], "ValueError: 数据为空")))


def test_those_that_failed_after_it(ended):
    others = tuple(ended(code=1, rank=rank, ended=NOON + rank) for rank in (2, 3))
    text = " ".join(lines_of(ended(), others=others))
    assert (
        "Then: trainer 2 exited with code 1 at 12:00:02.000; trainer 3 exited with code 1 at 12:00:03.000"
        in text
    )


def test_not_all_of_many_others(ended):
    others = tuple(ended(code=1, rank=rank) for rank in range(2, 64))
    text = " ".join(" ".join(lines_of(ended(), others=others)).split())
    assert "trainer 5" in text
    assert "trainer 6" not in text
    assert "and 58 more" in text


@pytest.mark.parametrize(
    ("sign", "hint"),
    [
        ("OSError: [Errno 98] Address already in use", "SO_REUSEADDR"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "batch"),
        ("OSError: [Errno 28] No space left on device", "df -h"),
    ],
)
def test_hints(ended, sign, hint):
    assert any(
        line.startswith("Hint: ") and hint in line for line in lines_of(ended(), Tail((sign,)), width=200)
    )
    assert any(hint in line for line in lines_of(ended(record=ErrorRecord(sign, "", NOON)), width=200))


def test_no_hint_without_a_sign(ended):
    assert not any(line.startswith("Hint") for line in lines_of(ended(), Tail(("fine",))))


def test_a_full_disk_is_said(ended):
    assert any("The disk of" in line for line in lines_of(ended(), log_full=True, width=300))


LONG = (
    TRACEBACK[0],
    *(f'  File "/srv/a/long/path/to/some/module_{number}.py", line {number}, in f' for number in range(200)),
    "RecursionError: " + "maximum recursion depth exceeded and so on " * 20,
)


def test_a_long_traceback_keeps_both_its_ends(ended):
    lines = lines_of(ended(), Tail((), LONG))
    assert lines[3] == f"  {TRACEBACK[0]}"
    assert any("module_199.py" in line for line in lines)
    assert any("lines ..." in line for line in lines)
    assert any(line.startswith("  RecursionError: maximum") for line in lines)


WORST = {
    "traceback": Tail(("x" * 1000,) * 50, LONG, ("one " * 100,) * 50),
    "log": Tail(tuple("word " * 50 + str(number) for number in range(500))),
    "one enormous line": Tail(("word " * 20_000,)),
    "lines without end": Tail(("x",) * 30_000),
}


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("tail", WORST.values(), ids=WORST)
def test_one_screen(ended, tail, width):
    others = tuple(ended(code=1, rank=rank) for rank in range(2, 64))
    lines = lines_of(ended(), tail, width=width, others=others, reason="--max_restart is 3", restarts=3)
    assert len(lines) <= 36
    long = [line for line in lines[:-1] if len(line) > width and ": /" not in line]
    assert len(lines[-1]) <= 160
    assert not [line for line in long if " " in line.strip()], "only a word that is too long may be so"


SITE = "/home/me/.venv/lib/python3.11/site-packages/torch/nn/modules"
IN_TORCH = (
    TRACEBACK[0],
    '  File "<frozen runpy>", line 198, in _run_module_as_main',
    '  File "/usr/lib/python3.11/runpy.py", line 88, in _run_code',
    "    exec(code, run_globals)",
    '  File "/job/train.py", line 43, in <module>',
    "    main()",
    '  File "/job/train.py", line 36, in main',
    "    loss = model(x)",
    f'  File "{SITE}/module.py", line 1553, in _wrapped_call_impl',
    "    return self._call_impl(*args, **kwargs)",
    f'  File "{SITE}/linear.py", line 134, in forward',
    "    return F.linear(input, self.weight, self.bias)",
    "           ^^^^^^^^",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x784 and 128x10)",
)
CAUSE = (
    "trainer 1: RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x784 and 128x10) at train.py:36"
)


def test_a_cell_of_a_notebook_goes_by_its_function():
    trace = [
        "Traceback:",
        '  File "/tmp/ipykernel_19636/2731293513.py", line 2, in train',
        "    raise ValueError",
    ]
    assert place_of(trace) == "line 2 of the cell of train"


def test_the_scripts_own_frames_are_shown_and_those_of_libraries_folded(ended):
    lines = lines_of(ended(code=1), Tail((), IN_TORCH))
    assert lines[3:11] == [
        f"  {TRACEBACK[0]}",
        "    ... 2 frames of runpy: _run_code in runpy.py:88",
        '    File "/job/train.py", line 43, in <module>',
        "      main()",
        '    File "/job/train.py", line 36, in main',
        "      loss = model(x)",
        "    ... 2 frames of torch: forward in torch/nn/modules/linear.py:134",
        f"  {IN_TORCH[-1]}",
    ]
    assert lines[-2].startswith("Whole traceback: ")
    assert lines[-1] == CAUSE


def test_the_report_of_a_usual_failure_fits_an_old_terminal_with_its_cause_at_the_end(ended):
    record = ErrorRecord(IN_TORCH[-1], "\n".join([*IN_TORCH[:4], *IN_TORCH[4:8] * 9, *IN_TORCH[8:]]), NOON)
    then = (ended(rank=2),)
    lines = lines_of(ended(record=record), others=then, reason="--max_restart is 3", restarts=3, width=80)
    assert len(lines) + 2 <= 24
    assert any("line 36, in main" in line for line in lines)
    assert lines[-1] == CAUSE


@pytest.mark.parametrize(
    ("changes", "tail", "cause"),
    [
        ({"code": 3}, NOTHING, "trainer 1 exited with code 3"),
        ({"code": 2}, Tail(("usage: train.py", "train.py: error: no --lr", ""), ()),
         "trainer 1 exited with code 2; its last line: train.py: error: no --lr"),
        ({"code": -15}, Tail(("step 3",), ()), "trainer 1 was killed by SIGTERM"),
        ({"code": 3}, Tail((), TRACEBACK),
         "trainer 1 exited with code 3: ValueError: bad input at train.py:7"),
        ({"code": 1}, Tail((), TRACEBACK), "trainer 1: ValueError: bad input at train.py:7"),
        ({"code": -9, "peak_memory": 3 << 30}, Tail((), TRACEBACK),
         "trainer 1 was killed by SIGKILL, perhaps out of memory, peak memory 3 GiB"),
        ({"code": -11}, NOTHING, "trainer 1 was killed by SIGSEGV"),
        ({"code": 1}, Tail((), (*TRACEBACK[:-1], "ValueError: " + "x " * 999)),
         "trainer 1: ValueError: " + "x " * 60 + "  ... at train.py:7"),
        ({"code": 1}, Tail((), (TRACEBACK[0], IN_TORCH[8], "KeyError: 1")),
         "trainer 1: KeyError: 1 at module.py:1553"),
        ({"code": 1}, Tail((), (TRACEBACK[0], '  File "a.py", line 3', "    x = = 3", "SyntaxError: bad")),
         "trainer 1: SyntaxError: bad at a.py:3"),
    ],
)  # fmt: skip
def test_the_last_line_is_the_cause(ended, changes, tail, cause):
    assert " ".join(lines_of(ended(**changes), tail)[-1].split()) == " ".join(cause.split())


LOADER = """\
Traceback (most recent call last):
  File "/job/train.py", line 7, in <module>
    for x in loader:
  File "/usr/lib/python3.11/site-packages/torch/_utils.py", line 794, in reraise
    raise exception
KeyError: Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch
    data = self.dataset[index]
  File "/job/train.py", line 3, in __getitem__
    return rows["missing"]
KeyError: 'missing'
"""
SPAWN = """\
Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    mp.spawn(f, nprocs=2)
torch.multiprocessing.spawn.ProcessRaisedException: \n
-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/usr/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/job/train.py", line 3, in f
    rows["missing"]
KeyError: 'missing'
"""
ELASTIC = """\
Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    launch()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  traceback : Traceback (most recent call last):
    File "/job/train.py", line 3, in f
      rows["missing"]
  KeyError: 'missing'
\x20\x20
============================================================
"""
SCRIPTED = """\
Traceback (most recent call last):
  File "/job/train.py", line 3, in <module>
    f(x)
RuntimeError: The following operation failed in the TorchScript interpreter.
Traceback of TorchScript (most recent call last):
  File "/job/train.py", line 3, in f
    return x @ x
           ~~~~~ <--- HERE
KeyError: 'missing'
"""
LATE = "\nthe disk is gone\nmore"
WAYS = {
    "data loader": LOADER,
    "mp.spawn": SPAWN,
    "torchrun inside": ELASTIC,
    "TorchScript": SCRIPTED,
    "an empty line first": BOOM[0] + '\n  File "/job/train.py", line 3\nOSError: \n' + LATE,
    "a list": BOOM[0] + '\n  File "/job/train.py", line 3\nOSError: 2 errors:\n\ta.bin is missing\n',
    "nothing but an empty line": BOOM[0] + '\n  File "/job/train.py", line 3\nOSError: \n\n',
}
SAID = {
    "an empty line first": "OSError: the disk is gone",
    "a list": "OSError: 2 errors: a.bin is missing",
    "nothing but an empty line": "OSError",
}


@pytest.mark.parametrize("wrote_it_down", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_cause_of_an_exception_that_names_another_or_begins_with_an_empty_line(ended, way, wrote_it_down):
    text = WAYS[way]
    message = re.sub(r"^Traceback .*\n(?: .*\n)+", "", text)
    written = channels.read_error(channels.write_error(message, text, 1).encode(), NOON)
    failed = ended(code=1, record=written if wrote_it_down else None)
    lines = lines_of(failed, parse_tail(text.splitlines()))
    assert lines[-1] == f"trainer 1: {SAID.get(way, KEY_ERROR)} at train.py:3"


KEY_ERROR = "KeyError: 'missing'"
RAISE = "def f(error):\n    try:\n        raise error\n    except Exception:\n        return error\n"
GROUPS = {
    "one": "raise ExceptionGroup('many', [f(KeyError('missing')), f(OSError('late'))])",
    "nested": "raise ExceptionGroup('many', [ExceptionGroup('two', [f(KeyError('missing'))])])",
    "never raised": "raise ExceptionGroup('many', [KeyError('missing'), f(OSError('late'))])",
    "of a chain": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n"
    "    raise ExceptionGroup('many', [f(KeyError('missing'))]) from error",
}


@pytest.mark.parametrize("wrote_it_down", [True, False])
@pytest.mark.parametrize("group", GROUPS)
def test_the_cause_of_a_group_is_its_first_exception(ended, tmp_path, group, wrote_it_down):
    text = printed(RAISE + GROUPS[group], tmp_path)
    written = channels.read_error(
        channels.write_error("ExceptionGroup: many (2 sub-exceptions)", text, 1).encode(), NOON
    )
    failed = ended(code=1, record=written if wrote_it_down else None)
    last = lines_of(failed, parse_tail(["epoch 1", *text.splitlines(), "closing"]))[-1]
    place = 10 if group == "of a chain" else 6
    assert last == f"trainer 1: {KEY_ERROR} at script.py:{place if group == 'never raised' else 3}"


def printed(code: str, folder: Path) -> str:
    """What Python prints of the exception that ends this script."""
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False).stderr


ASIDES = {
    "__del__": "class A:\n    def __del__(self):\n        1 / 0\na = A()\n",
    "atexit": "import atexit\natexit.register(lambda: 1 / 0)\n",
    "logging": "import atexit, logging\natexit.register(lambda: logging.error('%d', 'x'))\n",
}


@pytest.mark.parametrize("aside", ASIDES)
def test_what_python_prints_at_its_exit_is_not_the_cause(ended, tmp_path, aside):
    text = printed(ASIDES[aside] + "raise KeyError('missing')", tmp_path)
    last = lines_of(ended(code=1), parse_tail(text.splitlines()))[-1]
    assert last.startswith(f"trainer 1: {KEY_ERROR} at script.py:")


def test_the_cause_of_a_cause(ended):
    began = ended(role=Role.SERVER, rank=0, code=-9)
    record = ErrorRecord("ServerError: server 0 was restarted", "", NOON)
    last = lines_of(ended(code=1, record=record), began=began)[-1]
    assert last == "server 0 was killed by SIGKILL; then trainer 1: ServerError: server 0 was restarted"
    verdict = Verdict(kind="dead", sentence="trainer 2 has not come. It is at x", ranks=(2,))
    assert lines_of(ended(), verdict=verdict)[-1] == "trainer 2 has not come"


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("train.py", ""),
        ("/home/me/lib/train.py", ""),
        ("/opt/conda/lib/python3.12/site-packages/numpy/core/x.py", "numpy"),
        ("/usr/lib/python3/dist-packages/yaml/x.py", "yaml"),
        ("/usr/lib/python3.11/threading.py", "threading"),
        ("<frozen importlib._bootstrap>", "importlib"),
        ("<string>", ""),
        (f"{ROOT}/trainers/fleet.py", "trainers"),
        (f"{ROOT}/trainers/examples/x.py", ""),
        (f"{ROOT}/train.py", ""),
    ],
)
def test_whose_code_a_file_is(path, library):
    assert library_of(path) == library


def test_a_traceback_of_libraries_only_is_shown_as_it_is():
    only = [TRACEBACK[0], *IN_TORCH[8:12], "KeyError: 1"]
    assert folded(only) == only


def test_a_record_changes_nothing_for_those_without(ended):
    assert dataclasses.replace(ended(), record=None).failed_at == NOON
