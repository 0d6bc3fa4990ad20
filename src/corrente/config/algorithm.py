"""Settings of learning: objective, advantage and what they share, and what is learned from teachers.

Every key is explained in docs/reference/algorithms.md; combinations that make no sense are refused by algo/checks.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from corrente.config.advantages import AdvantageSection, GrpoAdvantage
from corrente.config.objectives import DapoObjective, ObjectiveSection
from corrente.config.section import Fraction, Natural, NonNegative, Positive, PositiveFloat, Section


class Algo(Section, frozen=True, kw_only=True):
    """Keys that every objective and advantage estimator shares. Each is explained in [algorithms](algorithms.md)."""

    objective: ObjectiveSection = DapoObjective()
    """The policy objective, and with it how token losses are averaged."""
    advantage: AdvantageSection = GrpoAdvantage()
    """The baseline that an episode's reward is compared with, and how the difference is scaled."""
    credit: Literal["outcome", "step", "turn"] = "outcome"
    """Tokens that are credited with what an episode earned: all alike; besides, each token with what the steps after it
    earned; or besides, each turn with what it earned itself."""
    overlong_tokens: Natural = 0
    """Punish completions that come within this many tokens of sampling.max_tokens, in proportion. 0: off."""
    overlong_penalty: PositiveFloat = 1.0
    """Taken off the reward of a completion that used the whole budget, with overlong_tokens above 0."""
    length_penalty: NonNegative = 0.0
    """Taken off the reward of a completion that used the whole budget, and of others in proportion to their length."""
    aggregation: Literal["auto", "token", "sequence", "sequence_sum", "fixed"] = "auto"
    """Mean over the step's tokens, mean of sequence means, mean of sequence sums, or sums over sampling.max_tokens;
    auto: the objective's own."""
    denominator: Literal["fixed", "effective"] = "fixed"
    """Average over all that was sampled, or over what is left after masks and corrections. Effective with a correction
    costs a forward pass before the first update."""
    proximal: Literal["auto", "behaviour", "recompute", "interpolate"] = "auto"
    """The policy that the objective's ratio is taken to: the recorded behaviour policy, the policy before the step's first
    update, or a mix of the two by age. auto: recompute with an importance weight on an objective with a ratio, behaviour
    otherwise."""
    num_iterations: Positive = 1
    """Updates from one batch, each over all of it."""
    beta: NonNegative = 0.0
    """Weight of the KL to the frozen initial model. 0: the reference is not loaded."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL."""
    kl_in: Literal["loss", "reward"] = "loss"
    """The KL is added to the loss, or taken off the advantage of the tokens up to it."""
    use_bias_correction_kl: bool = False
    """Multiply the KL of a token in the loss by the objective's ratio, which makes its gradient that of the reverse KL."""
    ref_model_sync_steps: Natural = 0
    """Optimizer updates after which the reference of the KL moves towards the policy; 0: it stays the initial model."""
    ref_model_mixup_alpha: Annotated[float, Meta(gt=0, le=1)] = 0.6
    """The policy's part in the reference after such a move. TR-DPO, arXiv:2404.09656."""
    entropy_coef: NonNegative = 0.0
    """Weight of the mean entropy of the trained tokens, which is rewarded."""
    top_entropy_quantile: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Train the policy on this part of the step's tokens, those of highest entropy. Below 1 it costs a forward pass."""
    mask_truncated: bool = False
    """Withhold completions cut off by the budget from the loss; their reward stays in the baseline."""


class Distill(Section, frozen=True, kw_only=True):
    """Learning from teachers: scorers of kind teacher, teacher_server or self_teacher."""

    loss: Literal["none", "advantage", "k1", "k2", "k3", "jsd"] = "none"
    """The term that draws the policy to its teachers. advantage: log teacher - log policy of each sampled token is its advantage.
    k1, k2, k3: an estimate of the reverse KL in the loss. jsd: the divergence over the teacher's likeliest tokens. none:
    teachers' log-probs are only recorded."""
    weight: PositiveFloat = 1.0
    """Weight of that term in the loss."""
    reward_weight: NonNegative = 0.0
    """Weight of the advantage that rewards give. 0: rewards are reported, and not learned from."""
    beta: Fraction = 0.5
    """With jsd: 0 is the forward KL, 1 the reverse KL, between them the generalised Jensen-Shannon divergence (GKD)."""
