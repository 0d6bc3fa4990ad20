"""Filters leave out groups that are not worth a place in a step. Each reason is one line in the ledger.

    too hard, too easy    the part of the episodes that pass (Florensa et al. 2018, arXiv:1705.06366)
    truncated             the part that the budget cut off: their rewards say little about the answer they were cut off from
    repetition            n-grams of tokens that a completion had before, 1 - distinct / all, averaged over the group
    the user's            ``filter.rules``: functions (episodes, *, their keys) -> reason, "" to keep the group

Whatever is filtered is replaced (dynamic sampling: DAPO, Yu et al. 2025, arXiv:2503.14476). Nothing is by default. Rewards
of None are neither passed nor failed; a group of only those has no pass rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from corrente.config import Filter
from corrente.data.types import Episode
from corrente.errors import PipelineError

GRAM = 4


GroupFilter = Callable[[Sequence[Episode]], str]
"""A filter of the user's with its keys bound: the reason a group of these episodes is filtered, or "". Pure."""


def reason(episodes: Sequence[Episode], filter: Filter, *, rules: Mapping[str, GroupFilter] | None = None) -> str:
    """The reason why a group of these episodes is filtered; "" when it is not. ``rules``: the user's, by their key in the
    config. Raises PipelineError where one of them returns no text."""
    rate = pass_rate(episodes, at_least=filter.pass_reward)
    if rate is not None and rate < filter.pass_rate_min:
        return "pass rate below filter.pass_rate_min"
    if rate is not None and rate > filter.pass_rate_max:
        return "pass rate above filter.pass_rate_max"
    if filter.truncated_max < 1 and _mean([float(e.truncated) for e in episodes]) > filter.truncated_max:
        return "truncated more than filter.truncated_max"
    if filter.repetition_max < 1 and _mean([repetition(e) for e in episodes]) > filter.repetition_max:
        return "repetition above filter.repetition_max"
    for key, rule in (rules or {}).items():
        said = rule(episodes)
        if not isinstance(said, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PipelineError(
                f'{key}.kind: it returned {said!r}; it must return the reason as text, or "" to keep the group'
            )
        if said:
            return said
    return ""


def pass_rate(episodes: Sequence[Episode], *, at_least: float) -> float | None:
    """Part of the episodes with a reward whose reward is at least that; None without any."""
    passed = [float(e.reward >= at_least) for e in episodes if e.reward is not None]
    return _mean(passed) if passed else None


def repetition(episode: Episode) -> float:
    """Part of the n-grams of an episode's completions that were there before in the same completion; 0 without any."""
    grams = again = 0
    for completion in episode.completions:
        tokens = completion.tokens.tolist()
        found = [tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)]
        grams += len(found)
        again += len(found) - len(set(found))
    return again / grams if grams else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
