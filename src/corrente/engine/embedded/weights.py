"""The weight slots of an engine: typed views by slab name, made once, so that a flip is a change of dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from corrente.errors import SyncError
from corrente.sync.base import Update
from corrente.sync.layout import Layout
from corrente.sync.weight_slots import slab_views


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
    """Views of every slab in each weight slot. Nothing is copied, so the slots must outlive this. SyncError for a slot it has
    not."""

    def __init__(self, layout: Layout, slots: Sequence[torch.Tensor] = ()) -> None:
        self._views = [slab_views(layout, slot) for slot in slots]

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, slot: int) -> Mapping[str, torch.Tensor]:
        if not 0 <= slot < len(self._views):
            raise SyncError(f"buffer {slot} is none that the engine was given")
        return self._views[slot]
