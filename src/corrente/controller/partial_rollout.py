"""The requests of an unfinished episode and their answers so far, so that neither an interruption nor a crash costs tokens.

While an episode is played, each of its requests is a ``RequestRecord``. It outlives the engine's answer: a request that was
interrupted is sent again from where it was, until it is finished. In a checkpoint it is a ``SavedRequest``, plain data. A resumed
run plays the environment from its start. Its requests are answered from the record for as long as they are the same, in the same
order; at the first that differs, the rest of the record is void. So no environment needs to save a state of its own: one that is
a function of its seed and of its answers goes on where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from corrente.data.types import Completion, Request


class SavedRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request and its answer so far: the whole of it when ``finished``; ``completion`` None: no answer yet."""

    request: Request
    completion: Completion | None = None
    finished: bool = False

    @property
    def oldest_version(self) -> int | None:
        """The version that sampled its oldest token; None when there is no token."""
        return min((span.version for span in self.completion.spans), default=None) if self.completion else None

    def without_answer(self) -> SavedRequest:
        """Return the request, to be answered anew."""
        return SavedRequest(request=self.request)


class RequestRecord:
    """One request of a live episode, from its first sending to its last answer."""

    def __init__(self, request: Request, record: SavedRequest | None = None) -> None:
        self._request = request
        self._returned = record.completion if record else None
        self._seen = self._returned
        self.finished = record.finished if record else False
        self.live = False
        """True while the engine is working on it."""

    @property
    def id(self) -> str:
        return self._request.id

    @property
    def next(self) -> Request:
        """The request to send: the whole one, or the part that is left of it."""
        return self._request if self._returned is None else self._request.resumed_after(self._returned)

    @property
    def written(self) -> int:
        """Number of tokens that calls which ended have returned."""
        return 0 if self._returned is None else len(self._returned.tokens)

    @property
    def completion(self) -> Completion:
        """The answers of all calls, as one."""
        assert self._returned is not None, "the request was not answered yet"
        return self._returned

    @contextmanager
    def asking(self) -> Generator[None]:
        """Mark the request as live for the length of a ``with`` block."""
        self.live = True
        try:
            yield
        finally:
            self.live = False

    def add(self, part: Completion, *, interrupted: bool) -> None:
        """Append an answer of the engine. ``interrupted``: we may have caused its end, so "abort" does not finish the request."""
        self._returned = self._seen = part if self._returned is None else self._returned.joined_with(part)
        self.finished = not (interrupted and part.finish_reason == "abort")

    def record_partial(self, partial: Completion, *, written: int) -> None:
        """Record the tokens that the engine had of a call sent when ``written`` tokens were there. Ignored if that call has ended
        since."""
        if self.live and written == self.written:
            self._seen = partial if self._returned is None else self._returned.joined_with(partial)

    def answer(self) -> SavedRequest:
        """The request as a checkpoint holds it."""
        return SavedRequest(request=self._request, completion=self._seen, finished=self.finished)


class PartialRollout:
    """The requests of one episode, in the order in which they were asked."""

    def __init__(self, record: Iterable[SavedRequest] = ()) -> None:
        self._record = deque(record)
        self._entries: list[RequestRecord] = []

    def open(self, request: Request) -> RequestRecord:
        """A record of ``request``, which the environment asks now, with the answer that an earlier part of the run has of it."""
        known = self._record.popleft() if self._record else None
        if known is not None and not _same(known.request, request):
            known = None
            self._record.clear()
        entry = RequestRecord(request, known)
        self._entries.append(entry)
        return entry

    @property
    def waits(self) -> bool:
        """True when the environment waits for an answer."""
        return any(not entry.finished for entry in self._entries)

    def live(self) -> list[RequestRecord]:
        """Requests that the engine is working on."""
        return [entry for entry in self._entries if entry.live]

    def answers(self) -> tuple[SavedRequest, ...]:
        """All requests, those included that the environment of a resumed run has not asked again yet."""
        return (*(entry.answer() for entry in self._entries), *self._record)


def partial_rollouts(size: int, records: Sequence[Iterable[SavedRequest]] = ()) -> tuple[PartialRollout, ...]:
    """A PartialRollout for each of ``size`` episodes, with its record where there is one."""
    return tuple(PartialRollout(records[at] if at < len(records) else ()) for at in range(size))


def _same(a: Request, b: Request) -> bool:
    """True when an answer to one is an answer to the other. Ids and groups do not count: they name the run that asked."""
    return a.seed == b.seed and a.sampling == b.sampling and np.array_equal(a.tokens, b.tokens)
