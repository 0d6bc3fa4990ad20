"""The loss of one micro-batch, put together from the ideas in the files beside it as the config says. Implements Objective.

    loss = sum_k a_k * (-w_k * J_k + beta * kl_k) - entropy_coef * mean_k H_k + what teachers add (distill.py)

a: aggregate.py. w: corrections.py; 0 where a token is left out. J: the function of kinds.py, of a ratio by ratio.py. kl: kl.py.
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

from corrente.algo import aggregate, bind, corrections, distill, entropy, ratio
from corrente.algo.base import Constants, Loss, Trained
from corrente.algo.kinds import Aggregation, aggregation_of, is_effective, proximal_of, ratio_level
from corrente.algo.kl import ESTIMATORS
from corrente.algo.policy import PolicyFunction, PolicyInputs, PolicyTerm, as_term
from corrente.algo.rows import TrainingRows
from corrente.config import RunConfig
from corrente.data.step_totals import LOCAL_TOTALS, StepTotals
from corrente.data.types import Batch


class PolicyObjective:
    """The objective that ``algo``, ``staleness`` and ``distill`` ask for. Raises ConfigError for an objective of the user's
    that is not there."""

    def __init__(self, config: RunConfig, *, policy: PolicyFunction | None = None) -> None:
        algo = config.algo
        self._algo = algo
        self._distill = config.distill
        self._staleness = config.staleness
        self._max_tokens = config.sampling.max_tokens
        self._policy = policy or bind.objective(algo)
        self._kl = ESTIMATORS[algo.kl]
        self._aggregation: Aggregation = aggregation_of(algo)
        self._effective = is_effective(algo)
        self._level = ratio_level(algo)
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
                tokens_R = trained_R / np.where(share_R > 0, share_R, 1)
                if not self._effective:
                    sampled_R = np.array([row.sequence_tokens for row in batch.rows], np.float64)
                    tokens_R = np.where(sampled_R > 0, sampled_R, tokens_R)
                return aggregate.sequence_mean(tokens_R, sequences=sequences)
            case "sequence_sum":
                return aggregate.sequence_sum(trained_R, sequences=sequences)
            case _:
                return aggregate.fixed_length(trained_R, sequences=sequences, max_tokens=self._max_tokens)

    def survey(self, parts: Sequence[Trained], *, totals: StepTotals = LOCAL_TOTALS) -> list[Constants]:
        """Everything that depends on the step as a whole; see corrections.py and entropy.py."""
        parts = [_bounded(part) for part in parts]
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
        part = _bounded(part)
        before_K = part.logprobs_K if constants is None else constants.proximal_K
        part = distill.advantages(part, self._distill, before_K=before_K)
        rows = TrainingRows(part.row_K, like=part.logprobs_K)
        fixed = constants or self._alone(part, rows, trained or len(part.logprobs_K))
        proximal_K = self._proximal_of(part, constants)
        log_ratio_K = ratio.log_ratio(part.logprobs_K, proximal_K)
        inputs = PolicyInputs(
            # a row that was left out is far from p: at p instead, nothing computed of it can overflow, and 0 * inf is NaN
            logprobs_K=torch.where(fixed.whole_K, proximal_K.detach(), part.logprobs_K),
            proximal_K=proximal_K,
            advantages_K=self._advantages(part, fixed, rows),
            rows=rows,
        )
        value = as_term(self._policy(inputs), tokens=len(part.logprobs_K))
        gain_K = torch.where(fixed.kept_K & fixed.chosen_K, fixed.weight_K * value.value_K, 0.0)
        total = -(part.weights_K * fixed.scale_K * gain_K).sum()
        total = total + self._taught(part, log_ratio_K, fixed) + self._penalty(part, log_ratio_K, rows)
        return _loss(total - self._bonus(part, fixed), value, fixed)

    def _alone(self, part: Trained, rows: TrainingRows, trained: int) -> Constants:
        """The loss of one micro-batch, where nothing depends on the rest of the step."""
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

    def _taught(self, part: Trained, log_ratio_K: Tensor, fixed: Constants) -> Tensor | float:
        taught_K = distill.losses(part, self._distill, log_ratio_K=log_ratio_K)
        if taught_K is None:
            return 0.0
        taught_K = torch.where(fixed.kept_K, fixed.weight_K * taught_K, 0.0)
        return (part.weights_K * fixed.scale_K * taught_K).sum()

    def _penalty(self, part: Trained, log_ratio_K: Tensor, rows: TrainingRows) -> Tensor | float:
        if part.reference_K is None or self._algo.kl_in == "reward":
            return 0.0
        kl_K = self._kl(part.logprobs_K, part.reference_K)
        if self._algo.use_bias_correction_kl:
            kl_K = kl_K * torch.exp(rows.mean(log_ratio_K) if self._level == "sequence" else log_ratio_K)
        return self._algo.beta * (part.weights_K * kl_K).sum()

    def _bonus(self, part: Trained, fixed: Constants) -> Tensor | float:
        if part.entropy_K is None or self._algo.entropy_coef == 0:
            return 0.0
        return self._algo.entropy_coef * (fixed.bonus_K * part.entropy_K).sum()


def _bounded(part: Trained) -> Trained:
    """Tokens with log-probs that no objective can overflow on (ratio.py); recorded ones are constants."""
    return replace(
        part,
        logprobs_K=ratio.bounded(part.logprobs_K),
        behaviour_K=ratio.bounded(part.behaviour_K.detach()),
        reference_K=None if part.reference_K is None else ratio.bounded(part.reference_K.detach()),
    )


def _loss(total: Tensor, value: PolicyTerm, fixed: Constants) -> Loss:
    rejected_K, high_K = ~fixed.kept_K, value.high_K | fixed.over_K
    cut_K = value.cut_K | high_K | rejected_K | ~fixed.chosen_K
    return Loss(
        total=total, low_K=value.low_K, high_K=high_K, cut_K=cut_K, rejected_K=rejected_K, whole_K=fixed.whole_K
    )
