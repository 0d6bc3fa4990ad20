"""TRL's objective and its importance weights as the sections algo and staleness say them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from corrente.errors import ConfigError
from corrente.trl.engines import uses_vllm

Writes = Iterable[tuple[str, Any]]

CLIPPED = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo")
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
"""What TRL's loss_type may be; corrente={"algo.loss": ...} has more."""
SCALES = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
AGGREGATIONS = {"sum_then_normalize": "grpo", "normalize_then_sum": "gdpo"}
MODES = {f"{level}_{way}": (level, way) for level in ("token", "sequence") for way in ("truncate", "mask")}
NO_CAP = 1e30
"""A ratio of float32 that is finite is rarely above; TRL's None."""


def objective(args: Any) -> Writes:
    """Loss, clip, KL and advantage."""
    if args.loss_type not in LOSSES:
        raise ConfigError(f"loss_type = {args.loss_type!r}: it must be one of {', '.join(LOSSES)}")
    clipped = args.loss_type in CLIPPED
    if clipped or args.says("epsilon"):
        yield "algo.epsilon", args.epsilon
    if clipped or args.loss_type == "cispo" or args.says("epsilon_high"):
        yield "algo.epsilon_high", args.epsilon if args.epsilon_high is None else args.epsilon_high
    yield "algo.delta", "none" if args.delta is None else args.delta
    if args.beta > 0:
        yield "algo.use_bias_correction_kl", bool(args.use_bias_correction_kl)
    yield "algo.scale_rewards", _one_of("scale_rewards", args.scale_rewards, SCALES)
    yield "algo.advantage", _one_of("multi_objective_aggregation", args.multi_objective_aggregation, AGGREGATIONS)
    if args.off_policy_mask_threshold is not None:
        yield "staleness.off_policy_mask_threshold", args.off_policy_mask_threshold


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
