"""A checksum of one whole version, made at memory speed: equal for learner and engine, or something was lost on the way.

It covers every tensor and the layout, and no gap between tensors. Pieces are summed by as many threads as torch has (CRC-32,
whose C code lets go of the interpreter), and the sums are hashed in order. It finds damage; it does not stop a forger, tokens do.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch

from corrente.sync.layout import Layout

PIECE_BYTES = 1 << 20


def of(layout: Layout, whole: torch.Tensor, *, threads: int = 0, check: Callable[[], object] | None = None) -> str:
    """The digest of the version in ``whole``, uint8 (layout.nbytes,) on the host.

    ``threads`` 0: as many as torch has. With one thread ``check`` is called before each piece; what it raises ends the work.
    """
    memory = whole.numpy().data
    pieces = [
        memory[at : min(at + PIECE_BYTES, slab.offset + slab.nbytes)]
        for slab in layout.slabs
        for at in range(slab.offset, slab.offset + slab.nbytes, PIECE_BYTES)
    ]
    threads = threads or torch.get_num_threads()
    if threads < 2 or len(pieces) < 2:
        sums: list[int] = []
        for piece in pieces:
            if check is not None:
                check()
            sums.append(zlib.crc32(piece))
    else:
        with ThreadPoolExecutor(threads) as pool:
            sums = list(pool.map(zlib.crc32, pieces, chunksize=4))
    return hashlib.blake2b(fingerprint(layout) + struct.pack(f"<{len(sums)}I", *sums), digest_size=16).hexdigest()


def fingerprint(layout: Layout) -> bytes:
    """Sixteen bytes that two layouts have in common only when they are equal."""
    return hashlib.blake2b(msgspec.json.encode(layout), digest_size=16).digest()
