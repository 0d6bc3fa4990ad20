"""Combinations of algorithm, sampling and filter that cannot work; refused before a model is loaded. Imports no torch.

A key that a kind does not have is refused by the loader already; a kind's own numbers are judged here where they depend on
others.
"""

from __future__ import annotations

from corrente.algo import bind
from corrente.algo.kinds import aggregation_of, is_effective, objective_kind, proximal_of, ratio_level
from corrente.config import (
    Algo,
    CispoObjective,
    ClippedObjective,
    Full,
    GdpoAdvantage,
    MaxrlAdvantage,
    RunConfig,
    Staleness,
    schema,
)
from corrente.errors import ConfigError

SEQUENCE_EPSILON_MAX = 0.1
"""A geometric mean over a row stays within a few thousandths of 1; above this a bound on it would never act."""


def check(config: RunConfig) -> None:
    """Raise ConfigError, naming the key, its value and what is allowed. Functions of the user's are imported."""
    bind.check(config.algo, config.filter)
    _check_sampling(config)
    _check_clip(config.algo)
    _check_average(config.algo)
    _check_advantage(config)
    _check_proximal(config)
    _check_kl(config.algo)
    _check_reference(config)
    _check_corrections(config.staleness)
    _check_unused(config)


def cautions(config: RunConfig) -> list[str]:
    """Warnings for the start of a run, about settings of the objective that work, and rarely as they are meant."""
    clip, found = config.algo.objective, list[str]()
    if isinstance(clip, ClippedObjective) and ratio_level(config.algo) == "sequence":
        high = clip.epsilon if clip.epsilon_high is None else clip.epsilon_high
        found += [
            f"algo.objective.{key} = {value:g}: it bounds the mean ratio of a sequence, which stays near 1, so it never acts; "
            "GSPO has epsilon 3e-4 and epsilon_high 4e-4"
            for key, value in (("epsilon", clip.epsilon), ("epsilon_high", high))
            if value > SEQUENCE_EPSILON_MAX
        ]
    if isinstance(clip, CispoObjective) and clip.epsilon_high < 1:
        found.append(
            f"algo.objective.epsilon_high = {clip.epsilon_high:g}: the largest weight of a token lies below that of an unchanged "
            "policy, 1, so nearly all tokens have that weight; ScaleRL has 5"
        )
    return found


def _check_sampling(config: RunConfig) -> None:
    """The learner evaluates tokens at the sampling temperature, over what was kept for their draw where this is recorded.

    Where it is not, log-probs of a truncated distribution are larger than the learner's by the log of the mass that was cut off:
    the ratio of an unchanged policy would not be 1, and the clip would act on that difference instead of on a change of policy.
    A proximal policy that is recomputed takes the difference out of the clip, and an importance weight puts it where it belongs.
    """
    sampling = config.sampling
    weighed = config.staleness.correct != "none" and proximal_of(config) == "recompute"
    if sampling.truncates and not sampling.keep_support and not weighed:
        raise ConfigError(
            "sampling.keep_support = false: with top_k, top_p or min_p the ratio of an unchanged policy would be the part of it "
            'that was kept, not 1; it must be true, or staleness.correct given and algo.proximal "recompute"'
        )
    if sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature = 0: greedy episodes of a prompt are all alike and teach nothing; give it a value above 0"
        )


def _check_clip(algo: Algo) -> None:
    clip = algo.objective
    if not isinstance(clip, ClippedObjective):
        return
    high = clip.epsilon if clip.epsilon_high is None else clip.epsilon_high
    if clip.delta is not None and clip.delta <= 1 + high:
        raise ConfigError(
            f"algo.objective.delta = {clip.delta}: the dual clip must lie above 1 + algo.objective.epsilon_high = {1 + high:g}, "
            'or be "none"'
        )


def _check_average(algo: Algo) -> None:
    if aggregation_of(algo) == "fixed" and is_effective(algo):
        raise ConfigError(
            f'algo.denominator = "effective": algo.objective.kind = "{schema.kind_of(algo.objective)}" with algo.aggregation = '
            f'"{algo.aggregation}" divides by a fixed length; it must be "fixed"'
        )


def _check_advantage(config: RunConfig) -> None:
    algo, longest = config.algo, config.sampling.max_tokens
    if algo.overlong_tokens >= longest:
        raise ConfigError(
            f"algo.overlong_tokens = {algo.overlong_tokens}: it must be below sampling.max_tokens = {longest}"
        )
    if not (algo.overlong_tokens or algo.length_penalty):
        return
    key = "overlong_tokens" if algo.overlong_tokens else "length_penalty"
    if isinstance(algo.advantage, GdpoAdvantage):
        raise ConfigError(
            f'algo.{key} = {getattr(algo, key):g}: algo.advantage.kind = "gdpo" is made of the reward functions\' own scores, '
            f"not of a sum that could be shaped; it must be 0"
        )
    if isinstance(algo.advantage, MaxrlAdvantage):
        raise ConfigError(
            f'algo.{key} = {getattr(algo, key):g}: algo.advantage.kind = "maxrl" divides by the mean reward, which must not be '
            f"negative; it must be 0"
        )


