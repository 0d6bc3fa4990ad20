"""The learner's side of a layout: parameters written straight to where the engine's tensors lie.

Every source is copied once, into its part of its slab: no concatenation, transpose or cast makes a temporary. Where nothing is to
be converted the copy is the C library's, which writes past the cache: torch's own reads every line it is about to overwrite. It
is shared among as many threads as torch has, for one core alone does not saturate memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from corrente.errors import SyncError
from corrente.sync.layout import Layout, Slab
from corrente.sync.weight_slots import slab_views

Move = tuple[int, int, int]
"""Target address, source address, and the number of bytes."""

PIECE_BYTES = 4 << 20
"""Moves are cut into pieces of this size, so that threads finish together."""


@torch.no_grad()
def write(layout: Layout, params: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    """Write every slab of ``layout`` from its sources in ``params``, casting to the slab's dtype.

    Returns when the bytes are there, for any thread and any stream to read. SyncError when a source is missing or does not fit;
    the buffer is then half written and must not be flipped to.
    """
    moves: list[Move] = []
    for slab, target in zip(layout.slabs, slab_views(layout, buffer).values(), strict=True):
        moves += _fill(slab, target.t() if slab.transpose else target, params)
    _move(moves, threads=torch.get_num_threads())
    if buffer.device.type == "cuda":
        # The learner's next step is queued on this stream; whoever delivers reads on another one, which does not wait for it.
        torch.cuda.current_stream(buffer.device).synchronize()


def _fill(slab: Slab, target: torch.Tensor, params: Mapping[str, torch.Tensor]) -> list[Move]:
    """Copy the sources of one slab below one another into ``target``; plain copies are left to the caller, as moves."""
    at, moves = 0, list[Move]()
    for name in slab.sources:
        source = params.get(name)
        if source is None:
            raise SyncError(f"the engine wants {name!r}, which the learner does not have")
        part = target if len(slab.sources) == 1 else target[at : at + len(source)]
        if source.shape != part.shape:
            raise SyncError(f"{name!r} has shape {tuple(source.shape)}; the engine has room for {tuple(part.shape)}")
        if _is_plain(part, source):
            moves.append((part.data_ptr(), source.data_ptr(), part.nbytes))
        else:
            part.copy_(source)
        at += len(part) if part.ndim else 1
    if target.ndim and at != len(target):
        raise SyncError(f"{slab.name!r} wants {len(target)} rows, its sources {', '.join(slab.sources)} have {at}")
    return moves


def _is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """True where ``target.copy_(source)`` is one move of bytes within this host."""
    on_host = target.device.type == source.device.type == "cpu"
    return on_host and target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()


def _move(moves: Sequence[Move], *, threads: int) -> None:
    pieces = [
        (to + at, come_from + at, min(PIECE_BYTES, count - at))
        for to, come_from, count in moves
        for at in range(0, count, PIECE_BYTES)
    ]
    if threads < 2 or len(pieces) < 2:
        for piece in pieces:
            ctypes.memmove(*piece)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda piece: ctypes.memmove(*piece), pieces):
            pass
