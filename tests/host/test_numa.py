"""The cores of the process of a GPU, on made-up machines."""

import os
from types import SimpleNamespace

import pytest

from fleetrun.errors import UsageError
from fleetrun.host.numa import bound_cores

ALL = frozenset(range(32))
GPUS = {"0000:0a:00.0": ("GPU-aa", 0), "0000:1b:00.0": ("GPU-bb", 0), "0000:8c:00.0": ("GPU-cc", 3)}


@pytest.fixture
def machine(tmp_path):
    """What the kernel tells of two sockets of two NUMA nodes each, 16 physical cores of two threads (core 3
    is 3 and 19), caches for two physical cores each, but of three and one on node 0, and three GPUs.
    """
    texts = {}
    for address, (uuid, node) in GPUS.items():
        texts[f"proc/driver/nvidia/gpus/{address}/information"] = f"Model: \t\t H100\nGPU UUID: \t {uuid}\n"
        texts[f"sys/bus/pci/devices/{address}/numa_node"] = f"{node}\n"
    for node in range(4):
        low = 4 * node
        texts[f"sys/devices/system/node/node{node}/cpulist"] = f"{low}-{low + 3},{low + 16}-{low + 19}\n"
    for cpu in ALL:
        core = cpu % 16
        first, last = (1, 3) if core in (1, 2, 3) else (0, 0) if core == 0 else (core & ~1, core | 1)
        here = f"sys/devices/system/cpu/cpu{cpu}"
        texts[f"{here}/topology/physical_package_id"] = f"{core // 8}\n"
        texts[f"{here}/topology/thread_siblings_list"] = f"{core},{core + 16}\n"
        texts[f"{here}/cache/index0/type"] = "Instruction\n"
        texts[f"{here}/cache/index0/level"] = "9\n"
        texts[f"{here}/cache/index2/type"] = "Unified\n"
        texts[f"{here}/cache/index2/level"] = "2\n"
        texts[f"{here}/cache/index2/shared_cpu_list"] = f"{core},{core + 16}\n"
        texts[f"{here}/cache/index3/type"] = "Unified\n"
        texts[f"{here}/cache/index3/level"] = "3\n"
        texts[f"{here}/cache/index3/shared_cpu_list"] = f"{first}-{last},{first + 16}-{last + 16}\n"
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def bound(binding, machine, *chosen, ids=("0", "1", "2"), allowed=ALL):
    return [set(cores) for cores in bound_cores(binding, chosen, ids, allowed, machine)]


def test_all_cores_of_its_node(machine):
    assert bound("node", machine, "2", "0") == [
        {12, 13, 14, 15, 28, 29, 30, 31},
        {0, 1, 2, 3, 16, 17, 18, 19},
    ]
    assert bound("node", machine, "GPU-cc", ids=("GPU-cc",)) == [{12, 13, 14, 15, 28, 29, 30, 31}]


def test_all_cores_of_its_socket(machine):
    assert bound("socket", machine, "0") == [{*range(8), *range(16, 24)}]


def test_its_share_of_the_physical_cores(machine):
    assert bound("exclusive", machine, "0", "1", "2") == [
        {0, 1, 16, 17},
        {2, 3, 18, 19},
        {12, 13, 14, 15, 28, 29, 30, 31},
    ]
    assert bound("exclusive", machine, "1", ids=("1", "2")) == [{0, 1, 2, 3, 16, 17, 18, 19}]


def test_cores_of_one_cache_the_largest_first(machine):
    assert bound("core-complex", machine, "0", "1") == [{1, 2, 3, 17, 18, 19}, {0, 16}]


def test_too_few_cores_to_share(machine):
    with pytest.raises(UsageError, match="node 0 has 1 cores for 2 GPUs"):
        bound("exclusive", machine, "0", allowed={0, 16})


@pytest.mark.parametrize("binding", ["node", "socket", "exclusive", "core-complex"])
def test_an_unknown_gpu_is_not_bound(machine, tmp_path, binding):
    assert bound(binding, machine, "7", "MIG-x", ids=("0",)) == [set(), set()]
    assert bound(binding, tmp_path / "empty", "0") == [set()]


@pytest.mark.parametrize("allowed", [ALL, ALL - {0, 2, 12, 28, 31}, frozenset({1, 2, 3, 17, 14, 9})])
@pytest.mark.parametrize("binding", ["node", "socket", "exclusive", "core-complex"])
def test_it_is_what_torchrun_does(machine, monkeypatch, binding, allowed):
    torchs = pytest.importorskip("torch.numa.binding")
    nodes = [node for _, node in GPUS.values()]
    here = SimpleNamespace(
        listdir=lambda path: [each.name for each in (machine / path[1:]).iterdir()],
        path=os.path,
        sched_getaffinity=lambda pid: set(allowed),
    )
    monkeypatch.setattr(torchs, "os", here)
    monkeypatch.setattr(torchs, "open", lambda path: (machine / path[1:]).open(), raising=False)
    monkeypatch.setattr(torchs, "_get_gpu_count", lambda: len(nodes))
    monkeypatch.setattr(torchs, "_get_numa_node_index_for_gpu_index", lambda gpu_index: nodes[gpu_index])
    monkeypatch.setattr(
        torchs,
        "_get_numa_node_indices_for_socket_index",
        lambda socket_index: {2 * socket_index, 2 * socket_index + 1},
    )
    options = torchs.NumaOptions(torchs.AffinityMode(binding))
    theirs = [torchs._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options) for gpu in range(3)]
    assert bound(binding, machine, "0", "1", "2", allowed=allowed) == theirs
