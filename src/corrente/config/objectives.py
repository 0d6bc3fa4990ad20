"""The policy objectives a config can choose from: the kinds of ``[algo.objective]``, each with its own keys.

A section holds the numbers of its objective alone. The formulas are in algo/, one file per objective, and algo/kinds.py says
which function a section stands for. What every objective shares (KL, entropy, averages) are keys of ``[algo]``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from corrente.config.section import Kind, NonNegative, PositiveFloat, UserKind

RatioLevel = Literal["token", "sequence"]
Epsilon = Annotated[float, Meta(gt=0, lt=1)]
ProbabilityBound = Annotated[float, Meta(gt=0, le=1)]


class ClippedObjective(Kind, frozen=True, kw_only=True):
    """The keys of PPO's clip, with unequal bounds and the dual clip."""

    epsilon: Epsilon = 0.2
    """The ratio is clipped below at 1 - epsilon."""
    epsilon_high: PositiveFloat | None = 0.28
    """The ratio is clipped above at 1 + epsilon_high. None: epsilon."""
    delta: Annotated[float, Meta(gt=1)] | None = 4.0
    """Dual clip: upper bound of the ratio where the advantage is negative. None: off."""


class LeveledClippedObjective(ClippedObjective, frozen=True, kw_only=True):
    """The clip, of the ratio of a token or of a sequence."""

    importance_sampling_level: RatioLevel = "token"
    """The ratio: of each token, or the geometric mean over its sequence (GSPO)."""


class DapoObjective(LeveledClippedObjective, frozen=True, kw_only=True, tag="dapo"):
    """The clipped objective, averaged over the tokens of the step. DAPO, arXiv:2503.14476."""


class GrpoObjective(LeveledClippedObjective, frozen=True, kw_only=True, tag="grpo"):
    """The clipped objective, averaged over sequence means. GRPO, arXiv:2402.03300."""


class BnpoObjective(LeveledClippedObjective, frozen=True, kw_only=True, tag="bnpo"):
    """The clipped objective, averaged over the tokens of the step that are trained on."""


class DrGrpoObjective(LeveledClippedObjective, frozen=True, kw_only=True, tag="dr_grpo"):
    """The clipped objective, sums over sampling.max_tokens. Dr. GRPO, arXiv:2503.20783."""


class SequenceClippedObjective(ClippedObjective, frozen=True, kw_only=True):
    """The clip of a sequence's ratio, a geometric mean that stays near 1. The defaults are GSPO's."""

    epsilon: Epsilon = 3e-4
    """The sequence's ratio is clipped below at 1 - epsilon."""
    epsilon_high: PositiveFloat | None = 4e-4
    """The sequence's ratio is clipped above at 1 + epsilon_high. None: epsilon."""


class LuspoObjective(SequenceClippedObjective, frozen=True, kw_only=True, tag="luspo"):
    """The clipped objective of the sequence's ratio, averaged over sequence sums. LUSPO, arXiv:2602.05261."""


class GspoObjective(SequenceClippedObjective, frozen=True, kw_only=True, tag="gspo"):
    """The clipped objective of the sequence's ratio, averaged over sequence means. GSPO, arXiv:2507.18071."""


class GspoTokenObjective(SequenceClippedObjective, frozen=True, kw_only=True, tag="gspo_token"):
    """The value of gspo, with a gradient and an advantage of each token's own."""


class GmpoObjective(Kind, frozen=True, kw_only=True, tag="gmpo"):
    """The geometric mean of clipped ratios. GMPO, arXiv:2507.20673, which uses 0.33 and 0.49."""

    epsilon: Epsilon = 0.2
    """A token's ratio is clipped below at 1 - epsilon where the advantage is negative."""
    epsilon_high: PositiveFloat | None = 0.28
    """A token's ratio is clipped above at 1 + epsilon_high where it is not. None: epsilon."""


class CispoObjective(Kind, frozen=True, kw_only=True, tag="cispo"):
    """REINFORCE with a truncated importance weight. CISPO, arXiv:2506.13585."""

    epsilon_high: PositiveFloat = 5.0
    """The largest weight. 5: ScaleRL, arXiv:2510.13786."""
    importance_sampling_level: RatioLevel = "token"
    """The weight: of each token, or the geometric mean over its sequence."""


