"""The objectives and advantage estimators there are: section of the config -> function, and what else follows from the choice.

This is the only list. The name of a choice is the tag of its section (config/objectives.py, config/advantages.py), its keys
are the fields of the section, and bind.py gives them to the function as keyword arguments. Imports no torch: functions are
dotted paths. A function of the user's stands in the same tables, with what is assumed of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from corrente import config as c
from corrente.config import Algo, RunConfig
from corrente.config.objectives import RatioLevel, SequenceClippedObjective
from corrente.config.section import Section

Aggregation = Literal["token", "sequence", "sequence_sum", "fixed"]


class ObjectiveKind(msgspec.Struct, frozen=True, kw_only=True):
    """The function of an objective and its traits.

    ``aggregation``: how token losses are averaged where ``algo.aggregation`` is auto. ``effective``: over what is left after
    masks and corrections, always. ``ratio``: it weighs a token by a ratio to the proximal policy, so an importance weight to
    the behaviour policy needs another proximal policy. ``trains_zero_advantage``: tokens without advantage have a gradient.
    """

    function: str
    aggregation: Aggregation
    effective: bool = False
    ratio: bool = True
    trains_zero_advantage: bool = False


class AdvantageKind(msgspec.Struct, frozen=True, kw_only=True):
    """The function of an advantage estimator and its traits.

    ``baseline``: what an episode is compared with. Of "step", a group of one, or of equal rewards, teaches as any other.
    ``reads``: the reward of an episode, or each score that it is made of.
    """

    function: str
    baseline: Literal["group", "step"] = "group"
    reads: Literal["rewards", "scores"] = "rewards"


OBJECTIVES: Mapping[type[Section], ObjectiveKind] = {
    c.DapoObjective: ObjectiveKind(function="corrente.algo.clip:clip", aggregation="token"),
    c.GrpoObjective: ObjectiveKind(function="corrente.algo.clip:clip", aggregation="sequence"),
    c.BnpoObjective: ObjectiveKind(function="corrente.algo.clip:clip", aggregation="token", effective=True),
    c.DrGrpoObjective: ObjectiveKind(function="corrente.algo.clip:clip", aggregation="fixed"),
    c.LuspoObjective: ObjectiveKind(function="corrente.algo.gspo:gspo", aggregation="sequence_sum"),
    c.GspoObjective: ObjectiveKind(function="corrente.algo.gspo:gspo", aggregation="sequence"),
    c.GspoTokenObjective: ObjectiveKind(function="corrente.algo.gspo:gspo_token", aggregation="sequence"),
    c.GmpoObjective: ObjectiveKind(function="corrente.algo.gmpo:gmpo", aggregation="sequence"),
    c.CispoObjective: ObjectiveKind(function="corrente.algo.cispo:cispo", aggregation="token"),
    c.SapoObjective: ObjectiveKind(function="corrente.algo.sapo:sapo", aggregation="sequence"),
    c.VespoObjective: ObjectiveKind(function="corrente.algo.vespo:vespo", aggregation="token"),
    c.ToprObjective: ObjectiveKind(function="corrente.algo.topr:topr", aggregation="sequence_sum"),
    c.KimiK15Objective: ObjectiveKind(
        function="corrente.algo.kimi:kimi_k15",
        aggregation="sequence_sum",
        trains_zero_advantage=True,
    ),
    c.KimiK2Objective: ObjectiveKind(
        function="corrente.algo.kimi:kimi_k2",
        aggregation="sequence_sum",
        trains_zero_advantage=True,
    ),
    c.DppoTvObjective: ObjectiveKind(function="corrente.algo.dppo:dppo_tv", aggregation="token"),
    c.DppoKlObjective: ObjectiveKind(function="corrente.algo.dppo:dppo_kl", aggregation="token"),
    c.IpoObjective: ObjectiveKind(function="corrente.algo.dppo:ipo", aggregation="token"),
    c.DroObjective: ObjectiveKind(function="corrente.algo.dro:dro", aggregation="token", trains_zero_advantage=True),
    c.ReinforceObjective: ObjectiveKind(function="corrente.algo.reinforce:reinforce", aggregation="token", ratio=False),
    # whatever it reads is right with these: its ratio is decoupled from a weight, and no token is taken to teach nothing
    c.UserObjective: ObjectiveKind(function="", aggregation="token", trains_zero_advantage=True),
}

ADVANTAGES: Mapping[type[Section], AdvantageKind] = {
    c.GrpoAdvantage: AdvantageKind(function="corrente.algo.grpo:grpo"),
    c.RlooAdvantage: AdvantageKind(function="corrente.algo.rloo:rloo"),
    c.ReinforcePpAdvantage: AdvantageKind(function="corrente.algo.reinforce_pp:reinforce_pp", baseline="step"),
    c.ReinforcePpBaselineAdvantage: AdvantageKind(function="corrente.algo.reinforce_pp:reinforce_pp_baseline"),
    c.MaxrlAdvantage: AdvantageKind(function="corrente.algo.maxrl:maxrl"),
    c.OpoAdvantage: AdvantageKind(function="corrente.algo.opo:opo"),
    c.GdpoAdvantage: AdvantageKind(function="corrente.algo.gdpo:gdpo", reads="scores"),
    c.UserAdvantage: AdvantageKind(function="", reads="scores"),
}


def objective_kind(algo: Algo) -> ObjectiveKind:
    """The traits of the objective a config chooses."""
    return OBJECTIVES[type(algo.objective)]


def advantage_kind(algo: Algo) -> AdvantageKind:
    """The traits of the advantage estimator a config chooses."""
    return ADVANTAGES[type(algo.advantage)]


def aggregation_of(algo: Algo) -> Aggregation:
    """The average of token losses, ``auto`` resolved."""
    return objective_kind(algo).aggregation if algo.aggregation == "auto" else algo.aggregation


def is_effective(algo: Algo) -> bool:
    """True where averages are over what is left after masks and corrections."""
    return objective_kind(algo).effective or algo.denominator == "effective"


def ratio_level(algo: Algo) -> RatioLevel:
    """The level of the objective's ratio: of each token, or the geometric mean over its sequence."""
    always = "sequence" if isinstance(algo.objective, SequenceClippedObjective) else "token"
    return getattr(algo.objective, "importance_sampling_level", always)


def proximal_of(config: RunConfig) -> Literal["behaviour", "recompute", "interpolate"]:
    """The policy that the objective's ratio is taken to, ``auto`` resolved."""
    if config.algo.proximal != "auto":
        return config.algo.proximal
    weighed = config.staleness.correct != "none" and objective_kind(config.algo).ratio
    return "recompute" if weighed else "behaviour"
