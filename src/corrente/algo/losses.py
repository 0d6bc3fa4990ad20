"""The loss of one micro-batch, put together from the ideas in the files beside it as the config says. Implements Objective.

    loss = sum_k a_k * (-w_k * J_k + beta * kl_k) - entropy_coef * mean_k H_k + what teachers add (distill.py)

a: aggregate.py. w: corrections.py; 0 where a token is left out. J: objectives.py, of a ratio by ratio.py. kl: kl.py.
H: entropy.py.
Shapes: K trained tokens, flat; R rows. Masked tokens are not among the K, so what is stored in them (NaN, inf) cannot matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corrente.algo import aggregate, corrections, distill, entropy, ratio
from corrente.algo.base import Constants, Loss, Trained
from corrente.algo.kl import ESTIMATORS
from corrente.algo.objectives import OBJECTIVES
from corrente.algo.policy import PolicyInputs, PolicyTerm
from corrente.algo.rows import TrainingRows
from corrente.algo.traits import TRAITS, Aggregation, proximal_of
from corrente.config import RunConfig
from corrente.data.step_totals import LOCAL_TOTALS, StepTotals
from corrente.data.types import Batch


class PolicyObjective:
    """The objective named by ``algo`` and ``staleness``."""

    def __init__(self, config: RunConfig) -> None:
        algo, trait = config.algo, TRAITS[config.algo.loss]
        self._algo = algo
        self._distill = config.distill
        self._staleness = config.staleness
        self._max_tokens = config.sampling.max_tokens
        self._policy = OBJECTIVES[algo.loss]
        self._kl = ESTIMATORS[algo.kl]
        self._aggregation: Aggregation = trait.aggregation if algo.aggregation == "auto" else algo.aggregation
        self._effective = trait.effective or algo.denominator == "effective"
        self._proximal = proximal_of(config)
        self.needs_reference = algo.beta > 0
        self.needs_survey = (
            (self._effective and corrections.rejects(config.staleness))
            or config.staleness.normalise
            or algo.top_entropy_quantile < 1
            or (algo.num_iterations > 1 and self._proximal == "recompute")
        )
        self.needs_teachers = distill.needs(config.distill)
        self.updates = algo.num_iterations

    def row_weights(self, batch: Batch, *, totals: StepTotals = LOCAL_TOTALS) -> NDArray[np.float64]:
        """Factor of the token losses of each row (R,)."""
        trained_R = np.array([np.count_nonzero(row.loss_mask) for row in batch.rows], np.int64)
        share_R = np.array([row.share for row in batch.rows], np.float64)
        sequences, tokens = batch.sequences, batch.tokens
        if self._effective:
            sequences, trained = totals.sum([float(share_R.sum()), float(trained_R.sum())])
            tokens = int(trained)
        match self._aggregation:
            case "token":
                return aggregate.token_mean(trained_R, tokens=tokens)
            case "sequence":
                return share_R * aggregate.sequence_mean(trained_R, sequences=sequences)
            case "sequence_sum":
                return aggregate.sequence_sum(trained_R, sequences=sequences)
            case _:
                return aggregate.fixed_length(trained_R, sequences=sequences, max_tokens=self._max_tokens)

    def survey(self, parts: Sequence[Trained], *, totals: StepTotals = LOCAL_TOTALS) -> list[Constants]:
        """What the whole step settles; see corrections.py and entropy.py."""
        rows = [TrainingRows(part.row_K, like=part.logprobs_K) for part in parts]
        taught = [distill.advantages(part, self._distill, before_K=part.logprobs_K) for part in parts]
        found = [self._correction(part, of) for part, of in zip(taught, rows, strict=True)]
        if self._staleness.normalise:
            found = corrections.normalised(found, totals=totals)
        scales = [torch.ones_like(part.weights_K) for part in parts]
        if self._effective:
            weights = [part.weights_K for part in parts]
            scales = corrections.effective(
                found, weights=weights, rows=rows, aggregation=self._aggregation, totals=totals
            )
        chosen = [torch.ones_like(part.logprobs_K, dtype=torch.bool) for part in parts]
        if self._algo.top_entropy_quantile < 1:
            entropies = [part.entropy_K for part in parts if part.entropy_K is not None]
            chosen = entropy.highest(entropies, share=self._algo.top_entropy_quantile, totals=totals)
        (count,) = totals.sum([sum(int(flags.sum()) for flags in chosen)])
        return [
            Constants(
                proximal_K=part.logprobs_K.detach(),
                weight_K=correction.weight_K,
                kept_K=correction.kept_K,
                over_K=correction.over_K,
                whole_K=correction.whole_K,
                chosen_K=flags,
                scale_K=scale,
                bonus_K=flags.to(part.logprobs_K) / count,
            )
            for part, correction, flags, scale in zip(parts, found, chosen, scales, strict=True)
        ]

    def __call__(self, part: Trained, *, constants: Constants | None = None, trained: int | None = None) -> Loss:
        """Loss of these tokens; see Objective for what it is differentiable in."""
        logprobs_K = part.logprobs_K
        reference_K = None if part.reference_K is None else part.reference_K.detach()
        part = replace(part, behaviour_K=part.behaviour_K.detach(), reference_K=reference_K)
        before_K = logprobs_K if constants is None else constants.proximal_K
        part = distill.advantages(part, self._distill, before_K=before_K)
        rows = TrainingRows(part.row_K, like=logprobs_K)
        fixed = constants or self._alone(part, rows, trained or len(logprobs_K))
        proximal_K = self._proximal_of(part, constants)
        seen = PolicyInputs(
            logprobs_K=logprobs_K, proximal_K=proximal_K, advantages_K=self._advantages(part, fixed, rows), rows=rows
        )
        value = self._policy(seen, self._algo)
        gain_K = torch.where(fixed.kept_K & fixed.chosen_K, fixed.weight_K * value.value_K, 0.0)
        total = -(part.weights_K * fixed.scale_K * gain_K).sum()
        total = total + self._taught(part, seen, fixed) + self._penalty(part, seen) - self._bonus(part, fixed)
        return _loss(total, value, fixed)

    def _alone(self, part: Trained, rows: TrainingRows, trained: int) -> Constants:
        """Where nothing depends on the rest of the step."""
        correction = self._correction(part, rows)
        ones_K = torch.ones_like(part.logprobs_K)
        return Constants(
            proximal_K=part.logprobs_K.detach(),
            weight_K=correction.weight_K,
            kept_K=correction.kept_K,
            over_K=correction.over_K,
            whole_K=correction.whole_K,
            chosen_K=torch.ones_like(correction.kept_K),
            scale_K=ones_K,
            bonus_K=ones_K / trained,
        )

    def _proximal_of(self, part: Trained, constants: Constants | None) -> Tensor:
        if self._proximal == "behaviour":
            return part.behaviour_K
        if self._proximal == "interpolate":
            lags_K = torch.zeros_like(part.logprobs_K) if part.lags_K is None else part.lags_K
            return ratio.interpolate(part.logprobs_K, part.behaviour_K, lags_K)
        return part.logprobs_K.detach() if constants is None else constants.proximal_K

    def _correction(self, part: Trained, rows: TrainingRows) -> corrections.Correction:
        now_K = part.logprobs_K.detach()
        start_K = now_K if self._proximal == "behaviour" else self._proximal_of(part, None)
        return corrections.correct(
            log_ratio_K=ratio.log_ratio(now_K, part.behaviour_K),
            log_rho_K=ratio.log_ratio(start_K, part.behaviour_K),
            advantages_K=part.advantages_K,
            lags_K=part.lags_K,
            rows=rows,
            settings=self._staleness,
        )

    def _advantages(self, part: Trained, fixed: Constants, rows: TrainingRows) -> Tensor:
        if part.reference_K is None or self._algo.kl_in == "loss":
            return part.advantages_K
        penalty_K = self._kl(fixed.proximal_K, part.reference_K)
        return part.advantages_K - self._algo.beta * rows.to_go(penalty_K)

    def _taught(self, part: Trained, seen: PolicyInputs, fixed: Constants) -> Tensor | float:
        taught_K = distill.losses(part, self._distill, log_ratio_K=seen.log_ratio_K)
        if taught_K is None:
            return 0.0
        taught_K = torch.where(fixed.kept_K, fixed.weight_K * taught_K, 0.0)
        return (part.weights_K * fixed.scale_K * taught_K).sum()

    def _penalty(self, part: Trained, seen: PolicyInputs) -> Tensor | float:
        if part.reference_K is None or self._algo.kl_in == "reward":
            return 0.0
        kl_K = self._kl(part.logprobs_K, part.reference_K)
        if self._algo.use_bias_correction_kl:
            kl_K = kl_K * torch.exp(seen.log_ratio_at(self._algo.importance_sampling_level))
        return self._algo.beta * (part.weights_K * kl_K).sum()

    def _bonus(self, part: Trained, fixed: Constants) -> Tensor | float:
        if part.entropy_K is None or self._algo.entropy_coef == 0:
            return 0.0
        return self._algo.entropy_coef * (fixed.bonus_K * part.entropy_K).sum()


def _loss(total: Tensor, value: PolicyTerm, fixed: Constants) -> Loss:
    rejected_K, high_K = ~fixed.kept_K, value.high_K | fixed.over_K
    cut_K = value.cut_K | high_K | rejected_K | ~fixed.chosen_K
    return Loss(
        total=total, low_K=value.low_K, high_K=high_K, cut_K=cut_K, rejected_K=rejected_K, whole_K=fixed.whole_K
    )
