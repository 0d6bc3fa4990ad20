"""The control plane's half of a checkpoint, and what a resumed run admits again."""

from __future__ import annotations

from typing import Any

import msgspec

from corrente.controller.ledger import LedgerState
from corrente.controller.partial_rollout import SavedRequest
from corrente.controller.plan import Plan
from corrente.data.types import Group
from corrente.inflight.base import Whole


class Unfinished(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """An admitted prompt at the moment of a checkpoint: its id, and its ``group`` if that was generated and scored. If not,
    ``answers``: per episode, its requests and their answers so far."""

    prompt_id: str
    group: Group | None = None
    answers: tuple[tuple[SavedRequest, ...], ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The control plane's half of a checkpoint. ``version`` is that of the learner's weights; it is live once the run resumes."""

    step: int
    version: int
    next_ticket: int
    ledger: LedgerState
    prompts: dict[str, Any]
    unfinished: tuple[Unfinished, ...] = ()
    elapsed_s: float = 0.0
    evaluated: int = -1
    """The newest version whose evaluation was reported; -1: none."""
    randomness: dict[str, Any] = {}
    """The state of the global generators (``common.rng``), for code of users that draws from them."""
    untrainable: tuple[int, int] = (0, 0)
    """Groups in a row that taught nothing: filtered, and trained without a row."""
    attempts: dict[str, tuple[list[bool], str]] = {}
    """By boundary: of the last attempts, True for each that failed, and the last error; see FailureBudget."""

    def admit_again(self, plan: Plan, one_version: Whole | None = None) -> list[Unfinished]:
        """The prompts that a run resumed from here admits before any new one, in order.

        A finished group is trained on after at most as many others as stand before it; an unfinished one may also be overtaken
        by ``plan.window`` - 1. A group, or an episode's record, that could be older than ``plan.max_age`` by then is generated
        anew. Under the settings it was admitted with there is no such group, by the theorem; a record may be one where W > 1.
        So is what would mix the versions of a request or of a group where ``one_version`` excludes that.
        """
        whole = [self._whole(unfinished, one_version) for unfinished in self.unfinished]
        return [self._fit(at, unfinished, plan) for at, unfinished in enumerate(whole)]

    def _whole(self, unfinished: Unfinished, one_version: Whole | None) -> Unfinished:
        """``unfinished`` without the answers that would be continued, or joined by others, under a version that did not sample
        them."""
        records = unfinished.answers
        if one_version == "group" and any(self._older(answer) for record in records for answer in record):
            records = ()
        if one_version == "request":
            records = tuple(
                tuple(
                    answer.without_answer() if self._older(answer) and not answer.finished else answer
                    for answer in record
                )
                for record in records
            )
        return msgspec.structs.replace(unfinished, answers=records)

    def _older(self, answer: SavedRequest) -> bool:
        return answer.oldest_version not in (None, self.version)

    def _fit(self, at: int, unfinished: Unfinished, plan: Plan) -> Unfinished:
        bound = plan.max_age
        if bound is None:
            return unfinished
        per_version = plan.prompts_per_step * plan.publish_every
        if unfinished.group is not None:
            age = self.version - unfinished.group.oldest_version + at // per_version
            return unfinished if age <= bound else msgspec.structs.replace(unfinished, group=None)
        overtaken = at + max(0, plan.window - 1)

        def keeps(record: tuple[SavedRequest, ...]) -> bool:
            oldest = min((v for answer in record if (v := answer.oldest_version) is not None), default=self.version)
            as_if_new = oldest == self.version and at < per_version  # admitted at once, under the version that is live
            return as_if_new or self.version - oldest + overtaken // per_version <= bound

        if all(map(keeps, unfinished.answers)):
            return unfinished
        fit = tuple(record if keeps(record) else () for record in unfinished.answers)
        return msgspec.structs.replace(unfinished, answers=fit)
