"""Batches the samples of many callers: each waits for its own opinion, the model sees batches.

While one batch is computed the next one fills, so batches grow with load and a lone sample waits for no other. Samples of like
length go together, for a batch is padded to its longest. None is starved: each batch is built around the one that waits longest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from corrente.common.waiting import Bell
from corrente.errors import RolloutError
from corrente.score.messages import Opinion, Sample

Forward = Callable[[list[Sample]], Awaitable[list[Opinion]]]


class _QueuedSample:
    """A sample, and its opinion or failure once there is one."""

    def __init__(self, sample: Sample, size: int) -> None:
        self.sample, self.size = sample, size
        self.done = anyio.Event()
        self.opinion: Opinion | None = None
        self.failure: RolloutError | None = None


class Batcher:
    """Calls ``forward`` with batches of at most ``batch`` samples and ``cells`` size units (samples times the longest). ``run``
    must be running."""

    def __init__(self, forward: Forward, *, batch: int, cells: int) -> None:
        self._forward, self._batch, self._cells = forward, batch, cells
        self._queue: list[_QueuedSample] = []
        self._bell = Bell()

    async def ask(self, sample: Sample) -> Opinion:
        """Wait for the model's opinion of a sample. Raises the RolloutError that ``forward`` raised for its batch."""
        entry = _QueuedSample(sample, sample_size(sample))
        self._queue.append(entry)
        self._bell.ring()
        try:
            await entry.done.wait()
        finally:
            if entry in self._queue:
                self._queue.remove(entry)
        if entry.failure is not None:
            raise entry.failure
        assert entry.opinion is not None
        return entry.opinion

    async def run(self) -> None:
        """Process waiting samples, batch after batch, until cancelled."""
        while True:
            await self._bell.until(lambda: bool(self._queue))
            picked = pick_batch([entry.size for entry in self._queue], most=self._batch, cells=self._cells)
            batch = [self._queue[at] for at in picked]
            self._queue = [entry for at, entry in enumerate(self._queue) if at not in set(picked)]
            try:
                for entry, opinion in zip(batch, await self._forward([e.sample for e in batch]), strict=True):
                    entry.opinion = opinion
            except RolloutError as error:
                for entry in batch:
                    entry.failure = error
            for entry in batch:
                entry.done.set()


def sample_size(sample: Sample) -> int:
    """Size of a sample: its tokens if it has them, else about a token for four characters."""
    return max(1, len(sample.tokens) or (len(sample.prompt) + len(sample.completion)) // 4)


def pick_batch(sizes: Sequence[int], *, most: int, cells: int) -> list[int]:
    """Pick the indices of the next batch: the first sample, which waits longest, and those nearest to it in size, as long as the
    batch, padded to its longest, has at most ``cells`` cells."""
    chosen, longest = [0], sizes[0]
    for at in sorted(range(1, len(sizes)), key=lambda other: (abs(sizes[other] - sizes[0]), other)):
        grown = max(longest, sizes[at])
        if len(chosen) == most or grown * (len(chosen) + 1) > cells:
            break
        chosen.append(at)
        longest = grown
    return chosen
