"""Lists of imports that a node publishes for the standbys of spares."""

import json
import zlib
from pathlib import Path

import pytest

from fleetrun.envs.channels import IMPORTS_SUFFIX, PROBE_VARIABLE
from fleetrun.envs.contract import Role
from fleetrun.pod.spec import ContainerSpec
from fleetrun.pod.standby import _packed, _unpacked


@pytest.fixture
def spec(tmp_path: Path) -> ContainerSpec:
    env = {PROBE_VARIABLE: str(tmp_path / "probe")}
    return ContainerSpec(
        role=Role.TRAINER, rank=0, index=0, argv=("python",), env=env, log=tmp_path / "trainer.0.log"
    )


def leave(spec: ContainerSpec, *modules) -> None:
    said = json.dumps({"pid": 1, "modules": modules})
    Path(spec.env[PROBE_VARIABLE] + IMPORTS_SUFFIX).write_text(said)


def test_a_list_goes_there_and_back(spec: ContainerSpec):
    torch, numpy = (
        ("torch", "/site-packages/torch.py", {"OMP_NUM_THREADS": "1"}),
        ("numpy", "/n.py", {"A": None}),
    )
    leave(spec, torch, numpy)
    assert _unpacked(_packed(spec)) == [torch, numpy]


@pytest.mark.parametrize("name", ["HF_TOKEN", "wandb_api_key", "DB_PASSWORD"])
def test_it_ends_before_the_first_secret(spec: ContainerSpec, name: str):
    leave(spec, ("a", "/a.py", {}), ("b", "/b.py", {name: "s3cret"}), ("c", "/c.py", {}))
    assert _unpacked(_packed(spec)) == [("a", "/a.py", {})]


def test_without_a_list_nothing_is_published(spec: ContainerSpec):
    assert _packed(spec) == b""


@pytest.mark.parametrize(
    "data",
    [b"", b"text", zlib.compress(b"{"), zlib.compress(b"[1]"), zlib.compress(b'[["a", "b", []]]')[:-6]],
)
def test_what_is_no_list_is_an_error(data: bytes):
    with pytest.raises(ValueError, match=r"imports|JSON|Expecting"):
        _unpacked(data)
