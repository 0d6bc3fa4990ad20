"""TRL's objective and its importance weights, as keys of the sections algo and staleness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from corrente.config import schema
from corrente.errors import ConfigError
from corrente.trl.config import ARGUMENTS
from corrente.trl.engines import uses_vllm

Writes = Iterable[tuple[str, Any]]

LOSSES = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
"""TRL's values of loss_type; corrente={"algo.objective.kind": ...} has more."""
KEYS = {
    "epsilon": "epsilon",
    "epsilon_high": "epsilon_high",
    "delta": "delta",
    "importance_sampling_level": "importance_sampling_level",
    "sapo_temperature_neg": "temperature_neg",
    "sapo_temperature_pos": "temperature_pos",
    "vespo_k_pos": "k_pos",
    "vespo_lambda_pos": "lambda_pos",
    "vespo_k_neg": "k_neg",
    "vespo_lambda_neg": "lambda_neg",
}
"""TRL's arguments of an objective -> the keys of [algo.objective]."""
SCALES = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
AGGREGATIONS = {"sum_then_normalize": "grpo", "normalize_then_sum": "gdpo"}
MODES = {f"{level}_{way}": (level, way) for level in ("token", "sequence") for way in ("truncate", "mask")}
NO_CAP = 1e30
"""A ratio of float32 that is finite is rarely above; TRL's None."""


def objective(args: Any) -> Writes:
    """Loss, clip, KL and advantage."""
    if args.loss_type not in LOSSES:
        raise ConfigError(f"loss_type = {args.loss_type!r}: it must be one of {', '.join(LOSSES)}")
    yield "algo.objective.kind", args.loss_type
    has = schema.fields(schema.kinds("algo.objective")[args.loss_type])
    for name, key in KEYS.items():
        value = getattr(args, name)
        if name == "epsilon_high" and value is None:
            value = args.epsilon
        if args.loss_type == "luspo" and name == "importance_sampling_level":
            _check_luspo(value)
        elif (
            key in has or getattr(args, name) != ARGUMENTS[name].default
        ):  # the loader refuses what the kind does not have
            yield f"algo.objective.{key}", "none" if value is None else value
    if args.beta > 0:
        yield "algo.use_bias_correction_kl", bool(args.use_bias_correction_kl)
    if args.sync_ref_model:
        yield "algo.ref_model_sync_steps", args.ref_model_sync_steps
        yield "algo.ref_model_mixup_alpha", args.ref_model_mixup_alpha
    advantage = _one_of("multi_objective_aggregation", args.multi_objective_aggregation, AGGREGATIONS)
    scale = _one_of("scale_rewards", args.scale_rewards, SCALES)
    yield "algo.advantage.kind", advantage
    if advantage == "grpo" or scale != "group":
        yield "algo.advantage.scale_rewards", scale
    if args.off_policy_mask_threshold is not None:
        yield "staleness.off_policy_mask_threshold", args.off_policy_mask_threshold


def _check_luspo(level: Any) -> None:
    if level != "sequence":
        raise ConfigError(f"importance_sampling_level = {level!r}: loss_type = 'luspo' needs 'sequence'")


def corrections(args: Any) -> Writes:
    """The weight of what vLLM sampled; without vLLM, and in TRL's asynchronous trainer, there is none."""
    if not args.vllm_importance_sampling_correction or not uses_vllm(args):
        return
    level, way = _one_of("vllm_importance_sampling_mode", args.vllm_importance_sampling_mode, MODES)
    older, low = args.vllm_importance_sampling_cap, args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max if older is None else older
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"vllm_importance_sampling_clip_min = {low}: it must be below vllm_importance_sampling_clip_max = {high}"
        )
    if way == "truncate" and low is None and high is None:
        raise ConfigError(
            "vllm_importance_sampling_clip_max = None: to truncate, give it or vllm_importance_sampling_clip_min"
        )
    yield "staleness.correct", "tis" if way == "truncate" else "mis" if low is None else "icepop"
    yield "staleness.correct_level", level
    yield "staleness.correct_cap", NO_CAP if high is None else high
    if low is not None:
        yield "staleness.correct_floor", low


def _one_of(name: str, value: Any, table: dict[Any, Any]) -> Any:
    if value not in table:
        raise ConfigError(f"{name} = {value!r}: it must be one of {', '.join(map(repr, table))}")
    return table[value]
