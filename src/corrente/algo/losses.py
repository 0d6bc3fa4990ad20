"""The loss of one micro-batch, put together from the ideas in the files beside it as the config says. Implements Objective.

    loss = sum_k w_k * (-J_k + beta * k3_k)

J: clip.py, or importance.py where ``staleness.correct`` asks for weights. w: aggregate.py. k3: kl.py.
Shapes: K trained tokens, flat; R rows. Masked tokens are not among the K, so what is stored in them (NaN, inf) cannot matter.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from corrente.algo import aggregate, clip, importance
from corrente.algo.base import Loss
from corrente.algo.kl import k3
from corrente.algo.ratio import log_ratio
from corrente.config import RunConfig
from corrente.types import Batch


class PolicyObjective:
    """The objective named by ``algo`` and ``staleness.correct``."""

    def __init__(self, config: RunConfig) -> None:
        self._algo = config.algo
        self._correct = config.staleness.correct
        self._cap = config.staleness.correct_cap
        self._max_tokens = config.sampling.max_tokens
        self._high = config.algo.epsilon if config.algo.epsilon_high is None else config.algo.epsilon_high
        self.needs_reference = config.algo.beta > 0

    def row_weights(self, batch: Batch) -> NDArray[np.float64]:
        """Factor of the token losses of each row (R,)."""
        trained_R = np.array([np.count_nonzero(row.loss_mask) for row in batch.rows], np.int64)
        match self._algo.loss:
            case "dapo":
                return aggregate.token_mean(trained_R, tokens=batch.tokens)
            case "grpo":
                return aggregate.sequence_mean(trained_R, sequences=batch.sequences)
            case "dr_grpo":
                return aggregate.fixed_length(trained_R, sequences=batch.sequences, max_tokens=self._max_tokens)

    def __call__(
        self,
        logprobs_K: Tensor,
        *,
        behaviour_K: Tensor,
        advantages_K: Tensor,
        weights_K: Tensor,
        reference_K: Tensor | None = None,
    ) -> Loss:
        """Loss of these tokens, differentiable in ``logprobs_K`` alone."""
        ratio_K = torch.exp(log_ratio(logprobs_K, behaviour_K))
        if self._correct == "none":
            loss = self._clipped(ratio_K, advantages_K, weights_K)
        else:
            loss = self._corrected(logprobs_K, ratio_K, advantages_K, weights_K)
        if reference_K is None:
            return loss
        penalty = (weights_K * k3(logprobs_K, reference_K)).sum()
        return Loss(
            total=loss.total + self._algo.beta * penalty, low_K=loss.low_K, high_K=loss.high_K, cut_K=loss.cut_K
        )

    def _clipped(self, ratio_K: Tensor, advantages_K: Tensor, weights_K: Tensor) -> Loss:
        epsilon, delta = self._algo.epsilon, self._algo.delta
        value_K = clip.clipped(ratio_K, advantages_K, epsilon=epsilon, epsilon_high=self._high, delta=delta)
        now_K = ratio_K.detach()
        low_K = clip.too_low(now_K, advantages_K, epsilon=epsilon)
        high_K = clip.too_high(now_K, advantages_K, epsilon_high=self._high)
        cut_K = low_K | high_K | clip.far_off(now_K, advantages_K, delta=delta)
        return Loss(total=-(weights_K * value_K).sum(), low_K=low_K, high_K=high_K, cut_K=cut_K)

    def _corrected(self, logprobs_K: Tensor, ratio_K: Tensor, advantages_K: Tensor, weights_K: Tensor) -> Loss:
        weigh = importance.truncated if self._correct == "tis" else importance.masked
        value_K = importance.weighted(logprobs_K, advantages_K, weigh(ratio_K, cap=self._cap))
        high_K = ratio_K.detach() > self._cap
        return Loss(total=-(weights_K * value_K).sum(), low_K=torch.zeros_like(high_K), high_K=high_K, cut_K=high_K)
