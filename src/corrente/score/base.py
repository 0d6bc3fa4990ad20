"""What an episode earned. Runs beside generation; one group's scoring never waits for another's."""

from __future__ import annotations

from typing import Protocol

from corrente.types import Group


class Scorer(Protocol):
    """Contract.

    - Returns the group with ``scores`` and ``reward`` filled in, episodes in the same order. An episode whose scoring failed
      comes back with status "failed" or "timeout" and an error that names the function; the others keep their rewards.
    - Raises nothing but cancellation for a fault of a reward function.
    - Never blocks the event loop: synchronous functions run in a thread, or process, with a deadline.
    """

    async def score(self, group: Group) -> Group: ...
