"""The contracts of policy objectives, advantage estimators and group filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corrente.algo.advantages import Estimator, Rewards, StepRewards, as_advantages
from corrente.algo.filters import reason
from corrente.common.imports import load_object
from corrente.config import Filter
from corrente.data.types import Episode, Floats
from corrente.testing.expect import expect
from corrente.testing.samples import episode

OBJECTIVE_SUITE = "corrente.testing.objective_suite:check"
"""Imported when it is called: it needs torch."""
TOLERANCE = 1e-6
ROUNDING = 1e-5
"""Advantages are float32."""
NAN = np.nan

Lengths = NDArray[np.int64]
Estimate = Callable[[Sequence[Rewards], Sequence[Lengths]], list[Floats]]


def check_objective(function: Callable[..., Any], **keys: Any) -> None:
    """Hold an objective to the contract of algo/policy.py. ``keys``: its keyword arguments, as a config would give them."""
    load_object(OBJECTIVE_SUITE)(function, **keys)


def check_estimator(
    function: Estimator,
    *,
    baseline: Literal["group", "step"] = "group",
    sums_to_zero: Literal["group", "step", "no"] = "no",
    **keys: Any,
) -> None:
    """Hold an advantage estimator to the contract of algo/advantages.py.

    ``baseline``: what an episode is compared with; equal rewards within it must give zeros. ``sums_to_zero``: where advantages
    must cancel: in each group, over the step, or nowhere. ``keys``: its keyword arguments, as a config would give them.
    """

    def estimate(rewards: Sequence[Rewards], lengths: Sequence[Lengths]) -> list[Floats]:
        step = _step(rewards, lengths)
        before = [array.copy() for array in (*step.rewards, *step.lengths, *step.scores)]
        first, second = (as_advantages(function(step, **keys), step) for _ in range(2))
        expect(_equal(first, second, rounding=0), "the same step gives the same advantages", (first, second))
        after = (*step.rewards, *step.lengths, *step.scores)
        unchanged = all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(before, after, strict=True))
        expect(unchanged, "the step it is given is not changed")
        return first

    rewards = [
        np.array(earned)
        for earned in ([1.0, 0.0, 0.25, 2.0], [0.0, 0.5, NAN, 4.0], [3.0, NAN], [1.0, 1.0, 1.0], [NAN, NAN])
    ]
    lengths = [np.array(tokens) for tokens in ([3, 4, 5, 6], [9, 2, 4, 3], [1, 7], [2, 3, 4], [5, 5])]
    advantages = estimate(rewards, lengths)
    expect(any(advantages_G.any() for advantages_G in advantages), "rewards that differ give advantages", advantages)
    _check_missing(estimate, rewards, lengths, advantages)
    if baseline == "group":
        for at, group in ((2, "a group with one reward"), (3, "a group of equal rewards")):
            expect(_is_zero(advantages[at]), f"{group} has advantages of 0", advantages[at])
    for sum_of in {"group": advantages, "step": [np.concatenate(advantages)], "no": []}[sums_to_zero]:
        expect(_cancels(sum_of), f"the advantages of a {sums_to_zero} sum to zero", sum_of)
    turned = estimate(*([array_G[::-1].copy() for array_G in reversed(arrays)] for arrays in (rewards, lengths)))
    same = _equal([advantages_G[::-1] for advantages_G in reversed(turned)], advantages)
    expect(same, "the order of groups and episodes does not matter", turned)
    _check_equal_rewards(estimate)
    for scale in (1e-3, 1e6):  # as_advantages refuses what is not finite
        estimate([rewards_G * scale for rewards_G in rewards], lengths)


def _check_missing(
    estimate: Estimate, rewards: Sequence[Rewards], lengths: Sequence[Lengths], advantages: Sequence[Floats]
) -> None:
    for rewards_G, advantages_G in zip(rewards, advantages, strict=True):
        expect(
            not advantages_G[np.isnan(rewards_G)].any(), "an episode without a reward has the advantage 0", advantages
        )
    rewarded = [~np.isnan(rewards_G) for rewards_G in rewards]

    def known(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return [array_G[flags_G] for array_G, flags_G in zip(arrays, rewarded, strict=True)]

    same = _equal(estimate(known(rewards), known(lengths)), known(advantages))
    expect(same, "an episode without a reward changes no other advantage", advantages)


def _check_equal_rewards(estimate: Estimate) -> None:
    noise = np.array([0.5, 0.5 + TOLERANCE / 4, 0.5])
    for rewards in ([noise, noise], [np.full(3, 7.0)], [np.array([5.0])], [np.array([NAN])], [np.empty(0)], []):
        advantages = estimate(rewards, [np.arange(3, 3 + len(rewards_G)) for rewards_G in rewards])
        zero = all(map(_is_zero, advantages))
        expect(zero, "a step of equal rewards, or of none, has advantages of 0", (rewards, advantages))


def check_filter(function: Callable[..., Any], **keys: Any) -> None:
    """Hold a filter of groups to its contract: from the surviving episodes of a group to the reason it is filtered, or "".
    ``keys``: its keyword arguments, as a config would give them."""
    groups = [
        [episode(index=at, reward=reward) for at, reward in enumerate(rewards)]
        for rewards in ((1.0, 0.0, 0.5), (1.0, 1.0), (None, None), (0.0,))
    ]
    groups.append([episode(index=0, versions=(), reward=0.0), episode(index=1, versions=(0, 1), reward=1.0)])
    for episodes in groups:
        said = _reason(function, episodes, keys)
        expect(len(said.splitlines()) <= 1, "the reason is one line", said)
        expect(_reason(function, episodes, keys) == said, "the same group has the same reason", said)
        expect(_reason(function, episodes[::-1], keys) == said, "the order of the episodes does not matter", said)


def _reason(function: Callable[..., Any], episodes: Sequence[Episode], keys: dict[str, Any]) -> str:
    said = function(episodes, **keys)
    expect(isinstance(said, str), 'the reason is text, "" to keep the group', said)
    return reason(episodes, Filter(), rules={"the filter": lambda _: said})


def _step(rewards: Sequence[Rewards], lengths: Sequence[Lengths]) -> StepRewards:
    """A step whose rewards are each the weighted sum of two scores."""
    return StepRewards(
        rewards=list(rewards),
        lengths=list(lengths),
        tolerance=TOLERANCE,
        scores=[np.stack([rewards_G, -rewards_G / 2], 1) for rewards_G in rewards],
        weights=[1.5, 1.0],
    )


def _equal(a: Sequence[Floats], b: Sequence[Floats], *, rounding: float = ROUNDING) -> bool:
    return len(a) == len(b) and all(np.allclose(x, y, rtol=rounding, atol=rounding) for x, y in zip(a, b, strict=True))


def _is_zero(advantages: Floats) -> bool:
    return not advantages.size or float(np.abs(advantages).max()) <= ROUNDING


def _cancels(advantages: Floats) -> bool:
    return abs(float(advantages.sum(dtype=np.float64))) <= ROUNDING * (1 + float(np.abs(advantages).sum()))
