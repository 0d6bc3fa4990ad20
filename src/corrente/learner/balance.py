"""The load-balancing loss of a mixture of experts, over a whole optimizer step.

    L = E * sum_e f_e P_e      f_e = chosen_e / N,   P_e = sum_n p_ne / N

p: a router's softmax over its E experts; chosen_e: how many of the N tokens (of all rows, in all layers that have a router) have
e among the k likeliest: a constant, only P has a gradient. Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961, eq. 4 to
6, over top k and all layers together as ``load_balancing_loss_func`` of transformers has it: a step that is one padded batch
gives its number. A position that several rows share counts once for each.

L is a product of two means, so the sum over micro-batches is not that of the whole. f is taken over the whole step first, by a
forward pass without gradient where there are several micro-batches; then L is linear in p, and its gradient does not depend on
the cut. With replayed experts f and P are still the router's own: the loss balances where it would send tokens now.

Shapes: N tokens of a micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from corrente.data.step_totals import LOCAL_TOTALS, StepTotals
from corrente.errors import ConfigError
from corrente.learner.packing import Pack
from corrente.learner.policy import PolicyOutput
from corrente.models.moe_routing import Routers, routers_of


class LoadBalance:
    """The loss of one model, times ``coef``. Raises ConfigError where the model has no routers that are known."""

    def __init__(self, model: Any, *, coef: float) -> None:
        found = routers_of(model)
        if not isinstance(found, Routers):
            raise ConfigError(f"learner.router_aux_loss_coef = {coef:g}: {found}; leave it out")
        self._choices, self._coef = found.choices, coef
        self._load: tuple[Tensor, float] | None = None
        self._totals: StepTotals = LOCAL_TOTALS

    def survey(
        self,
        packs: Sequence[Pack],
        forward: Callable[[Pack], PolicyOutput],
        *,
        totals: StepTotals = LOCAL_TOTALS,
    ) -> None:
        """Count the choices of the present weights over all ``packs`` of the step; to be called before each update.

        ``forward`` returns router logits. It is called only where there are several packs: the choices in a single one are
        counted when its loss is computed.
        """
        self._load, self._totals = None, totals
        if len(packs) > 1:
            with torch.no_grad():
                self._load = self._count_choices([forward(pack) for pack in packs])

    def loss(self, output: PolicyOutput) -> Tensor:
        """The part of one micro-batch; the losses of a step's micro-batches add up."""
        if self._load is None:
            self._load = self._count_choices([output])
        chosen_E, tokens = self._load
        times_N = _times(output)
        likely_E = torch.stack(
            [(torch.softmax(one.float(), -1) * times_N[:, None]).sum(0) for one in output.router_logits]
        ).sum(0)
        return self._coef * len(likely_E) * (chosen_E / tokens * likely_E / tokens).sum()

    @torch.no_grad()
    def _count_choices(self, outputs: Sequence[PolicyOutput]) -> tuple[Tensor, float]:
        """How often each expert was chosen (E,), and the number of choices of a router, over the whole step."""
        first = outputs[0].router_logits[0]
        chosen_E, tokens = torch.zeros(first.shape[-1], device=first.device), 0.0
        for output in outputs:
            times_N = _times(output)
            for one in output.router_logits:
                ids = torch.softmax(one.float(), -1).topk(self._choices, -1).indices
                chosen_E.index_add_(0, ids.flatten(), times_N.repeat_interleave(ids.shape[1]))
                tokens += float(times_N.sum())
        *chosen, tokens = self._totals.sum([*chosen_E.tolist(), tokens])
        return torch.tensor(chosen, device=first.device), tokens


def _times(output: PolicyOutput) -> Tensor:
    """How many rows have each forwarded position (N,)."""
    return torch.from_numpy(output.inputs.times).to(output.router_logits[0].device, torch.float32)
