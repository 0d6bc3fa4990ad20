"""The gradient of one optimizer step: micro-batch after micro-batch, each forward, loss, backward.

    for each micro-batch:   forward -> log-probs of the trained tokens -> loss -> add its gradient

An objective that depends on the step as a whole is first shown all micro-batches, forwarded without gradient (``survey``).
Micro-batches may be one rank's share of the step: whatever is a total over the step goes through ``backend.totals``.
No optimizer here; the update is core.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from corrente.algo.base import Constants, Loss, Objective, Trained
from corrente.algo.teacher_logprobs import build_batches, likeliest_tokens, mean_logprobs
from corrente.backends.base import Backend
from corrente.data.reductions import Accumulator
from corrente.errors import DivergedError
from corrente.learner.balance import LoadBalance
from corrente.learner.base import Pulse, no_pulse
from corrente.learner.metrics import Trace, record_tokens
from corrente.learner.packing import Pack
from corrente.learner.policy import PolicyOutput


class Reference(NamedTuple):
    """The policy that a KL is measured to: ``policy``, called while ``frozen()`` is entered."""

    policy: nn.Module
    frozen: Callable[[], AbstractContextManager[None]]


class StepGradient:
    """Accumulates the gradient of a step in the parameters of ``policy``, a prepared learner.policy.Policy.

    ``recompute``: activations are recomputed in the backward pass. ``pulse`` is called before each forward pass of
    ``policy``, those of the reference apart.
    """

    def __init__(
        self,
        policy: nn.Module,
        *,
        objective: Objective,
        backend: Backend,
        reference: Reference | None = None,
        balance: LoadBalance | None = None,
        recompute: bool = False,
    ) -> None:
        self._policy, self._objective, self._backend = policy, objective, backend
        self.reference, self._balance = reference, balance
        self._recompute = recompute
        self.pulse: Pulse = no_pulse

    def survey(self, packs: Sequence[Pack]) -> Sequence[Constants | None]:
        """Per micro-batch, what the objective fixes over the whole step before its first update; None where it fixes nothing."""
        if not self._objective.needs_survey:
            return [None] * len(packs)
        with torch.no_grad():
            parts = [_trained_tokens(pack, self._forward(pack)) for pack in packs]
            return self._objective.survey(parts, totals=self._backend.totals)

    def accumulate(self, packs: Sequence[Pack], constants: Sequence[Constants | None], *, fresh: bool) -> Accumulator:
        """Add the gradient of all micro-batches, and return what they report, over the whole step.

        ``constants``: what ``survey`` returned. ``fresh``: see metrics.record_tokens. Raises DivergedError for a loss that is not
        finite; the gradient is then undefined, and the caller discards it.
        """
        totals, report = self._backend.totals, Accumulator()
        trained = int(totals.sum([sum(len(pack.targets_K) for pack in packs)])[0])
        with self._training():
            if self._balance is not None:
                self._balance.survey(packs, self._forward, totals=totals)
            for number, (pack, fixed) in enumerate(zip(packs, constants, strict=True)):
                with self._backend.micro_batch(last=number == len(packs) - 1):
                    loss = self._micro_batch(pack, fixed, trained, report, fresh=fresh)
                    self._backend.accumulate(loss)
        return totals.merge(report)

    def reference_logprobs(self, pack: Pack) -> Tensor | None:
        """Log-probs (K,) of the trained tokens under the frozen policy; None where the objective has no use for one."""
        if self.reference is None:
            return None
        with torch.no_grad(), self.reference.frozen():
            return self.reference.policy(pack).logprobs_K

    def _forward(self, pack: Pack, *, likeliest: bool = False) -> PolicyOutput:
        """``likeliest``: also of the teachers' likeliest tokens, which only the loss reads."""
        self.pulse()
        extra_KJ = likeliest_tokens(pack.teachers_R, pack.counts_R) if likeliest else None
        return self._policy(pack, extra_targets_KJ=extra_KJ, router_logits=self._balance is not None)

    def _micro_batch(
        self, pack: Pack, constants: Constants | None, trained: int, report: Accumulator, *, fresh: bool
    ) -> Tensor:
        """The loss of one micro-batch; what it reports is added to ``report``."""
        output = self._forward(pack, likeliest=self._objective.needs_teachers == "likeliest")
        part = _trained_tokens(pack, output, reference_K=self.reference_logprobs(pack))
        loss = self._objective(part, constants=constants, trained=trained)
        if self._balance is not None:
            balance = self._balance.loss(output)
            report.record("train/router_aux_loss", float(balance.detach()), how="sum")
            loss = replace(loss, total=loss.total + balance)
        value = float(loss.total.detach())
        # all ranks leave together: one that raised alone would leave the others waiting in the backward pass
        if not self._backend.totals.all(math.isfinite(value)):
            raise DivergedError(f"loss is {value} on {len(pack.targets_K)} tokens of {len(pack.contexts)} rows")
        report.record("train/loss", value, how="sum")
        report.record("train/distinct_tokens", float(output.inputs.tokens.size), how="sum")
        teachers = bool(self._objective.needs_teachers)
        record_tokens(report, _trace(pack, output, part, loss, teachers=teachers), fresh=fresh)
        return loss.total

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Hugging Face recomputes activations only in training mode; the model's own dropout is off in either mode."""
        self._policy.train(self._recompute)
        try:
            yield
        finally:
            self._policy.eval()


def _trained_tokens(pack: Pack, output: PolicyOutput, *, reference_K: Tensor | None = None) -> Trained:
    dtype, device = output.logprobs_K.dtype, output.logprobs_K.device
    return Trained(
        logprobs_K=output.logprobs_K,
        behaviour_K=torch.as_tensor(pack.behaviour_K, dtype=dtype, device=device),
        advantages_K=torch.as_tensor(pack.advantages_K, dtype=dtype, device=device),
        weights_K=torch.as_tensor(pack.weights_K, dtype=dtype, device=device),
        row_K=torch.as_tensor(pack.row_K, device=device),
        lags_K=torch.as_tensor(pack.lags_K, device=device),
        entropy_K=output.entropy_K,
        reference_K=reference_K,
        teachers=build_batches(pack.teachers_R, pack.counts_R, student_KJ=output.extra_KJ, like=output.logprobs_K),
    )


def _trace(pack: Pack, output: PolicyOutput, part: Trained, loss: Loss, *, teachers: bool) -> Trace:
    return Trace(
        logprobs_K=_numpy(output.logprobs_K),
        behaviour_K=pack.behaviour_K.astype(np.float64),
        reference_K=None if part.reference_K is None else _numpy(part.reference_K),
        entropy_K=_numpy(output.entropy_K),
        lags_K=pack.lags_K,
        mixed_K=pack.mixed_K,
        low_K=loss.low_K.cpu().numpy(),
        high_K=loss.high_K.cpu().numpy(),
        cut_K=loss.cut_K.cpu().numpy(),
        rejected_K=loss.rejected_K.cpu().numpy(),
        whole_K=loss.whole_K.cpu().numpy(),
        teacher_K=mean_logprobs(pack.teachers_R, pack.counts_R) if teachers else None,
    )


def _numpy(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.detach().double().cpu().numpy()
