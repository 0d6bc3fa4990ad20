"""One device: parameters, gradients and moments are whole, in one process. It shards nothing and moves nothing off the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from corrente import config
from corrente.backends.optimizer import LearnerOptimizer
from corrente.data.step_totals import LOCAL_TOTALS, StepTotals


class SingleDevice:
    """Implements ``backends.base.Backend``."""

    def __init__(self, settings: config.Single, *, learner: config.LearnerConfig) -> None:
        self.totals: StepTotals = LOCAL_TOTALS
        self._learner = learner
        self._prepared: list[nn.Module] = []

    def prepare(self, policy: nn.Module) -> nn.Module:
        self._prepared.append(policy)
        return policy

    def optimizer(self, policy: nn.Module) -> LearnerOptimizer:
        return LearnerOptimizer(policy, learner=self._learner)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def accumulate(self, loss: Tensor) -> None:
        loss.backward()

    def discard(self) -> None:
        for policy in self._prepared:
            policy.zero_grad(set_to_none=True)
