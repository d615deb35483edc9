"""Choose the cores for the process of a GPU (`--numa_binding`): the cores of the GPU's NUMA node or socket,
or a part of them. The kernel lists them in /sys and /proc.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path

from fleetrun.envs.settings.parsing import rank_set
from fleetrun.errors import UsageError
from fleetrun.files import read_file

_Cores = frozenset[int]


def bound_cores(
    binding: str,
    chosen: Collection[str],
    ids: Collection[str],
    allowed: Collection[int],
    root: Path,
) -> tuple[_Cores, ...]:
    """Return the cores for the process of each `chosen` NVIDIA GPU (a number or GPU-...), out of the
    `allowed` cores.

    A GPU with an unknown NUMA node gets an empty set. `ids` are all GPUs that this launcher may use. They
    divide the cores of a node among them. Raises UsageError if a node has too few cores for that.

    The bindings mean what torchrun documents (torch.numa.binding.AffinityMode).
    """
    # The PCI address of each GPU, by its number and by its UUID. The kernel's driver lists GPUs in the order
    # of their PCI addresses.
    listed = sorted((root / "proc/driver/nvidia/gpus").glob("*"))
    addresses = {str(number): path.name for number, path in enumerate(listed)}
    addresses |= {uuid: path.name for path in listed if (uuid := _uuid(path / "information"))}
    node_of = {id_: _node(root, addresses.get(id_, "unknown")) for id_ in {*ids, *chosen}}

    def cores(id_: str) -> _Cores:
        node = node_of[id_]
        if node is None:
            return frozenset()
        own = _cores(root / f"sys/devices/system/node/node{node}/cpulist") & frozenset(allowed)
        neighbours = [each for each in ids if node_of[each] == node]
        place = neighbours.index(id_) if id_ in neighbours else 0
        if binding == "socket":
            return _socket(root, own) & frozenset(allowed)
        if binding == "exclusive":
            return _share(
                _grouped(own, lambda core: _cores(_cpu(root, core) / "topology/thread_siblings_list")),
                place,
                len(neighbours),
                node,
            )
        if binding == "core-complex":
            caches = sorted(_grouped(own, lambda core: _sharing_cache(root, core)), key=len, reverse=True)
            return caches[place % len(caches)] if caches else own
        return own

    return tuple(map(cores, chosen))


def _uuid(information: Path) -> str:
    pairs = (line.partition(":") for line in read_file(information).splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip() == "GPU UUID"), "")


def _node(root: Path, address: str) -> int | None:
    number = read_file(root / "sys/bus/pci/devices" / address / "numa_node")
    return max(int(number), 0) if number else None  # -1: the node has only one


def _socket(root: Path, own: _Cores) -> _Cores:
    """Return all cores of the NUMA nodes on the same socket as these cores."""
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    sockets = {_package(root, core) for core in own}
    of_nodes = [_cores(node / "cpulist") for node in nodes]
    return own.union(*(cores for cores in of_nodes if sockets & {_package(root, core) for core in cores}))


def _share(cores: list[_Cores], place: int, among: int, node: int) -> _Cores:
    """Return the part at `place`. If the cores cannot be divided evenly, the first parts get one more
    core.
    """
    if len(cores) < among:
        raise UsageError(
            f"--numa_binding exclusive: NUMA node {node} has {len(cores)} cores for {among} GPUs; use "
            "--numa_binding node"
        )
    each, more = divmod(len(cores), among)
    start = place * each + min(place, more)
    return frozenset().union(*cores[start : start + each + (place < more)])


def _grouped(cores: _Cores, together: Callable[[int], _Cores]) -> list[_Cores]:
    """Group the cores that belong together, in the order of their first core."""
    groups = defaultdict(set)
    for core in sorted(cores):
        groups[min(together(core), default=core)].add(core)
    return [frozenset(group) for _, group in sorted(groups.items())]


def _package(root: Path, core: int) -> str:
    return read_file(_cpu(root, core) / "topology/physical_package_id")


def _sharing_cache(root: Path, core: int) -> _Cores:
    """Return the cores that share this core's largest cache, usually L3."""
    caches = [
        each
        for each in _cpu(root, core).glob("cache/index[0-9]*")
        if read_file(each / "type") != "Instruction"
    ]
    largest = max(caches, key=lambda each: int(read_file(each / "level") or 0), default=None)
    return frozenset() if largest is None else _cores(largest / "shared_cpu_list")


def _cpu(root: Path, core: int) -> Path:
    return root / f"sys/devices/system/cpu/cpu{core}"


def _cores(path: Path) -> _Cores:
    return rank_set(read_file(path)) or frozenset()
