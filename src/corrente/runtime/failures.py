"""One cause out of a task group's many: who opens a runtime is told what happened, not how tasks were nested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from corrente.errors import WorkerDied


@contextmanager
def as_one() -> Iterator[None]:
    """Replace an exception group by its cause: an interrupt, else a dead worker, which every call that waited for it reports
    too, else the only exception in it. A group of several different failures passes as it is."""
    cause: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        cause = _cause(group)
    if cause is not None:
        raise cause


def _cause(group: BaseExceptionGroup) -> BaseException:
    leaves = _leaves(group)
    interrupts = [leaf for leaf in leaves if not isinstance(leaf, Exception)]
    deaths = [leaf for leaf in leaves if isinstance(leaf, WorkerDied)]
    for found in (interrupts, deaths):
        if found:
            return found[0]
    return leaves[0] if len(leaves) == 1 else group


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