def _check_proximal(config: RunConfig) -> None:
    algo, correct = config.algo, config.staleness.correct
    ratio, kind = objective_kind(algo).ratio, schema.kind_of(algo.objective)
    if correct != "none" and ratio and proximal_of(config) == "behaviour":
        raise ConfigError(
            f'staleness.correct = "{correct}": with algo.proximal = "behaviour" the ratio of algo.objective.kind = "{kind}" '
            f'is to the behaviour policy already; set algo.proximal to "recompute" or "interpolate"'
        )
    if not ratio and algo.proximal in ("recompute", "interpolate"):
        raise ConfigError(
            f'algo.proximal = "{algo.proximal}": algo.objective.kind = "{kind}" has no ratio; it must be "auto" or "behaviour"'
        )


def _check_kl(algo: Algo) -> None:
    if algo.kl == "k1" and algo.kl_in == "loss" and not algo.use_bias_correction_kl:
        raise ConfigError(
            'algo.kl = "k1": in the loss its gradient is 0 on average; set algo.kl_in = "reward", '
            'algo.use_bias_correction_kl = true, or algo.kl = "k2" or "k3"'
        )
    if algo.use_bias_correction_kl and algo.kl_in == "reward":
        raise ConfigError('algo.use_bias_correction_kl = true: it is for the loss; algo.kl_in must be "loss"')
    if algo.beta == 0 and (algo.kl_in == "reward" or algo.use_bias_correction_kl):
        key = 'kl_in = "reward"' if algo.kl_in == "reward" else "use_bias_correction_kl = true"
        raise ConfigError(f"algo.{key}: there is no KL; set algo.beta above 0")
    if algo.ref_model_sync_steps and algo.beta == 0:
        raise ConfigError(
            f"algo.ref_model_sync_steps = {algo.ref_model_sync_steps}: there is no reference; set algo.beta above 0"
        )


def _check_reference(config: RunConfig) -> None:
    if config.algo.ref_model_sync_steps and not isinstance(config.adapters, Full):
        raise ConfigError(
            f"algo.ref_model_sync_steps = {config.algo.ref_model_sync_steps}: the reference of adapters is the model without "
            'them, which cannot move; it must be 0, or adapters.kind "full"'
        )


def _check_corrections(staleness: Staleness) -> None:
    s = staleness
    if s.band in ("geometric", "product") and not s.band_low < 1 < s.band_high:
        raise ConfigError(
            f"staleness.band_low = {s.band_low:g}, band_high = {s.band_high:g}: they must lie around 1, the ratio of an "
            f"unchanged policy"
        )
    if s.band in ("k2", "k3") and s.band_low > 0:
        raise ConfigError(
            f'staleness.band_low = {s.band_low:g}: with staleness.band = "{s.band}" it must be 0, the divergence of an '
            f"unchanged policy"
        )
    caps = [("correct_cap", s.correct_cap), ("correct_cap_negative", s.correct_cap_negative)]
    for key, cap in caps:
        if s.correct in ("mis", "icepop") and cap is not None and cap <= 1:
            raise ConfigError(
                f'staleness.{key} = {cap:g}: staleness.correct = "{s.correct}" would leave out an unchanged policy\'s '
                f"tokens; it must be above 1"
            )
        if cap is not None and s.correct_floor > min(cap, 1):
            raise ConfigError(
                f"staleness.correct_floor = {s.correct_floor:g}: it must be at most 1 and at most staleness.{key} = {cap:g}"
            )
    if s.correct == "icepop" and s.correct_floor == 0:
        raise ConfigError('staleness.correct_floor = 0: staleness.correct = "icepop" needs a floor above 0 (say 0.5)')


def _check_unused(config: RunConfig) -> None:
    """Keys that were changed and would do nothing."""
    algo, staleness = config.algo, config.staleness
    if algo.overlong_penalty != Algo().overlong_penalty and not algo.overlong_tokens:
        raise ConfigError(
            f"algo.overlong_penalty = {algo.overlong_penalty:g}: set algo.overlong_tokens above 0 as well"
        )
    for key in ("band_low", "band_high"):
        if getattr(staleness, key) != getattr(Staleness(), key) and staleness.band == "none":
            raise ConfigError(
                f'staleness.{key} = {getattr(staleness, key):g}: staleness.band = "none" leaves nothing out; set it to '
                f'"geometric", "product", "k2" or "k3"'
            )
    of_correct = ("correct_level", "correct_cap", "correct_cap_negative", "correct_floor")
    for key in of_correct:
        if getattr(staleness, key) != getattr(Staleness(), key) and staleness.correct == "none":
            raise ConfigError(
                f'staleness.{key} = {getattr(staleness, key)}: staleness.correct = "none" weighs nothing; set it to '
                f'"tis", "mis" or "icepop"'
            )
    if staleness.correct == "mis" and staleness.correct_floor:
        raise ConfigError(
            f'staleness.correct_floor = {staleness.correct_floor:g}: "mis" has no floor; set staleness.correct = "icepop"'
        )
    if staleness.normalise and staleness.correct == "none" and staleness.decay == 1:
        raise ConfigError(
            "staleness.normalise = true: all weights are 1; set staleness.correct, or staleness.decay below 1, or leave it false"
        )
