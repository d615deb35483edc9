"""The log of the GPUs, with made-up ones."""

import re
from itertools import pairwise

import pytest

from fleetrun.envs.contract import Mode, Role
from fleetrun.pod.gpu_log import GpuLog
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import ContainerSpec, PodSpec
from tests.support.disks import no_file_longer_than
from tests.support.pods import Clock


@pytest.fixture
def loop():
    made = Loop(Clock())
    yield made
    made.close()


def test_a_line_per_gpu_now_and_every_five_seconds(tmp_path, loop):
    samples = []

    def sample():
        samples.append(loop.clock())
        if len(samples) == 3:
            loop.stop()
        else:
            loop.after(0.0, lambda: loop.clock.advance(5.0))
        return ["gpu 0: 3 % used", "gpu 1: 5 % used"]

    GpuLog(tmp_path / "gpu.log", loop, sample).write()
    loop.run()
    lines = (tmp_path / "gpu.log").read_text().splitlines()
    assert len(lines) == 6
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d gpu 0: 3 % used", lines[0])
    assert all(later - sooner >= 5.0 for sooner, later in pairwise(samples))


def test_a_full_disk_ends_nothing(tmp_path, loop):
    log = GpuLog(tmp_path / "gpu.log", loop, lambda: ["gpu 0"])
    with no_file_longer_than(0):
        log.write()
    log.write()
    assert len((tmp_path / "gpu.log").read_text().splitlines()) == 1


@pytest.mark.parametrize("env", [{}, {"FLAGS_selected_gpus": "0"}])
def test_only_a_pod_that_uses_gpus_has_a_log(tmp_path, env):
    container = ContainerSpec(role=Role.TRAINER, rank=0, index=0, argv=("x",), env=env, log=tmp_path / "x")
    spec = PodSpec(name="x", job_id="x", mode=Mode.COLLECTIVE, containers=(container,), log_dir=tmp_path)
    assert spec.uses_gpus is bool(env)
