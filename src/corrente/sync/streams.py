"""Streams for transfers: on a GPU a transfer runs beside the kernels of the learner and of the engine, not behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_stream(weights: torch.Tensor) -> Iterator[None]:
    """Run the block on a stream of its own where ``weights`` are on a GPU.

    The current stream belongs to a thread: without this a thread beside the learner would use the default one, and its copies
    would queue behind the kernels of the learner's step. What the block began has to be complete when it ends: nobody else
    waits for it.
    """
    if weights.device.type != "cuda":
        yield
        return
    with torch.cuda.device(weights.device), torch.cuda.stream(torch.cuda.Stream(weights.device)):
        yield
