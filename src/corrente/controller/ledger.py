"""The account of every admitted prompt: each ends in exactly one outcome, with a reason and a count.

admitted = trained + filtered + failed + stale + cancelled + outstanding, always. The ledger is saved with the checkpoint; the
prompts it lists as outstanding are the ones a resumed run admits again.
"""

from __future__ import annotations

from collections import Counter
from typing import get_args

import msgspec

from corrente.controller.partial_rollout import PartialRollout, SavedRequest
from corrente.data.types import Group, GroupOutcome, Prompt
from corrente.errors import LedgerError

OUTCOMES: tuple[GroupOutcome, ...] = get_args(GroupOutcome)
REASONS = 100
"""Distinct reasons that are counted of each outcome: some name the request they are about, and all go into every checkpoint."""
OTHER = "another reason"


class Admission(msgspec.Struct, kw_only=True, eq=False):
    """An admitted prompt that has not ended yet; ``group`` is set once it is finished and waits to be trained on, until then
    ``transcripts`` holds what its episodes have so far."""

    prompt: Prompt
    version: int
    group: Group | None = None
    transcripts: tuple[PartialRollout, ...] = ()

    def answers(self) -> tuple[tuple[SavedRequest, ...], ...]:
        """Per episode, what its requests were answered so far."""
        return tuple(transcript.answers() for transcript in self.transcripts)


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the past. Outstanding prompts are kept beside it and admitted anew."""

    outcomes: dict[str, int] = {}
    reasons: dict[str, dict[str, int]] = {}


class Ledger:
    """Exactly-once accounting; raises LedgerError when the pipeline itself is wrong."""

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state or LedgerState()
        self._outcomes: Counter[str] = Counter(state.outcomes)
        self._reasons: dict[str, Counter[str]] = {k: Counter(v) for k, v in state.reasons.items()}
        self._outstanding: dict[int, Admission] = {}

    def admit(self, ticket: int, admission: Admission) -> None:
        if ticket in self._outstanding:
            raise LedgerError(f"ticket {ticket} was admitted twice")
        self._outstanding[ticket] = admission

    def finish(self, group: Group) -> None:
        """The group is scored and waits to be trained on."""
        entry = self._entry(group.id)
        entry.group, entry.transcripts = group, ()

    def settle(self, ticket: int, outcome: GroupOutcome, reason: str = "") -> None:
        """End one admission. A ticket that is not outstanding was settled before, or never admitted: LedgerError."""
        self._entry(ticket)
        del self._outstanding[ticket]
        self._outcomes[outcome] += 1
        if reason:
            known = self._reasons.setdefault(outcome, Counter())
            known[reason if reason in known or len(known) < REASONS else OTHER] += 1

    def settle_rest(self, outcome: GroupOutcome, reason: str) -> None:
        """End everything outstanding: the run is over."""
        for ticket in list(self._outstanding):
            self.settle(ticket, outcome, reason)

    @property
    def outstanding(self) -> tuple[Admission, ...]:
        """In admission order."""
        return tuple(self._outstanding.values())

    @property
    def admitted(self) -> int:
        return sum(self._outcomes.values()) + len(self._outstanding)

    def count(self, outcome: GroupOutcome) -> int:
        return self._outcomes[outcome]

    def reasons(self, outcome: GroupOutcome) -> dict[str, int]:
        return dict(self._reasons.get(outcome, Counter()))

    def told(self) -> str:
        """What came of the groups, and the commonest reasons, in a line."""
        ends = [(count, o, reason) for o in OUTCOMES for reason, count in self._reasons.get(o, Counter()).items()]
        return "; ".join(f"{count} {outcome}: {reason}" for count, outcome, reason in sorted(ends, reverse=True)[:3])

    def counts(self) -> dict[str, int]:
        """Groups per outcome so far, every outcome named."""
        return {outcome: self._outcomes[outcome] for outcome in OUTCOMES}

    def state(self) -> LedgerState:
        return LedgerState(outcomes=dict(self._outcomes), reasons={k: dict(v) for k, v in self._reasons.items()})

    def _entry(self, ticket: int) -> Admission:
        try:
            return self._outstanding[ticket]
        except KeyError:
            raise LedgerError(f"ticket {ticket} is not outstanding: settled before, or never admitted") from None
