"""What each policy objective stands for beside its formula: how it is averaged, and what it looks at. Imports no torch.

The formulas are in objectives.py, under the same names. ``ratio``: whether the objective weighs a token by pi over the proximal
policy, so that an importance weight to the behaviour policy on top of it needs another proximal policy.
``trains_zero_advantage``: whether tokens without advantage have a gradient.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from corrente.config import RunConfig

Aggregation = Literal["token", "sequence", "sequence_sum", "fixed"]


class Trait(msgspec.Struct, frozen=True, kw_only=True):
    """Of one value of ``algo.loss``."""

    aggregation: Aggregation
    effective: bool = False
    levels: tuple[str, ...] = ("token",)
    ratio: bool = True
    trains_zero_advantage: bool = False


BOTH = ("token", "sequence")

TRAITS: dict[str, Trait] = {
    "dapo": Trait(aggregation="token", levels=BOTH),
    "grpo": Trait(aggregation="sequence", levels=BOTH),
    "bnpo": Trait(aggregation="token", levels=BOTH, effective=True),
    "dr_grpo": Trait(aggregation="fixed", levels=BOTH),
    "luspo": Trait(aggregation="sequence_sum", levels=("sequence",)),
    "gspo": Trait(aggregation="sequence"),
    "gspo_token": Trait(aggregation="sequence"),
    "gmpo": Trait(aggregation="sequence"),
    "cispo": Trait(aggregation="token", levels=BOTH),
    "sapo": Trait(aggregation="sequence", levels=BOTH),
    "vespo": Trait(aggregation="token"),
    "topr": Trait(aggregation="sequence_sum"),
    "kimi_k15": Trait(aggregation="sequence_sum", trains_zero_advantage=True),
    "kimi_k2": Trait(aggregation="sequence_sum", trains_zero_advantage=True),
    "dppo_tv": Trait(aggregation="token"),
    "dppo_kl": Trait(aggregation="token"),
    "ipo": Trait(aggregation="token"),
    "dro": Trait(aggregation="token", trains_zero_advantage=True),
    "reinforce": Trait(aggregation="token", ratio=False),
}


def proximal_of(config: RunConfig) -> Literal["behaviour", "recompute", "interpolate"]:
    """What the objective's ratio is taken to, ``auto`` resolved."""
    if config.algo.proximal != "auto":
        return config.algo.proximal
    weighed = config.staleness.correct != "none" and TRAITS[config.algo.loss].ratio
    return "recompute" if weighed else "behaviour"
