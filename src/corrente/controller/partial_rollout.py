"""What the requests of an unfinished episode were answered: so that an interruption, or a crash, costs none of it.

While an episode is played, each of its requests is a ``RequestRecord``. It outlives the engine's answer: a request that was
interrupted is sent again from where it was, until it is finished. In a checkpoint it is a ``SavedRequest``, plain data. A resumed
run plays the environment from its start. What it asks is answered from the record for as long as it asks the same things in the
same order; where it asks something else, the rest of the record is void. So no environment needs to save a state of its own: one
that is a function of its seed and of what it was answered goes on where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from corrente.data.types import Completion, Request


class SavedRequest(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A request as it was asked, and what it was answered so far: all of it when ``finished``, nothing when None."""

    request: Request
    completion: Completion | None = None
    finished: bool = False

    @property
    def oldest_version(self) -> int | None:
        """None when there is no token."""
        return min((span.version for span in self.completion.spans), default=None) if self.completion else None

    def again(self) -> SavedRequest:
        """The same request, to be answered anew."""
        return SavedRequest(request=self.request)


class RequestRecord:
    """One request of a live episode, from its first sending to its last answer."""

    def __init__(self, request: Request, record: SavedRequest | None = None) -> None:
        self._request = request
        self._returned = record.completion if record else None
        self._seen = self._returned
        self.finished = record.finished if record else False
        self.live = False
        """The engine is being asked."""

    @property
    def id(self) -> str:
        return self._request.id

    @property
    def next(self) -> Request:
        """What to ask the engine: the request, or what is left of it."""
        return self._request if self._returned is None else self._request.resumed_after(self._returned)

    @property
    def written(self) -> int:
        """Tokens that came back from calls that ended."""
        return 0 if self._returned is None else len(self._returned.tokens)

    @property
    def completion(self) -> Completion:
        assert self._returned is not None, "the request was not answered yet"
        return self._returned

    @contextmanager
    def asking(self) -> Generator[None]:
        self.live = True
        try:
            yield
        finally:
            self.live = False

    def add(self, part: Completion, *, interrupted: bool) -> None:
        """An answer of the engine; ``interrupted``: we may have caused it, and an "abort" then is not the end."""
        self._returned = self._seen = part if self._returned is None else self._returned.joined_with(part)
        self.finished = not (interrupted and part.finish_reason == "abort")

    def look(self, partial: Completion, *, written: int) -> None:
        """What the engine had of a call that was sent when ``written`` tokens were there; void if that call has ended since."""
        if self.live and written == self.written:
            self._seen = partial if self._returned is None else self._returned.joined_with(partial)

    def answer(self) -> SavedRequest:
        return SavedRequest(request=self._request, completion=self._seen, finished=self.finished)


class PartialRollout:
    """The requests of one episode, in the order in which they were asked."""

    def __init__(self, record: Iterable[SavedRequest] = ()) -> None:
        self._record = deque(record)
        self._entries: list[RequestRecord] = []

    def open(self, request: Request) -> RequestRecord:
        """The entry of a request that the environment asks now, with what the record knows of it."""
        known = self._record.popleft() if self._record else None
        if known is not None and not _same(known.request, request):
            known = None
            self._record.clear()
        entry = RequestRecord(request, known)
        self._entries.append(entry)
        return entry

    @property
    def waits(self) -> bool:
        """Whether the environment asked for something that has no answer yet."""
        return any(not entry.finished for entry in self._entries)

    def live(self) -> list[RequestRecord]:
        return [entry for entry in self._entries if entry.live]

    def answers(self) -> tuple[SavedRequest, ...]:
        """Everything known, what the environment has not asked for again included."""
        return (*(entry.answer() for entry in self._entries), *self._record)


def partial_rollouts(size: int, records: Sequence[Iterable[SavedRequest]] = ()) -> tuple[PartialRollout, ...]:
    """One for each of ``size`` episodes, with the record of each where there is one."""
    return tuple(PartialRollout(records[at] if at < len(records) else ()) for at in range(size))


def _same(a: Request, b: Request) -> bool:
    """Whether an answer to one is an answer to the other; ids and groups are names of the run that asked."""
    return a.seed == b.seed and a.sampling == b.sampling and np.array_equal(a.tokens, b.tokens)
