"""The advantage estimators a config can choose from: the kinds of ``[algo.advantage]``, each with its own keys.

The formulas are in algo/, one file per estimator, and algo/kinds.py says which function a section stands for. What changes a
reward before any estimator sees it (length shaping), and who is credited with it, are keys of ``[algo]``.
"""

from __future__ import annotations

from typing import Literal

from corrente.config.section import Kind, UserKind


class GrpoAdvantage(Kind, frozen=True, kw_only=True, tag="grpo"):
    """The reward less the mean of its group, scaled. GRPO, arXiv:2402.03300."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide by the standard deviation of the group's rewards, of the step's, or not at all (Dr. GRPO). With none, the
    scores that algo.credit spreads are not divided either."""


class RlooAdvantage(Kind, frozen=True, kw_only=True, tag="rloo"):
    """The reward less the mean of the others of its group. RLOO, arXiv:2402.14740. It has no keys."""


class ReinforcePpAdvantage(Kind, frozen=True, kw_only=True, tag="reinforce_pp"):
    """The reward less the mean of the step, scaled by the step. REINFORCE++, arXiv:2501.03262. It has no keys."""


class ReinforcePpBaselineAdvantage(Kind, frozen=True, kw_only=True, tag="reinforce_pp_baseline"):
    """The reward less the mean of its group, scaled by the step. REINFORCE++, arXiv:2501.03262. It has no keys."""


class MaxrlAdvantage(Kind, frozen=True, kw_only=True, tag="maxrl"):
    """The reward less the mean of its group, over that mean; for rewards that are not negative. MaxRL, arXiv:2602.02710. It
    has no keys."""


class OpoAdvantage(Kind, frozen=True, kw_only=True, tag="opo"):
    """The reward less the mean of its group weighted by length. OPO, arXiv:2505.23585. It has no keys."""


class GdpoAdvantage(Kind, frozen=True, kw_only=True, tag="gdpo"):
    """The sum of the scores, each scaled in its group, scaled over the step. GDPO, arXiv:2601.05242. It has no keys."""


class UserAdvantage(UserKind, frozen=True, kw_only=True, tag="user"):
    """A function of yours: see [write an objective](../how-to/write-an-objective.md#an-advantage-estimator). Every other key
    is one of its keyword arguments."""


AdvantageSection = (
    GrpoAdvantage
    | RlooAdvantage
    | ReinforcePpAdvantage
    | ReinforcePpBaselineAdvantage
    | MaxrlAdvantage
    | OpoAdvantage
    | GdpoAdvantage
    | UserAdvantage
)
