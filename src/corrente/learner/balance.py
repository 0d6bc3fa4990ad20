"""The load-balancing loss of a mixture of experts, over a whole optimizer step.

    L = E * sum_e f_e P_e      f_e = chosen_e / N,   P_e = sum_n p_ne / N

p: a router's softmax over its E experts; chosen_e: how many of the N tokens (of all rows, in all layers that have a router) have
e among the k likeliest: a constant, P is what is pushed. Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 to 6,
over top k and all layers together as ``load_balancing_loss_func`` of transformers has it: a step that is one padded batch gives
its number. A position that several rows share counts once for each.

L is a product of two means, so the sum over micro-batches is not that of the whole. f is taken over the whole step first, by a
forward pass without gradient where there are several micro-batches; then L is linear in p, and its gradient does not depend on
the cut. With replayed experts f and P are still the router's own: what is balanced is where it would send tokens now.

Shapes: N tokens of a micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from corrente.errors import ConfigError
from corrente.learner.packing import Inputs, Pack
from corrente.models.moe_routing import Routers, routers_of


class Balance:
    """The loss of one model, times ``coef``. ConfigError where the model has no routers that are known."""

    def __init__(self, model: Any, *, coef: float) -> None:
        found = routers_of(model)
        if not isinstance(found, Routers):
            raise ConfigError(f"learner.router_aux_loss_coef = {coef:g}: {found}; leave it out")
        self._routers, self._coef = found, coef
        self._chosen: Tensor | None = None
        self._tokens = 0.0
        self.value = 0.0
        """Of the step so far, ``coef`` included."""

    def settle(self, policy: Any, packs: Sequence[Pack]) -> None:
        """Before an update from ``packs``: who would be sent where by the present weights, over all of them."""
        self._chosen, self._tokens, self.value = None, 0.0, 0.0
        self._routers.listen()
        if len(packs) > 1:
            with torch.no_grad():
                for pack in packs:
                    inputs = policy.logprobs(pack)[1]
                    self._count(self._routers.heard(), inputs)

    def loss(self, inputs: Inputs) -> Tensor:
        """Of the micro-batch that was forwarded last; the losses of a step add up."""
        logits = self._routers.heard()
        if self._chosen is None:
            self._count([one.detach() for one in logits], inputs)
        assert self._chosen is not None
        times_N = torch.from_numpy(inputs.times).to(logits[0].device, torch.float32)
        likely = torch.stack([(torch.softmax(one.float(), -1) * times_N[:, None]).sum(0) for one in logits]).sum(0)
        loss = self._coef * len(likely) * (self._chosen / self._tokens * likely / self._tokens).sum()
        self.value += float(loss.detach())
        return loss

    def _count(self, logits: Sequence[Tensor], inputs: Inputs) -> None:
        times_N = torch.from_numpy(inputs.times).to(logits[0].device, torch.float32)
        for one in logits:
            ids = torch.softmax(one.float(), -1).topk(self._routers.choices, -1).indices
            chosen = torch.zeros(one.shape[-1], device=one.device)
            chosen.index_add_(0, ids.flatten(), times_N.repeat_interleave(ids.shape[1]))
            self._chosen = chosen if self._chosen is None else self._chosen + chosen
            self._tokens += float(times_N.sum())
