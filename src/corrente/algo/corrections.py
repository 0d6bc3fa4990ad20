"""What the loss makes of samples of another policy: a weight per token, and which tokens are left out.

Rules compose, in this order; each is off unless ``staleness`` asks for it:

    1. veto                       sequences out        reject.py, on pi / mu
    2. band                       sequences out        reject.py, on pi / mu
    3. off-policy sequence mask   sequences out        reject.py, on pi / mu
    4. correct                    weights, tokens out  importance.py, on p / mu; by level, cap and sign
    5. decay                      weight * decay^lag   age alone, whatever the ratio
    6. normalise                  weights / their mean over the kept tokens of the whole step
    7. denominator effective      the average is over what is kept of the whole step

1 to 5 need the token's own row, 6 and 7 the whole step: they are settled before the first backward pass, with the batch forwarded
once more without gradient, so that the gradient does not depend on how the step is cut into micro-batches. Weights and masks
act on the policy objective, not on the KL nor on the entropy bonus. They are constants in the gradient.
Shapes: K trained tokens, flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from corrente.algo import importance, reject
from corrente.algo.rows import TrainingRows
from corrente.algo.traits import Aggregation
from corrente.config import Staleness
from corrente.data.step_totals import LOCAL_TOTALS, StepTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """``weight_K`` is 0 where ``kept_K`` is not set. ``over_K``: tokens whose importance was above their cap. ``whole_K``:
    tokens left out because their sequence was, by rules 1 to 3."""

    weight_K: Tensor
    kept_K: Tensor
    over_K: Tensor
    whole_K: Tensor


def rejects(settings: Staleness) -> bool:
    """Whether tokens may be left out."""
    return (
        settings.veto is not None
        or settings.band != "none"
        or settings.off_policy_mask_threshold is not None
        or settings.correct in ("mis", "icepop")
    )


def correct(
    *,
    log_ratio_K: Tensor,
    log_rho_K: Tensor,
    advantages_K: Tensor,
    lags_K: Tensor | None,
    rows: TrainingRows,
    settings: Staleness,
) -> Correction:
    """Rules 1 to 5. ``log_ratio_K`` is log pi / mu, ``log_rho_K`` log p / mu, both without gradient."""
    kept_K = _whole_rows(log_ratio_K, advantages_K, rows, settings)
    whole_K = ~kept_K
    weight_K, over_K = torch.ones_like(log_rho_K), ~reject.everything(log_rho_K)
    if settings.correct != "none":
        rho_K = importance.LEVELS[settings.correct_level](log_rho_K, rows).exp()
        cap_K = importance.caps(advantages_K, cap=settings.correct_cap, negative=settings.correct_cap_negative)
        weight_K, inside_K = importance.WEIGHTS[settings.correct](rho_K, floor=settings.correct_floor, cap_K=cap_K)
        kept_K, over_K = kept_K & inside_K, rho_K > cap_K
    if settings.decay < 1 and lags_K is not None:
        weight_K = weight_K * settings.decay ** lags_K.to(weight_K.dtype)
    return Correction(weight_K=torch.where(kept_K, weight_K, 0.0), kept_K=kept_K, over_K=over_K, whole_K=whole_K)


def _whole_rows(log_ratio_K: Tensor, advantages_K: Tensor, rows: TrainingRows, settings: Staleness) -> Tensor:
    kept_K = reject.everything(log_ratio_K)
    if settings.veto is not None:
        kept_K = kept_K & reject.veto(log_ratio_K, rows, least=settings.veto)
    if settings.band != "none":
        kept_K = kept_K & reject.band(
            log_ratio_K, rows, statistic=settings.band, low=settings.band_low, high=settings.band_high
        )
    if settings.off_policy_mask_threshold is not None:
        threshold = settings.off_policy_mask_threshold
        kept_K = kept_K & reject.off_policy(log_ratio_K, advantages_K, rows, threshold=threshold)
    return kept_K


def normalised(parts: Sequence[Correction], *, totals: StepTotals = LOCAL_TOTALS) -> list[Correction]:
    """Rule 6: weights whose mean over the kept tokens of all parts is 1. Unchanged where that mean is 0."""
    total, kept = totals.sum(
        [sum(float(part.weight_K.double().sum()) for part in parts), sum(int(part.kept_K.sum()) for part in parts)]
    )
    mean = total / kept if kept and total > 0 else 1.0
    return [replace(part, weight_K=part.weight_K / mean) for part in parts]


def effective(
    parts: Sequence[Correction],
    *,
    weights: Sequence[Tensor],
    rows: Sequence[TrainingRows],
    aggregation: Aggregation,
    totals: StepTotals = LOCAL_TOTALS,
) -> list[Tensor]:
    """Rule 7: per part the factor (K,) that makes the aggregation's weights those of an average over what is kept alone.

    ``weights`` (K,) are those of an average over all that is trained. Counted is what the aggregation counts: kept tokens, or
    rows that keep any; where it is of row means, a row is first averaged over what is kept of it. Nothing left out: 1 everywhere.
    No kept token at all: 0.
    """
    kept = [part.kept_K.to(w) for part, w in zip(parts, weights, strict=True)]
    if aggregation == "token":
        factors, counted, units = kept, kept, weights
    else:
        counted = [flags * of.length_K / of.sum(flags).clamp(min=1) for flags, of in zip(kept, rows, strict=True)]
        of_sums = aggregation == "sequence_sum"
        factors = kept if of_sums else counted
        units = [w / of.length_K for w, of in zip(weights, rows, strict=True)] if of_sums else weights
    left = sum(float((unit * count).double().sum()) for unit, count in zip(units, counted, strict=True))
    whole = sum(float(unit.double().sum()) for unit in units)
    left, whole = totals.sum([left, whole])
    return [factor * (whole / left) if left > 0 else factor for factor in factors]
