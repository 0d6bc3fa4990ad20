"""Combinations of algorithm, sampling and filter that cannot work; refused before a model is loaded. No torch."""

from __future__ import annotations

from corrente.config import RunConfig
from corrente.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raise ConfigError, naming the key, its value and what is allowed."""
    _check_sampling(config)
    _check_clip(config)


def _check_sampling(config: RunConfig) -> None:
    """The learner evaluates tokens over the whole vocabulary at the sampling temperature.

    Log-probs of a truncated distribution are larger by the log of the mass that was cut off, so the ratio of an unchanged
    policy would not be 1 and the clip would act on that difference instead of on a change of policy.
    """
    sampling = config.sampling
    for key, value, off in (
        ("top_k", sampling.top_k, 0),
        ("top_p", sampling.top_p, 1.0),
        ("min_p", sampling.min_p, 0.0),
    ):
        if value != off:
            raise ConfigError(
                f"sampling.{key} = {value}: training needs {key} = {off}, because the kept token set is not recorded and "
                f"the learner could not renormalise over it (the ratio of an unchanged policy would not be 1)"
            )
    if sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature = 0: greedy episodes of a prompt are all alike and teach nothing; give it a value above 0"
        )


def _check_clip(config: RunConfig) -> None:
    algo = config.algo
    high = algo.epsilon if algo.epsilon_high is None else algo.epsilon_high
    if algo.delta is not None and algo.delta <= 1 + high:
        raise ConfigError(
            f'algo.delta = {algo.delta}: the dual clip must lie above 1 + algo.epsilon_high = {1 + high:g}, or be "none"'
        )
