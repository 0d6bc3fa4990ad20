"""Memory for whole versions: where slots are allocated, how shared ones are mapped, and the tensors that lie in one.

A slot is one uint8 tensor of shape (layout.nbytes,). Everything that holds weights, in the learner, in engines and in a foreign
engine's worker, gets its slots here. Needs torch; the owner of shared memory needs none (shared_memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from corrente.errors import SyncError
from corrente.sync import shared_memory
from corrente.sync.layout import Layout

SLOTS = 2
"""One to sample from and one to fill. With one slot the engine stands still while it is filled."""


def allocate_slots(layout: Layout, *, device: str | torch.device = "cpu", count: int = SLOTS) -> Sequence[torch.Tensor]:
    """``count`` new slots on ``device``, zeroed so that their pages exist; none for an engine without weights."""
    if not layout.slabs:
        return ()
    return tuple(torch.zeros(layout.nbytes, dtype=torch.uint8, device=device) for _ in range(count))


def map_slots(layout: Layout, *, fd: int | None = None, path: str = "", count: int = SLOTS) -> Sequence[torch.Tensor]:
    """The ``count`` slots in the shared memory behind an inherited descriptor, or at ``path``; see SharedMemory.

    SyncError when there is no such memory, or it is too small. None for an engine without weights.
    """
    if not layout.slabs:
        return ()
    if fd is not None:
        found = shared_memory.map_slots(fd, layout.nbytes, count=count)
    else:
        found = shared_memory.map_path(path, layout.nbytes, count=count)
    return tuple(torch.frombuffer(slot, dtype=torch.uint8) for slot in found)


def slab_views(layout: Layout, slot: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Every tensor of ``layout`` where it lies in ``slot``, by slab name, typed and in the slab's shape. Nothing is copied.

    SyncError when ``slot`` is not such a buffer, or too small.
    """
    if slot.dtype != torch.uint8 or slot.ndim != 1 or slot.nbytes < layout.nbytes:
        raise SyncError(
            f"a weight slot is {slot.dtype} of {slot.nbytes} bytes in {slot.ndim} dimensions; the layout needs "
            f"{layout.nbytes} bytes of uint8 in one"
        )
    return {
        slab.name: slot[slab.offset : slab.offset + slab.nbytes].view(getattr(torch, slab.dtype)).view(slab.shape)
        for slab in layout.slabs
    }
