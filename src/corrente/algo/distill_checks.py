"""Checks of the distill section: combinations of teachers, losses and sampling that cannot work. No torch."""

from __future__ import annotations

from corrente.algo.kinds import objective_kind
from corrente.config import Distill, Embedded, RunConfig, schema
from corrente.config import rewards as s
from corrente.config.schema import kind_of
from corrente.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raise ConfigError, naming the key, its value and what is allowed."""
    _self_teacher(config)
    if config.distill.loss == "none":
        _unused(config.distill)
        return
    _teachers(config)
    _rewards(config)
    _sampling(config)
    if config.distill.loss in ("k1", "k3") and not objective_kind(config.algo).ratio:
        kind = schema.kind_of(config.algo.objective)
        raise ConfigError(
            f'distill.loss = "{config.distill.loss}": it is weighed by the ratio of the policy objective, and '
            f'algo.objective.kind = "{kind}" has none; it must be "advantage", "k2" or "jsd" there'
        )
    if config.distill.loss != "jsd" and config.distill.beta != Distill().beta:
        raise ConfigError(
            f'distill.beta = {config.distill.beta:g}: distill.loss = "{config.distill.loss}" does not use it; it is for "jsd"'
        )


def _unused(distill: Distill) -> None:
    for key in ("weight", "reward_weight", "beta"):
        if getattr(distill, key) != getattr(Distill(), key):
            raise ConfigError(
                f'distill.{key} = {getattr(distill, key):g}: distill.loss = "none" learns nothing from teachers; set it to '
                f'"advantage", "k1", "k2", "k3" or "jsd"'
            )


def _teachers(config: RunConfig) -> None:
    teachers = [(at, scorer) for at, scorer in enumerate(config.reward.scorers) if isinstance(scorer, s.Teaching)]
    if not teachers:
        raise ConfigError(
            f'distill.loss = "{config.distill.loss}": there is no teacher; add a [[reward.scorers]] table of kind "teacher", '
            f'"teacher_server" or "self_teacher"'
        )
    for at, teacher in teachers:
        if config.distill.loss == "jsd" and not teacher.top:
            raise ConfigError(
                f'reward.scorers[{at}].top = 0: distill.loss = "jsd" is made of the teacher\'s likeliest tokens; it must be at '
                f"least 1 (say 16)"
            )
        if isinstance(teacher, s.ServedTeacherScorer) and config.sampling.temperature != 1:
            raise ConfigError(
                f"sampling.temperature = {config.sampling.temperature:g}: reward.scorers[{at}] is a server, whose log-probs are "
                f"untempered; it must be 1"
            )


def _rewards(config: RunConfig) -> None:
    distill, reward = config.distill, config.reward
    rewarding = reward.functions or not all(isinstance(scorer, s.Teaching) for scorer in reward.scorers)
    if distill.reward_weight and not rewarding:
        raise ConfigError(
            f"distill.reward_weight = {distill.reward_weight:g}: nothing gives a reward; it must be 0, or reward.functions given"
        )


def _sampling(config: RunConfig) -> None:
    sampling = config.sampling
    for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(sampling, key) != off:
            raise ConfigError(
                f'sampling.{key} = {getattr(sampling, key)}: distill.loss = "{config.distill.loss}" compares policy and teacher '
                f"over all tokens, of which sampling would leave some out; it must be {off}"
            )


def _self_teacher(config: RunConfig) -> None:
    """Check a self-teacher: one embedded engine that receives the versions of the run."""
    own = [at for at, scorer in enumerate(config.reward.scorers) if isinstance(scorer, s.SelfTeacherScorer)]
    if len(own) > 1:
        raise ConfigError(
            f'reward.scorers[{own[1]}].kind = "self_teacher": there is one already; a run has at most one'
        )
    if own and not isinstance(config.engine, Embedded):
        raise ConfigError(
            f'reward.scorers[{own[0]}].kind = "self_teacher": it takes the weights as the embedded engine does, and '
            f'engine.kind = "{kind_of(config.engine)}"; it must be "embedded"'
        )
