"""How the devices of a machine are divided among its processes. Pure."""

from __future__ import annotations

from fleetrun.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """What one process gets of the devices: what it may see, and which of that are its own, by position."""

    visible: tuple[str, ...] = ()
    own: tuple[int, ...] = ()


def share(ids: tuple[str, ...], index: int, size: int, *, whole_node: bool) -> Share:
    """The share of process `index` of `size`.

    One device each, seen among all of the node's, so that LOCAL_RANK is its index (torchrun's custom);
    several each, or with `whole_node` off, each process sees its own slice only. Devices that do not divide
    evenly: as many as there are processes are used (Paddle). More processes than devices: none is bound.
    """
    if size > len(ids) or not ids:
        return Share()
    width = len(ids) // size if len(ids) % size == 0 else 1
    slice_ = ids[index * width : (index + 1) * width]
    if width == 1 and whole_node:
        return Share(ids[:size], (index,))
    return Share(slice_, tuple(range(width)))
