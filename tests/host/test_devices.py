"""Which accelerators a launcher may hand out, with made-up machines."""

from unittest.mock import patch

import pytest

from fleetrun.envs.contract import VISIBLE_VARIABLE
from fleetrun.errors import UsageError
from fleetrun.host.devices import choose, count_devices, detect


def found(value=None, *, present=4, kind="gpu"):
    variable = {
        "gpu": "CUDA_VISIBLE_DEVICES",
        "xpu": "XPU_VISIBLE_DEVICES",
        "npu": "ASCEND_RT_VISIBLE_DEVICES",
    }
    environ = {} if value is None else {variable[kind]: value}
    with patch("fleetrun.host.devices.count_devices", lambda asked: present if asked == kind else 0):
        return detect(kind, environ)


def choice(wanted, value):
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    return choose(wanted, found(value), "gpu", environ)


UUIDS = ("GPU-8f1d", "GPU-02ab")
MIGS = ("MIG-GPU-8f1d/1/0", "MIG-02ab")


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (None, ("0", "1", "2", "3")),
        ("0,1", ("0", "1")),
        ("3,1", ("3", "1")),
        (" 2 , 3 ", ("2", "3")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("0,9,1", ("0",)),
        (",".join(UUIDS), UUIDS),
        (",".join(MIGS), MIGS),
    ],
)
def test_what_the_variable_leaves(value, ids):
    assert found(value) == ids


@pytest.mark.parametrize("value", [None, "0,1", "GPU-8f1d", ""])
def test_a_machine_without_any(value):
    assert found(value, present=0) == ()


@pytest.mark.parametrize("kind", ["gpu", "xpu", "npu"])
def test_every_kind_has_its_own_variable(kind):
    assert found("1", kind=kind) == ("1",)
    other = "gpu" if kind != "gpu" else "xpu"
    with patch("fleetrun.host.devices.count_devices", lambda asked: 2):
        assert detect(kind, {VISIBLE_VARIABLE[other]: "1"}) == ("0", "1")


@pytest.mark.parametrize(
    ("value", "wanted", "chosen"),
    [
        (None, (), ("0", "1", "2", "3")),
        (None, ("1",), ("1",)),
        (None, ("3", "0"), ("3", "0")),
        ("2,3", (), ("2", "3")),
        ("2,3", ("3",), ("3",)),
        (",".join(UUIDS), (), UUIDS),
        (",".join(UUIDS), ("1",), ("GPU-02ab",)),
        (",".join(UUIDS), ("GPU-02ab", "0"), ("GPU-02ab", "GPU-8f1d")),
        (",".join(MIGS), ("0",), ("MIG-GPU-8f1d/1/0",)),
    ],
)
def test_what_is_chosen(value, wanted, chosen):
    assert choice(wanted, value) == chosen


@pytest.mark.parametrize(
    ("value", "wanted", "said"),
    [
        (None, ("0", "4"), "--devices 0,4: gpu 4 does not exist; this node has gpu 0 to 3"),
        (None, ("7", "8"), "--devices 7,8: gpu 7, 8 does not exist; this node has gpu 0 to 3"),
        ("0", ("1",), "--devices 1: gpu 1 does not exist; this node has CUDA_VISIBLE_DEVICES=0"),
        ("2,3", ("0",), "--devices 0: gpu 0 does not exist; this node has CUDA_VISIBLE_DEVICES=2,3"),
        ("2,3", ("GPU-8f1d",), "gpu GPU-8f1d does not exist; this node has CUDA_VISIBLE_DEVICES=2,3"),
        (
            ",".join(UUIDS),
            ("2",),
            "gpu 2 does not exist; this node has CUDA_VISIBLE_DEVICES=GPU-8f1d,GPU-02ab",
        ),
    ],
)
def test_what_is_not_there(value, wanted, said):
    with pytest.raises(UsageError) as caught:
        choice(wanted, value)
    assert said in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("kind", ["gpu", "xpu", "npu"])
def test_counting_never_fails(kind):
    assert count_devices(kind) >= 0
