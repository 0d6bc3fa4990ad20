"""Teachers: another model's log-probs of the tokens the policy sampled, for distillation.

Any engine can teach (``Engine.score``): one in a process of its own, a server, the policy of some versions ago. Its log-probs are
stored with the episode, aligned token by token; it gives no reward by itself. Tokens are those that were sampled, never
re-tokenised, so teacher and policy must read the same vocabulary. No gradient can flow here: it is data when the learner sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from corrente.data.types import Episode, Group, Scores, TeacherLogprobs, Tokens, concat_tokens
from corrente.errors import RewardError
from corrente.score.base import ScoreResult

TokenPlace = tuple[int, int, int]
"""A turn's index, and the start and stop of its tokens in a context."""


class Teacher(Protocol):
    """The part of an engine that a teacher needs. See engine.base.Engine."""

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores: ...


class TeacherSlot:
    """Implements Teacher with one that is made later: the runtime fills the slot before the first call."""

    def __init__(self) -> None:
        self._teacher: Teacher | None = None

    def fill(self, teacher: Teacher) -> None:
        """Use ``teacher`` from now on."""
        self._teacher = teacher

    async def score(self, tokens: Tokens, *, top: int = 0) -> Scores:
        """See Teacher."""
        if self._teacher is None:
            raise RewardError("there is no engine that follows the run")
        return await self._teacher.score(tokens, top=top)


class TeacherSource:
    """Implements Source. ``top``: number of the teacher's likeliest tokens that are kept at each place. ``where``: columns of the
    prompts it teaches, and their values; ``weight``: its weight beside other teachers. Held-out prompts are not taught, for
    nothing is trained on them."""

    single = True

    def __init__(
        self,
        teacher: Teacher,
        *,
        name: str = "teacher",
        top: int = 0,
        weight: float = 1.0,
        where: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self._teacher, self._top = name, teacher, top
        self._weight, self._where = weight, where or {}

    async def wait_until_ready(self) -> None:
        """See Source."""

    async def score_episodes(self, group: Group) -> Sequence[ScoreResult]:
        """See Source. The score is None: the algorithm decides what log-probs are worth."""
        (episode,) = group.episodes
        if group.id < 0 or not matches_columns(self._where, group.prompt.fields):
            return [ScoreResult()]
        taught: list[TeacherLogprobs] = []
        for tokens, places in scored_contexts(episode):
            scores = await self._teacher.score(tokens, top=self._top)
            if len(scores.logprobs) != len(tokens) - 1:
                raise RewardError(f"{self.name}: {len(scores.logprobs)} log-probs for {len(tokens)} tokens")
            taught += [self._teacher_turn(scores, turn, start, stop) for turn, start, stop in places]
        versions = [turn.version for turn in taught if turn.version is not None]
        metrics = {f"{self.name}_version": sum(versions) / len(versions)} if versions else {}
        return [ScoreResult(taught=tuple(taught), metrics=metrics)]

    def _teacher_turn(self, scores: Scores, turn: int, start: int, stop: int) -> TeacherLogprobs:
        here = slice(start - 1, stop - 1)  # scores begin with the second token
        if not np.isfinite(scores.logprobs[here]).all():
            raise RewardError(f"{self.name}: a token of turn {turn} has no finite log-prob")
        return TeacherLogprobs(
            teacher=self.name,
            turn=turn,
            logprobs=scores.logprobs[here],
            top_ids=scores.top_ids[here],
            top_logprobs=scores.top_logprobs[here],
            weight=self._weight,
            version=scores.version,
        )


def matches_columns(where: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """True if a prompt with these columns is among those that ``where`` selects."""
    wanted = {column: value if isinstance(value, list) else [value] for column, value in where.items()}
    return all(fields.get(column) in values for column, values in wanted.items())


def scored_contexts(episode: Episode) -> list[tuple[Tokens, list[TokenPlace]]]:
    """Contexts to score: for every leaf of the conversation its tokens, and the places of sampled turns that no earlier one has.

    A turn without a parent follows the one before it. A completion at the very beginning has nothing that precedes its first
    token, which no model can score: RewardError.
    """
    parents = [at - 1 if turn.parent is None else turn.parent for at, turn in enumerate(episode.turns)]
    seen: set[int] = set()
    out: list[tuple[Tokens, list[TokenPlace]]] = []
    for end in (at for at in range(len(parents)) if at not in parents):
        path, at = [end], parents[end]
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        places: list[TokenPlace] = []
        begin = 0
        for turn in path:
            stop = begin + len(episode.turns[turn].tokens)
            if episode.turns[turn].completion is not None and turn not in seen and stop > begin:
                if not begin:
                    raise RewardError("a completion without a prompt: its first token has nothing to be predicted from")
                places.append((turn, begin, stop))
            begin = stop
        seen.update(path)
        if places:
            out.append((concat_tokens([episode.turns[turn].tokens for turn in path]), places))
    return out
