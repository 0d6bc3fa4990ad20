"""The optimizer of a learner whose parameters are whole on one device: any of ``OPTIMIZERS``.

Weight decay applies to matrices alone; biases and norm gains have one dimension and are left out, as is usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from corrente import config
from corrente.errors import ConfigError

Groups = Any
"""Parameter groups, as torch.optim takes them."""


def _adamw(
    groups: Groups, learner: config.LearnerConfig, fused: bool, more: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
    return torch.optim.AdamW(groups, lr=learner.lr, betas=learner.betas, eps=learner.eps, fused=fused, **more)


def _sgd(groups: Groups, learner: config.LearnerConfig, fused: bool, more: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=learner.lr, fused=fused, **more)


def _adagrad(
    groups: Groups, learner: config.LearnerConfig, fused: bool, more: Mapping[str, Any]
) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(groups, lr=learner.lr, **more)


def _rmsprop(
    groups: Groups, learner: config.LearnerConfig, fused: bool, more: Mapping[str, Any]
) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=learner.lr, **more)


def _adafactor(
    groups: Groups, learner: config.LearnerConfig, fused: bool, more: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) at the given rate, as transformers' Trainer sets it."""
    from transformers.optimization import Adafactor

    return Adafactor(groups, **{"lr": learner.lr, "scale_parameter": False, "relative_step": False, **more})


def _bitsandbytes(cls: str, **fixed: Any) -> Callable[..., torch.optim.Optimizer]:
    def make(
        groups: Groups, learner: config.LearnerConfig, fused: bool, more: Mapping[str, Any]
    ) -> torch.optim.Optimizer:
        import bitsandbytes  # pyright: ignore[reportMissingImports]

        settings: dict[str, Any] = {"lr": learner.lr, "betas": learner.betas, **fixed}
        if cls == "AdamW":
            settings["eps"] = learner.eps
        return getattr(bitsandbytes.optim, cls)(groups, **settings, **more)

    return make


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _bitsandbytes("AdamW", optim_bits=8),
    "paged_adamw": _bitsandbytes("AdamW", is_paged=True),
    "paged_adamw_8bit": _bitsandbytes("AdamW", optim_bits=8, is_paged=True),
    "lion": _bitsandbytes("Lion"),
    "lion_8bit": _bitsandbytes("Lion", optim_bits=8),
    "adafactor": _adafactor,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}
"""``learner.optimizer`` -> the function that makes it of parameter groups; the keys of learner.optimizer_args are added."""


class LearnerOptimizer:
    """Implements ``backends.base.StepOptimizer`` for parameters that are whole on one device."""

    def __init__(self, module: nn.Module, *, learner: config.LearnerConfig) -> None:
        self._name = learner.optimizer
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        others = [p for p in self._parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": learner.weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = all(p.is_floating_point() for p in self._parameters)
        make = OPTIMIZERS[learner.optimizer]
        try:
            self._optimizer = make(
                [group for group in groups if group["params"]], learner, fused, learner.optimizer_args
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'learner.optimizer_args = {learner.optimizer_args}: "{learner.optimizer}" does not take them: {error}'
            ) from error

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
        return {"optimizer": self._name, **self._optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """See StepOptimizer.restore. The moments are those of ``state``; the settings stay those of the config."""
        saved = state.get("optimizer", "adamw")
        if saved != self._name:
            raise ValueError(f'it holds the state of the optimizer "{saved}", and learner.optimizer is "{self._name}"')
        settings = [{key: group[key] for key in group if key != "params"} for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict({key: value for key, value in state.items() if key != "optimizer"})
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
