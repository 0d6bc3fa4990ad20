"""Every objective and estimator keeps its contract, and each clause of the suites is broken on purpose, so that it can fail."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from corrente.algo.kinds import ADVANTAGES, OBJECTIVES
from corrente.common.imports import load_object
from corrente.config import UserKind
from corrente.testing import ContractError, check_estimator, check_filter, check_objective

OURS = [cls for cls in OBJECTIVES if not issubclass(cls, UserKind)]
ESTIMATORS = [cls for cls in ADVANTAGES if not issubclass(cls, UserKind)]
SUMS = {"opo": "no", "reinforce_pp": "step", "gdpo": "step"}


def _tag(cls: type[msgspec.Struct]) -> str:
    return str(cls.__struct_config__.tag)


@pytest.mark.slow
@pytest.mark.parametrize("cls", OURS, ids=_tag)
def test_every_objective_keeps_its_contract(cls: Any):
    check_objective(load_object(OBJECTIVES[cls].function), **msgspec.structs.asdict(cls()))


@pytest.mark.parametrize("cls", ESTIMATORS, ids=_tag)
def test_every_estimator_keeps_its_contract(cls: Any):
    kind, settings = ADVANTAGES[cls], [cls()]
    if _tag(cls) == "grpo":
        settings = [cls(scale_rewards=scale) for scale in ("group", "batch", "none")]
    for keys in settings:
        check_estimator(
            load_object(kind.function),
            baseline=kind.baseline,
            sums_to_zero=SUMS.get(_tag(cls), "group"),  # pyright: ignore[reportArgumentType]
            **msgspec.structs.asdict(keys),
        )


# ---- broken on purpose --------------------------------------------------------------------------------------------------------


def _reinforce(inputs, *, scale: float = 1.0):
    return scale * inputs.advantages_K * inputs.logprobs_K


def _forgets_the_gradient(inputs):
    return (inputs.advantages_K * inputs.logprobs_K).detach()


def _looks_at_other_rows(inputs):
    return _reinforce(inputs) * inputs.logprobs_K.detach().mean()


def _minds_the_order(inputs):
    return _reinforce(inputs) * torch.arange(1, 1 + len(inputs.logprobs_K))


def _overflows(inputs):
    return torch.exp(inputs.logprobs_K - inputs.proximal_K) * inputs.advantages_K


def _changes_its_inputs(inputs):
    inputs.advantages_K.mul_(0.5)
    return _reinforce(inputs)


def _means_over_tokens(inputs):
    return _reinforce(inputs).mean()


_OWN = torch.ones(1, requires_grad=True)


def _learns_something_else(inputs):
    return _OWN * _reinforce(inputs)


def _guesses(inputs):
    return _reinforce(inputs) * torch.rand(1)


def test_objective_of_a_users_keeps_the_contract():
    check_objective(_reinforce, scale=2.0)


@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (_forgets_the_gradient, "differentiable in the log-probs of the current policy"),
        (_learns_something_else, "of the current policy alone"),
        (_looks_at_other_rows, "whatever rows are beside it"),
        (_minds_the_order, "whatever rows are beside it"),
        (_overflows, "finite however far the policies are apart"),
        (_changes_its_inputs, "not changed|same J"),
        (_guesses, "same inputs give the same J"),
        (lambda inputs: 0 * _reinforce(inputs), "has a gradient"),
    ],
)
def test_broken_objectives_are_caught(broken: Any, clause: str):
    with pytest.raises(ContractError, match=clause):
        check_objective(broken)


def test_objective_that_does_not_line_up_is_refused():
    from corrente.errors import AlignmentError

    for broken, words in ((_means_over_tokens, r"shape \(\) for 15 tokens"), (lambda inputs: 3.0, "returned float")):
        with pytest.raises(AlignmentError, match=words):
            check_objective(broken)


def _centred(step):
    return [np.nan_to_num(r - np.nanmean(r)) if (~np.isnan(r)).any() else np.zeros(len(r)) for r in step.rewards]


def _counts_none_as_zero(step):
    return [np.nan_to_num(r) - (np.nan_to_num(r).mean() if len(r) else 0) for r in step.rewards]


def _keeps_a_single_one(step):
    return [a if len(a) != 1 else a + 1 for a in _centred(step)]


def _blows_noise_up(step):
    return [a / (np.nanstd(r) + 1e-12) if (~np.isnan(r)).any() else a for r, a in _pairs(step)]


def _pays_the_first(step):
    return [a + 0.1 * (np.arange(len(a)) == 0) for a in _centred(step)]


def _pushes_everything_up(step):
    return [np.where(np.isnan(r), 0, a + 0.5 * (np.nanstd(r) > 0) if len(r) else a) for r, a in _pairs(step)]


def _pairs(step):
    return zip(step.rewards, _centred(step), strict=True)


def _halves_the_rewards(step):
    for rewards_G in step.rewards:
        rewards_G *= 0.5
    return _centred(step)


@pytest.mark.filterwarnings("ignore:Degrees of freedom")
@pytest.mark.parametrize(
    ("broken", "clause"),
    [
        (_counts_none_as_zero, "an episode without a reward"),
        (_keeps_a_single_one, "an episode without a reward changes|group with one reward"),
        (_blows_noise_up, "a step of equal rewards"),
        (_pays_the_first, "an episode without a reward|group of equal rewards|order"),
        (_pushes_everything_up, "sum to zero"),
        (_halves_the_rewards, "same advantages|not changed"),
        (lambda step: [np.zeros(len(r)) for r in step.rewards], "rewards that differ"),
    ],
)
def test_broken_estimators_are_caught(broken: Any, clause: str):
    with pytest.raises(ContractError, match=clause):
        check_estimator(broken, sums_to_zero="group")


def test_estimators_that_do_not_line_up_or_are_not_finite_are_refused():
    from corrente.errors import AlignmentError, PipelineError

    with pytest.raises(AlignmentError, match="shapes"):
        check_estimator(lambda step: _centred(step)[:-1])
    with pytest.raises(AlignmentError, match="an array"):
        check_estimator(lambda step: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PipelineError, match="not a finite number"):
        check_estimator(lambda step: step.rewards)


def test_filters_that_break_their_contract_are_caught():
    check_filter(lambda episodes, least: "too small" if len(episodes) < least else "", least=2)
    counted = iter(range(1000))
    for broken, clause in (
        (lambda episodes: len(episodes) > 2, "the reason is text"),
        (lambda episodes: "two\nlines", "one line"),
        (lambda episodes: f"number {next(counted)}", "same reason"),
        (lambda episodes: "first failed" if episodes[0].reward == 1 else "", "order of the episodes"),
    ):
        with pytest.raises(ContractError, match=clause):
            check_filter(broken)
