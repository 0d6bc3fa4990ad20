"""Losses against numbers worked out by hand, finite differences, and the learner's own head against autograd."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from corrente.algo import aggregate, checks, clip
from corrente.algo.base import Trained
from corrente.algo.kl import k3
from corrente.algo.losses import PolicyObjective
from corrente.algo.ratio import log_ratio
from corrente.config import Algo, RunConfig, Staleness
from corrente.data.types import Sampling
from corrente.errors import ConfigError
from corrente.learner import head
from corrente.testing import samples


def _f(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _objective(algo: Algo | None = None, **staleness) -> PolicyObjective:
    return PolicyObjective(RunConfig(algo=algo or Algo(), staleness=Staleness(**staleness)))


def _loss(
    objective: PolicyObjective, ratio: torch.Tensor, advantages: torch.Tensor, reference: torch.Tensor | None = None
):
    """Loss and its gradient with respect to log-probs, at the given ratios and weight 1."""
    behaviour = torch.full_like(ratio, -1.5)
    logprobs = (behaviour + ratio.log()).requires_grad_()
    loss = objective(
        Trained(
            logprobs_K=logprobs,
            behaviour_K=behaviour,
            advantages_K=advantages,
            weights_K=torch.ones_like(ratio),
            reference_K=reference,
        )
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    return loss, gradient


# ---- the clipped objective --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "value"),
    [
        (1.0, 2.0, 2.0),
        (1.1, 2.0, 2.2),
        (1.5, 2.0, 2.56),  # clipped at 1.28
        (0.5, 2.0, 1.0),  # too unlikely, but the advantage pulls it back: free
        (0.5, -2.0, -1.6),  # clipped at 0.8
        (0.9, -2.0, -1.8),
        (1.5, -2.0, -3.0),  # free: too likely, and it is to become less so
        (3.9, -2.0, -7.8),
        (5.0, -2.0, -8.0),  # dual clip at 4
        (5.0, 2.0, 2.56),
    ],
)
def test_clip_by_hand(ratio, advantage, value):
    got = clip.clipped(_f(ratio), _f(advantage), epsilon=0.2, epsilon_high=0.28, delta=4.0)
    assert got.item() == pytest.approx(value)


def test_no_dual_clip_without_delta():
    assert clip.clipped(_f(9.0), _f(-2.0), epsilon=0.2, epsilon_high=0.28, delta=None).item() == pytest.approx(-18.0)


def test_equal_epsilons_when_high_is_not_given():
    loss, _ = _loss(_objective(Algo(epsilon=0.1, epsilon_high=None)), _f(1.5), _f(1.0))
    assert loss.total.item() == pytest.approx(-1.1)


def test_gradient_at_ratio_one_is_reinforce():
    _, gradient = _loss(_objective(), _f(1.0, 1.0, 1.0), _f(0.5, -2.0, 0.0))
    torch.testing.assert_close(gradient, _f(-0.5, 2.0, 0.0))


def test_cut_tokens_have_no_gradient_and_are_counted():
    ratio, advantages = _f(0.5, 1.5, 5.0, 1.1, 0.5), _f(-1.0, 1.0, -1.0, 1.0, 1.0)
    loss, gradient = _loss(_objective(), ratio, advantages)
    torch.testing.assert_close(gradient, _f(0, 0, 0, -1.1, -0.5))
    assert loss.low_K.tolist() == [True, False, False, False, False]
    assert loss.high_K.tolist() == [False, True, False, False, False]
    assert loss.cut_K.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("correct", ["none", "tis", "mis"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_gradient_equals_finite_differences(correct, beta):
    objective = _objective(Algo(beta=beta), correct=correct)
    rng = torch.Generator().manual_seed(3)
    behaviour = -torch.rand(40, generator=rng, dtype=torch.float64) * 3
    advantages, weights = (torch.randn(40, generator=rng, dtype=torch.float64) for _ in range(2))
    reference = behaviour + 0.3 * torch.randn(40, generator=rng, dtype=torch.float64) if beta else None
    at = behaviour + 0.4 * torch.randn(40, generator=rng, dtype=torch.float64)

    def total(logprobs: torch.Tensor) -> torch.Tensor:
        proximal = at if correct != "none" else behaviour
        if correct == "none":
            return objective(
                Trained(
                    logprobs_K=logprobs,
                    behaviour_K=behaviour,
                    advantages_K=advantages,
                    weights_K=weights,
                    reference_K=reference,
                )
            ).total
        # the constant weight is the ratio at the point of differentiation; only pi / pi_prox moves
        rho = (at - behaviour).exp()
        weight = rho.clamp(max=2) if correct == "tis" else torch.where(rho > 2, 0.0, rho)
        value = -(weights * weight * (logprobs - proximal).exp() * advantages).sum()
        if reference is not None:
            x = reference - logprobs
            value = value + beta * (weights * (x.exp() - 1 - x)).sum()
        return value

    logprobs = at.clone().requires_grad_()
    loss = objective(
        Trained(
            logprobs_K=logprobs,
            behaviour_K=behaviour,
            advantages_K=advantages,
            weights_K=weights,
            reference_K=reference,
        )
    )
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    step = 1e-6
    for k in range(40):
        delta = torch.zeros(40, dtype=torch.float64)
        delta[k] = step
        numeric = (total(at + delta) - total(at - delta)) / (2 * step)
        assert gradient[k].item() == pytest.approx(numeric.item(), abs=1e-6)


def test_no_gradient_flows_through_recorded_logprobs():
    for correct in ("none", "tis", "mis"):
        inputs = [_f(-1.0, -2.0).requires_grad_() for _ in range(3)]
        objective = _objective(Algo(beta=0.5), correct=correct)
        loss = objective(
            Trained(
                logprobs_K=inputs[0],
                behaviour_K=inputs[1],
                advantages_K=_f(1.0, -1.0),
                weights_K=_f(1.0, 1.0),
                reference_K=inputs[2],
            )
        )
        loss.total.backward()
        assert inputs[0].grad is not None
        assert inputs[1].grad is None or not inputs[1].grad.any()
        assert inputs[2].grad is None or not inputs[2].grad.any()


def test_huge_ratios_stay_finite():
    loss, gradient = _loss(_objective(Algo(delta=None)), _f(1e300, 1e300, 1e-300), _f(1.0, -1.0, 1.0))
    assert torch.isfinite(loss.total)
    assert torch.isfinite(gradient).all()


def test_nan_is_not_hidden():
    assert log_ratio(_f(math.nan), _f(-1.0)).isnan().all()


# ---- corrections ------------------------------------------------------------------------------------------------------------


def test_truncated_importance_weights_by_hand():
    loss, gradient = _loss(_objective(correct="tis"), _f(0.5, 1.5, 3.0), _f(1.0, 1.0, -1.0))
    torch.testing.assert_close(gradient, _f(-0.5, -1.5, 2.0))
    assert loss.total.item() == pytest.approx(-(0.5 + 1.5 - 2.0))
    assert loss.high_K.tolist() == [False, False, True]


def test_masked_importance_weights_by_hand():
    loss, gradient = _loss(_objective(correct="mis"), _f(0.5, 1.5, 3.0), _f(1.0, 1.0, -1.0))
    torch.testing.assert_close(gradient, _f(-0.5, -1.5, 0.0))
    assert loss.cut_K.tolist() == [False, False, True]


def test_cap_is_the_configured_one():
    _, gradient = _loss(_objective(correct="tis", correct_cap=1.2), _f(1.5), _f(1.0))
    torch.testing.assert_close(gradient, _f(-1.2))


# ---- divergence -------------------------------------------------------------------------------------------------------------


def test_k3_by_hand():
    """pi 1/2, reference 1/4: x = 1/2, 1/2 - 1 + log 2."""
    assert k3(_f(math.log(0.5)), _f(math.log(0.25))).item() == pytest.approx(math.log(2) - 0.5)
    assert k3(_f(-1.0), _f(-1.0)).item() == 0


def test_k3_averages_to_the_divergence():
    p, q = _f(0.5, 0.3, 0.2), _f(0.2, 0.5, 0.3)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), exact)


def test_reference_adds_its_penalty():
    loss, _ = _loss(_objective(Algo(beta=0.1)), _f(1.0), _f(0.0), reference=_f(-1.5 - math.log(2)))
    assert loss.total.item() == pytest.approx(0.1 * (math.log(2) - 0.5))


# ---- aggregation ------------------------------------------------------------------------------------------------------------


def test_token_mean_weighs_tokens_not_rows():
    """100 tokens at loss 2.0 and 900 at 0.5 average 0.65."""
    weights = aggregate.token_mean(np.array([100, 900]), tokens=1000)
    assert 100 * 2.0 * weights[0] + 900 * 0.5 * weights[1] == pytest.approx(0.65)


def test_sequence_mean_weighs_rows_not_tokens():
    weights = aggregate.sequence_mean(np.array([100, 900]), sequences=2)
    assert 100 * 2.0 * weights[0] + 900 * 0.5 * weights[1] == pytest.approx(1.25)


def test_fixed_length_divides_by_the_budget():
    weights = aggregate.fixed_length(np.array([100, 900]), sequences=2, max_tokens=1000)
    assert 100 * 2.0 * weights[0] + 900 * 0.5 * weights[1] == pytest.approx(650 / 2000)


@pytest.mark.parametrize(("loss", "want"), [("dapo", 1 / 20), ("grpo", 1 / (4 * 2)), ("dr_grpo", 1 / (4 * 16))])
def test_denominators_are_those_of_the_whole_step(loss, want):
    """Four episodes and twenty tokens entered the step; one row of two trained tokens is left of them."""
    row = samples.row(tokens=range(4), prompt_tokens=2)
    objective = PolicyObjective(RunConfig(algo=Algo(loss=loss), sampling=Sampling(max_tokens=16)))
    weights = objective.row_weights(samples.batch(rows=[row], sequences=4, tokens=20))
    assert weights.tolist() == [pytest.approx(want)]


# ---- log-probs of chosen tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 3 * 11 * 8, 1 << 20])
@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_head_equals_autograd(bias, temperature, chunk, keep, monkeypatch):
    """Against log_softmax of all logits, for every way of cutting into chunks, kept and recomputed."""
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(head, "KEEP_BYTES", keep)
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    offset = torch.randn(11, dtype=torch.float64) if bias else None
    leaves = [t.requires_grad_() for t in (hidden, weight, offset) if t is not None]
    slot = torch.tensor([0, 0, 2, 6, 6, 6, 3])
    targets = torch.tensor([4, 9, 0, 3, 3, 10, 1])
    upstream = torch.randn(7, dtype=torch.float64)

    logits = torch.nn.functional.linear(hidden, weight, offset) / temperature
    want = torch.log_softmax(logits, -1)[slot, targets]
    got, entropy, _ = head.token_logprobs(
        hidden, weight, offset, slot_K=slot, targets_K=targets, temperature=temperature
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    for mine, theirs in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("keep", [0, 1 << 20])
@pytest.mark.parametrize("both", [True, False])
def test_entropy_is_differentiable(temperature, chunk, keep, both, monkeypatch):
    """Alone, and with log-probs; against autograd over all logits, and the same from logits a model made."""
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(head, "KEEP_BYTES", keep)
    torch.manual_seed(0)
    leaves = [torch.randn(n, 5, dtype=torch.float64).requires_grad_() for n in (7, 11)]
    slot, targets = torch.tensor([0, 0, 2, 6]), torch.tensor([4, 9, 0, 3])
    of_entropy, of_logprobs = torch.randn(7, dtype=torch.float64), torch.randn(4, dtype=torch.float64) * both

    def total(logprobs, entropy):
        return (of_entropy * entropy).sum() + ((of_logprobs * logprobs).sum() if both else 0)

    logits = leaves[0] @ leaves[1].T
    every = torch.log_softmax(logits / temperature, -1)
    want = torch.autograd.grad(total(every[slot, targets], -(every.exp() * every).sum(-1)), leaves)
    kwargs = {"slot_K": slot, "targets_K": targets, "temperature": temperature}
    for out in (
        head.token_logprobs(*leaves, None, **kwargs),
        head.logprobs_from_logits(leaves[0] @ leaves[1].T, **kwargs),
    ):
        for mine, theirs in zip(torch.autograd.grad(total(*out[:2]), leaves), want, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_head_is_exact_where_half_precision_would_not_be():
    """Hidden states in bfloat16: the softmax over them still sums to one in float32."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 8).bfloat16(), torch.randn(50, 8)
    every = torch.arange(50).repeat(3)
    slot = torch.arange(3).repeat_interleave(50)
    got, *_ = head.token_logprobs(hidden, weight, None, slot_K=slot, targets_K=every, temperature=1.0)
    torch.testing.assert_close(got.view(3, 50).exp().sum(-1), torch.ones(3), atol=1e-5, rtol=0)


# ---- what is refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (RunConfig(sampling=Sampling(temperature=0)), "sampling.temperature = 0"),
        (RunConfig(algo=Algo(delta=1.2, epsilon_high=0.28)), "algo.delta = 1.2"),
    ],
)
def test_check_refuses_naming_the_key(config, key):
    with pytest.raises(ConfigError) as refused:
        checks.check(config)
    assert str(refused.value).startswith(key)


def test_check_accepts_temperature_alone():
    checks.check(RunConfig(sampling=Sampling(temperature=0.7)))
