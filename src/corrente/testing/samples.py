"""Small valid values of the data types, for suites and tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from corrente.data.types import Completion, Episode, Group, Prompt, Span, Turn


def prompt(row: int = 0, *, tokens: int = 4, epoch: int = 0) -> Prompt:
    """A prompt whose tokens depend on ``row``."""
    return Prompt(id=f"{epoch}/{row}", tokens=np.arange(row, row + tokens, dtype=np.int32), text=f"prompt {row}")


def completion(*, versions: Sequence[int] = (0, 0, 0)) -> Completion:
    """One token per entry of ``versions``, sampled by it."""
    spans: list[Span] = []
    for at, version in enumerate(versions):
        if spans and spans[-1].version == version:
            spans[-1] = Span(version, spans[-1].start, at + 1)
        else:
            spans.append(Span(version, at, at + 1))
    count = len(versions)
    return Completion(
        tokens=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -0.5, np.float32),
        spans=tuple(spans),
        finish_reason="stop",
        text=" ".join(map(str, range(count))),
    )


def episode(
    *,
    group: int = 0,
    index: int = 0,
    of: Prompt | None = None,
    versions: Sequence[int] = (0, 0, 0),
    reward: float | None = None,
) -> Episode:
    """A prompt turn and a sampled turn; no sampled turn when ``versions`` is empty."""
    of = of or prompt(group)
    turns = [Turn(speaker="user", tokens=of.tokens)]
    if versions:
        said = completion(versions=versions)
        turns.append(Turn(speaker="policy", tokens=said.tokens, completion=said, parent=0))
    scores: dict[str, float | None] = {} if reward is None else {"reward": reward}
    return Episode(prompt_id=of.id, group_id=group, index=index, turns=tuple(turns), scores=scores, reward=reward)


def group(
    id: int = 0,
    *,
    size: int = 2,
    versions: Sequence[int] = (0, 0, 0),
    rewards: Sequence[float | None] | None = None,
    admitted_version: int = 0,
) -> Group:
    """``size`` episodes of one prompt (or one per reward), all sampled by ``versions``."""
    of = prompt(id)
    earned: Sequence[float | None] = [None] * size if rewards is None else rewards
    episodes = tuple(
        episode(group=id, index=i, of=of, versions=versions, reward=reward) for i, reward in enumerate(earned)
    )
    return Group(id=id, prompt=of, episodes=episodes, admitted_version=admitted_version)
