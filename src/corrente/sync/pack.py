"""The learner's side of a layout: parameters written straight to where the engine's tensors lie.

Every source is copied once, into its part of its slab: no concatenation, transpose or cast makes a temporary. Where nothing is to
be converted the copy is the C library's, which writes past the cache: torch's own reads every line it is about to overwrite.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch

from corrente.errors import SyncError
from corrente.sync.layout import Layout, Slab


def views(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Typed views of a uint8 buffer by slab name, in the slab's shape. Nothing is copied."""
    if buffer.nbytes < layout.nbytes:
        raise SyncError(f"the layout needs {layout.nbytes} bytes, the buffer has {buffer.nbytes}")
    return {
        slab.name: buffer[slab.offset : slab.offset + slab.nbytes].view(getattr(torch, slab.dtype)).view(slab.shape)
        for slab in layout.slabs
    }


@torch.no_grad()
def write(layout: Layout, params: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Write every slab of ``layout`` from its sources in ``params``, casting to the slab's dtype.

    SyncError when a source is missing or does not fit; the buffer is then half written and must not be flipped to.
    """
    for slab, target in zip(layout.slabs, views(layout, buffer).values(), strict=True):
        _fill(slab, target.t() if slab.transpose else target, params)


def _fill(slab: Slab, target: torch.Tensor, params: Mapping[str, torch.Tensor]) -> None:
    """Copy the sources of one slab below one another into ``target``."""
    at = 0
    for name in slab.sources:
        source = params.get(name)
        if source is None:
            raise SyncError(f"the engine wants {name!r}, which the learner does not have")
        part = target if len(slab.sources) == 1 else target[at : at + len(source)]
        if source.shape != part.shape:
            raise SyncError(f"{name!r} has shape {tuple(source.shape)}; the engine has room for {tuple(part.shape)}")
        _copy(part, source)
        at += len(part) if part.ndim else 1
    if target.ndim and at != len(target):
        raise SyncError(f"{slab.name!r} wants {len(target)} rows, its sources {', '.join(slab.sources)} have {at}")


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` for equal shapes."""
    on_host = target.device.type == source.device.type == "cpu"
    if on_host and target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)
