"""What is seen of processes from outside, and in their logs."""

import os
import subprocess
from types import SimpleNamespace

import pytest

from fleetrun.control.usage import (
    Device,
    Families,
    Observer,
    Taken,
    devices,
    last_line,
    memory,
    processor,
    snapshot,
)

# 1 -> 10 -> 11 -> 12, and 20 beside them
NOW = {
    1: Taken(0, 5, 9.0, 1),
    10: Taken(1, 100, 4.0, 1000),
    11: Taken(10, 110, 2.0, 200),
    12: Taken(11, 120, 1.0, 30),
    20: Taken(1, 200, 7.0, 7),
}


def observer(monkeypatch, look, gpus, times):
    monkeypatch.setattr("fleetrun.control.usage.snapshot", look)
    monkeypatch.setattr("fleetrun.control.usage.devices", gpus)
    monkeypatch.setattr("fleetrun.control.usage.time", SimpleNamespace(monotonic=iter(times).__next__))
    return Observer()


@pytest.mark.parametrize(
    ("pid", "pids"), [(10, [10, 11, 12]), (12, [12]), (20, [20]), (99, [])],
)  # fmt: skip
def test_a_process_and_all_below_it(pid, pids):
    assert Families(NOW).of(pid) == pids


def test_pids_that_came_again_while_they_were_read():
    assert Families({10: Taken(11, 1, 0.0, 0), 11: Taken(10, 2, 0.0, 0)}).of(10) == [10, 11]


def test_what_all_of_them_take():
    assert memory([10, 11, 12], NOW) == 1230


@pytest.mark.parametrize(
    ("before", "seconds", "percent"),
    [
        (NOW, 1.0, 0.0),
        ({10: Taken(1, 100, 3.5, 0), 11: Taken(10, 110, 1.5, 0), 12: NOW[12]}, 0.5, 200.0),
        ({10: NOW[10], 11: NOW[11]}, 2.0, 50.0),  # one that was not there before
        ({**NOW, 12: Taken(11, 3, 500.0, 0)}, 1.0, 100.0),  # another had its pid
        (NOW, 0.0, None),
    ],
)
def test_the_share_of_a_processor(before, seconds, percent):
    assert processor([10, 11, 12], before, NOW, seconds) == percent


def test_this_process_is_seen():
    seen = snapshot()
    assert seen[os.getpid()].parent == os.getppid()
    assert seen[os.getpid()].memory > 1 << 20
    child = subprocess.Popen(["sleep", "600"])
    try:
        assert child.pid in Families(snapshot()).of(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_processes_that_cannot_be_read_are_left_out(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "stat").write_text("2 (odd) name) S 1 2")
    (tmp_path / "self").mkdir()
    (tmp_path / "3").mkdir()
    fields = ["S", "1", *"0" * 9, "100", "50", "0", "0", "0", "0", "0", "0", "777", "0", "2", *"0" * 30]
    (tmp_path / "3" / "stat").write_text(f"3 (a) b (c)) {' '.join(fields)}")
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert snapshot(tmp_path) == {3: Taken(1, 777, 150 / ticks, 2 * page)}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", ""),
        (b"\n\n  \n", ""),
        (b"one\ntwo\n", "two"),
        (b"one\ntwo", "two"),
        (b"one\n\n\n", "one"),
        (b"10%\r50%\r90%\r", "90%"),
        (b"\0\0\0", ""),
        ("naïve\n".encode(), "naïve"),
        (b"\xff\xfe\n", "\\xff\\xfe"),
        (b"begin\n" + b"x" * 100_000, "x" * 500),
    ],
)
def test_the_last_line_of_a_log(tmp_path, data, line):
    (tmp_path / "log").write_bytes(data)
    assert last_line(tmp_path / "log") == line


def test_what_is_no_log_has_none(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "loop", tmp_path / "none"):
        assert last_line(path) == ""


# ---- GPUs


class NVMLError(Exception):
    pass


def nvml(broken: int = -1):
    """Two GPUs, on which process 10 and somebody else compute."""

    def handle(number: int) -> int:
        if number == broken:
            raise NVMLError("fell off the bus")
        return number

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetComputeRunningProcesses=lambda number: [
            SimpleNamespace(pid=10 if number == 0 else 99, usedGpuMemory=None if number else 4096)
        ],
        nvmlDeviceGetUtilizationRates=lambda number: SimpleNamespace(gpu=40 + number * 20),
        nvmlDeviceGetMemoryInfo=lambda number: SimpleNamespace(used=8192),
        nvmlDeviceGetUUID=lambda number: f"GPU-{number}{number}-5e",
    )


def test_gpus_are_read():
    assert devices(nvml) == {
        0: Device(40.0, 8192, {10: 4096}, "GPU-00-5e"),
        1: Device(60.0, 8192, {99: 0}, "GPU-11-5e"),
    }
    assert set(devices(lambda: nvml(broken=0))) == {1}
    assert devices(lambda: None) == {}


@pytest.mark.parametrize(
    ("gpus", "use", "taken"),
    [
        ("0", 40.0, 4096),
        ("1", 60.0, 8192),  # its processes are not told apart
        ("0,1", 50.0, 4096),
        ("", None, None),
        ("7", None, None),
        ("GPU-1234", None, None),
        ("GPU-11-5e", 60.0, 8192),
        ("GPU-0", 40.0, 4096),  # CUDA takes the beginning of a name too
    ],
)
def test_a_process_has_the_gpus_it_was_given(monkeypatch, gpus, use, taken):
    found = devices(nvml)
    watch = observer(monkeypatch, lambda: NOW, lambda: found, [1.0, 2.0])
    status = watch.complete({"containers": [{"name": "trainer.0", "pid": 10, "gpus": gpus}]})
    (one,) = status["containers"]
    assert (one["gpu"], one["gpu_memory"]) == (use, taken)
    assert (one["cpu"], one["memory"]) == (0.0, 1230)


@pytest.mark.parametrize("containers", [None, 7, [None, 3], [{"pid": "x", "log": 5}], [{}]])
def test_an_answer_of_another_form_is_completed_all_the_same(monkeypatch, containers):
    watch = observer(monkeypatch, lambda: NOW, dict, [1.0, 2.0])
    status = watch.complete({"containers": containers})
    assert all(each["cpu"] is None and each["last_line"] == "" for each in status["containers"])


def test_each_look_is_compared_with_the_one_before(monkeypatch):
    looks = [{10: Taken(1, 100, seconds, 0)} for seconds in (1.0, 2.0, 2.5)]
    watch = observer(monkeypatch, iter(looks).__next__, dict, [0.0, 1.0, 2.0])
    status = {"containers": [{"pid": 10}]}
    assert [watch.complete(status)["containers"][0]["cpu"] for _ in range(2)] == [100.0, 50.0]
