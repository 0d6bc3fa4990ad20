"""Typed views of the two weight buffers, made once, so that a flip only exchanges a dictionary of views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from corrente.errors import ConfigError
from corrente.sync.base import Update
from corrente.sync.layout import Layout


class EmbeddedWeights:
    """One version in use: its update and its tensors, which are views into a buffer.

    Compare them by identity: a version may be staged twice, with different bytes.
    """

    __slots__ = ("tensors", "update")

    def __init__(self, update: Update, tensors: Mapping[str, torch.Tensor]) -> None:
        self.update, self.tensors = update, tensors

    @property
    def version(self) -> int:
        return self.update.version

    @property
    def slot(self) -> int:
        return self.update.slot


class WeightBuffers:
    """Views of every slab in each buffer. Nothing is copied, so the buffers must outlive this. ConfigError: wrong buffers."""

    def __init__(self, layout: Layout, buffers: Sequence[torch.Tensor]) -> None:
        for at, buffer in enumerate(buffers):
            if buffer.dtype != torch.uint8 or buffer.ndim != 1 or buffer.nbytes < layout.nbytes:
                raise ConfigError(
                    f"weight buffer {at} is {buffer.dtype} of {buffer.nbytes} bytes; "
                    f"the engine needs {layout.nbytes} bytes of uint8 in one dimension"
                )
        self._views = [
            {
                slab.name: buffer[slab.offset : slab.offset + slab.nbytes]
                .view(getattr(torch, slab.dtype))
                .view(slab.shape)
                for slab in layout.slabs
            }
            for buffer in buffers
        ]

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, slot: int) -> Mapping[str, torch.Tensor]:
        return self._views[slot]