class SapoObjective(Kind, frozen=True, kw_only=True, tag="sapo"):
    """A smooth gate of the ratio in place of the clip. SAPO, arXiv:2511.20347."""

    temperature_pos: PositiveFloat = 1.0
    """Steepness of the gate where the advantage is positive."""
    temperature_neg: PositiveFloat = 1.05
    """Steepness of the gate elsewhere."""
    importance_sampling_level: RatioLevel = "token"
    """The ratio: of each token, or the geometric mean over its sequence."""


class VespoObjective(Kind, frozen=True, kw_only=True, tag="vespo"):
    """REINFORCE with a gamma-shaped weight of the sequence's product of ratios. VESPO, arXiv:2602.10693."""

    k_pos: NonNegative = 2.0
    """Exponent of the weight where the advantage is not negative."""
    lambda_pos: PositiveFloat = 3.0
    """Decay of the weight where the advantage is not negative."""
    k_neg: NonNegative = 3.0
    """Exponent of the weight where the advantage is negative."""
    lambda_neg: PositiveFloat = 2.0
    """Decay of the weight where the advantage is negative."""


class ToprObjective(Kind, frozen=True, kw_only=True, tag="topr"):
    """REINFORCE whose bad samples fade as the policy leaves them. TOPR, arXiv:2503.14286. It has no keys."""


class SquaredObjective(Kind, frozen=True, kw_only=True):
    """A policy gradient that a square holds near the proximal policy."""

    tau: PositiveFloat = 0.1
    """Weight of the squared log-ratio."""


class KimiK15Objective(SquaredObjective, frozen=True, kw_only=True, tag="kimi_k15"):
    """A policy gradient with the square of the sequence's log-ratio. Kimi k1.5, arXiv:2501.12599."""


class KimiK2Objective(SquaredObjective, frozen=True, kw_only=True, tag="kimi_k2"):
    """Regression of the sequence's log-ratio on its advantage. Kimi K2, arXiv:2507.20534."""


class DroObjective(SquaredObjective, frozen=True, kw_only=True, tag="dro"):
    """A policy gradient with the square of each token's log-ratio. DRO, arXiv:2405.19107."""


class MaskedObjective(Kind, frozen=True, kw_only=True):
    """A trust region of probabilities in place of ratios."""

    mask_low: ProbabilityBound = 0.2
    """Largest fall of a token's probability (dppo_kl: largest divergence on the way down) that is still trained on."""
    mask_high: ProbabilityBound = 0.2
    """Largest rise of a token's probability (dppo_kl: largest divergence on the way up) that is still trained on."""


class DppoTvObjective(MaskedObjective, frozen=True, kw_only=True, tag="dppo_tv"):
    """Tokens are left out whose probability moved too far the way the advantage pushes. DPPO, arXiv:2602.04879."""


class DppoKlObjective(MaskedObjective, frozen=True, kw_only=True, tag="dppo_kl"):
    """DPPO by the divergence of two outcomes, whose bounds should be smaller, such as 0.05. DPPO, arXiv:2602.04879."""


class IpoObjective(MaskedObjective, frozen=True, kw_only=True, tag="ipo"):
    """Tokens are left out whose probability moved too far either way."""


class ReinforceObjective(Kind, frozen=True, kw_only=True, tag="reinforce"):
    """REINFORCE: no ratio and no bound. It has no keys."""


class UserObjective(UserKind, frozen=True, kw_only=True, tag="user"):
    """A function of yours: see [write an objective](../how-to/write-an-objective.md). Every other key is one of its keyword
    arguments."""


ObjectiveSection = (
    DapoObjective
    | GrpoObjective
    | BnpoObjective
    | DrGrpoObjective
    | LuspoObjective
    | GspoObjective
    | GspoTokenObjective
    | GmpoObjective
    | CispoObjective
    | SapoObjective
    | VespoObjective
    | ToprObjective
    | KimiK15Objective
    | KimiK2Objective
    | DppoTvObjective
    | DppoKlObjective
    | IpoObjective
    | DroObjective
    | ReinforceObjective
    | UserObjective
)
