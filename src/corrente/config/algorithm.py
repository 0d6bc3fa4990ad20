"""What is learned from a sample, as a config says it: objective and advantage, and what becomes of stale samples.

Every key is explained in docs/reference/algorithms.md; combinations that make no sense are refused by algo/checks.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from corrente.config.section import Fraction, Natural, NonNegative, Positive, PositiveFloat, Section


class Algo(Section, frozen=True, kw_only=True):
    """Objective and advantage. Each is explained in docs/reference/algorithms.md."""

    advantage: Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "opo", "gdpo"] = "grpo"
    """What an episode earned beyond which baseline, and how it is scaled."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """With grpo: divide advantages by the standard deviation of the rewards of the group, of the step, or not at all."""
    credit: Literal["outcome", "step", "turn"] = "outcome"
    """Who gets what an episode earned: all its tokens alike; besides, each token what the steps after it earned; or besides,
    each turn what it earned itself."""
    overlong_tokens: Natural = 0
    """Punish completions that come within this many tokens of sampling.max_tokens, in proportion. 0: off."""
    overlong_penalty: PositiveFloat = 1.0
    """Taken off the reward of a completion that used the whole budget, with overlong_tokens above 0."""
    length_penalty: NonNegative = 0.0
    """Taken off the reward of a completion that used the whole budget, and of others in proportion to their length."""
    loss: Literal[
        "dapo",
        "grpo",
        "bnpo",
        "dr_grpo",
        "luspo",
        "gspo",
        "gspo_token",
        "gmpo",
        "cispo",
        "sapo",
        "vespo",
        "topr",
        "kimi_k15",
        "kimi_k2",
        "dppo_tv",
        "dppo_kl",
        "ipo",
        "dro",
        "reinforce",
    ] = "dapo"
    """The policy objective, and with it how token losses are averaged."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of the clipped objectives, cispo and sapo: of each token, or the geometric mean over its sequence (GSPO)."""
    aggregation: Literal["auto", "token", "sequence", "sequence_sum", "fixed"] = "auto"
    """Mean over the step's tokens, mean of sequence means, mean of sequence sums, or sums over sampling.max_tokens;
    auto: what algo.loss stands for."""
    denominator: Literal["fixed", "effective"] = "fixed"
    """Average over all that was sampled, or over what is left after masks and corrections. Effective with a correction
    costs a forward pass before the first update."""
    epsilon: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Clip of the ratio below, 1 - epsilon."""
    epsilon_high: PositiveFloat | None = 0.28
    """Clip of the ratio above, 1 + epsilon_high. None: same as epsilon. With cispo: the largest weight itself."""
    delta: Annotated[float, Meta(gt=1)] | None = 4.0
    """Dual clip: upper bound of the ratio where the advantage is negative. None: off."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """With sapo: steepness of the gate where the advantage is positive."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """With sapo: steepness of the gate elsewhere."""
    vespo_k_pos: NonNegative = 2.0
    """With vespo: exponent of the weight where the advantage is not negative."""
    vespo_lambda_pos: PositiveFloat = 3.0
    """With vespo: decay of the weight there."""
    vespo_k_neg: NonNegative = 3.0
    """With vespo: exponent where the advantage is negative."""
    vespo_lambda_neg: PositiveFloat = 2.0
    """With vespo: decay there."""
    mask_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """With dppo_tv, dppo_kl and ipo: largest fall of a token's probability (dppo_kl: divergence) that is still trained on."""
    mask_high: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """With dppo_tv, dppo_kl and ipo: largest rise."""
    tau: PositiveFloat = 0.1
    """With kimi_k15, kimi_k2 and dro: weight of the squared log-ratio."""
    proximal: Literal["auto", "behaviour", "recompute", "interpolate"] = "auto"
    """What the objective's ratio is taken to: the recorded behaviour policy, the policy before the step's first update, or
    a mix of the two by age. auto: recompute with an importance weight on an objective with a ratio, behaviour otherwise."""
    num_iterations: Positive = 1
    """Updates from one batch, each over all of it."""
    beta: NonNegative = 0.0
    """Weight of the KL to the frozen initial model. 0: the reference is not loaded."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL goes: added to the loss, or taken off the advantage of the tokens up to it."""
    use_bias_correction_kl: bool = False
    """Multiply the KL of a token in the loss by the objective's ratio, which makes its gradient that of the reverse KL."""
    entropy_coef: NonNegative = 0.0
    """Weight of the mean entropy of the trained tokens, which is rewarded."""
    top_entropy_quantile: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Train the policy on this part of the step's tokens, those of highest entropy. Below 1 it costs a forward pass."""
    mask_truncated: bool = False
    """Withhold completions cut off by the budget from the loss; their reward stays in the baseline."""


class Distill(Section, frozen=True, kw_only=True):
    """What the policy learns from teachers: scorers of kind teacher, teacher_server or self_teacher."""

    loss: Literal["none", "advantage", "k1", "k2", "k3", "jsd"] = "none"
    """How it is drawn to them. advantage: log teacher - log policy of each sampled token is its advantage. k1, k2, k3: an
    estimate of the reverse KL in the loss. jsd: the divergence over the teacher's likeliest tokens. none: what they say is only
    recorded."""
    weight: PositiveFloat = 1.0
    """Of that, in the loss."""
    reward_weight: NonNegative = 0.0
    """Of the advantage that rewards give. 0: rewards are reported, and not learned from."""
    beta: Fraction = 0.5
    """With jsd: 0 is the forward KL, 1 the reverse KL, between them the generalised Jensen-Shannon divergence (GKD)."""
