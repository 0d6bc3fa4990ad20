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
    """An admitted prompt that has not ended yet. ``partials`` holds the requests of its episodes until ``group`` is set: then it
    is scored, and waits to be trained on. ``version`` was live when it was admitted."""

    prompt: Prompt
    version: int
    group: Group | None = None
    partials: tuple[PartialRollout, ...] = ()

    def answers(self) -> tuple[tuple[SavedRequest, ...], ...]:
        """Per episode, its requests and their answers so far."""
        return tuple(partial.answers() for partial in self.partials)


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """Groups per outcome and per reason, as a checkpoint holds them. Outstanding prompts are no part of it: see Snapshot."""

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
        """Begin an admission. Raises LedgerError for a ticket that was admitted before."""
        if ticket in self._outstanding:
            raise LedgerError(f"ticket {ticket} was admitted twice")
        self._outstanding[ticket] = admission

    def finish(self, group: Group) -> None:
        """Record that the group is scored and waits to be trained on."""
        entry = self._entry(group.id)
        entry.group, entry.partials = group, ()

    def settle(self, ticket: int, outcome: GroupOutcome, reason: str = "") -> None:
        """End one admission. Raises LedgerError for a ticket that was settled before, or never admitted."""
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
        """Admissions that have not ended, in order."""
        return tuple(self._outstanding.values())

    @property
    def admitted(self) -> int:
        """Groups admitted so far, in all parts of the run."""
        return sum(self._outcomes.values()) + len(self._outstanding)

    def count(self, outcome: GroupOutcome) -> int:
        """Groups that ended in ``outcome`` so far."""
        return self._outcomes[outcome]

    def describe_reasons(self) -> str:
        """One line with the three commonest reasons, and the outcomes they are of."""
        ends = [(count, o, reason) for o in OUTCOMES for reason, count in self._reasons.get(o, Counter()).items()]
        return "; ".join(f"{count} {outcome}: {reason}" for count, outcome, reason in sorted(ends, reverse=True)[:3])

    def counts(self) -> dict[str, int]:
        """Groups per outcome so far, every outcome named."""
        return {outcome: self._outcomes[outcome] for outcome in OUTCOMES}

    def state(self) -> LedgerState:
        """The account as a checkpoint holds it."""
        return LedgerState(outcomes=dict(self._outcomes), reasons={k: dict(v) for k, v in self._reasons.items()})

    def _entry(self, ticket: int) -> Admission:
        try:
            return self._outstanding[ticket]
        except KeyError:
            raise LedgerError(f"ticket {ticket} is not outstanding: settled before, or never admitted") from None
