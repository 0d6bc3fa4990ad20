"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over the parameters of a module that require a gradient.

Weight decay applies to matrices alone; biases and norm gains have one dimension and are left out, as is usual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from corrente import config


class AdamW:
    """Implements ``backends.base.StepOptimizer`` for parameters that are whole on one device."""

    def __init__(self, module: nn.Module, *, learner: config.LearnerConfig) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        others = [p for p in self._parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": learner.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=learner.lr,
            betas=learner.betas,
            eps=learner.eps,
            fused=all(p.is_floating_point() for p in self._parameters),
        )

    def norm(self) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients, foreach=True))

    def step(self, *, lr: float, norm: float, max_norm: float) -> None:
        if 0 < max_norm < norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_norm, torch.tensor(norm), foreach=True)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def restore(self, state: dict[str, Any]) -> None:
        """See StepOptimizer.restore. The moments are those of ``state``; the settings stay those of the config."""
        settings = [{key: group[key] for key in group if key != "params"} for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(state)
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
