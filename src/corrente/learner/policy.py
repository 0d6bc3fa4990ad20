"""The policy as one torch module: a micro-batch in, log-probabilities of its trained tokens out.

Everything that reads a parameter happens inside ``forward``: the model's layers, the output layer, the log-probs. So the module
can be sharded or replicated as a whole (``fully_shard``, DDP), and the policy in training, the reference and the passes without
gradient all take the same way.

A micro-batch is forwarded in one of two ways, equal in value:
- as a prefix tree: one sequence of distinct prefixes, with attention (attention.py) and positions of our making. Nothing is
  computed twice.
- as padded rows, for architectures that do not take these (recurrent ones, for example), and for micro-batches deeper than a
  sliding attention window.

Likewise the output layer is applied to the predicting positions alone where hidden state and output weights give the model's
logits; otherwise (scaled or capped logits) the model's own logits are used. Which way applies is found out when the module is
made (probes.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corrente.data.types import Tokens
from corrente.errors import AlignmentError
from corrente.learner import attention
from corrente.learner.head import TokenLogprobs, logprobs_from_logits, token_logprobs
from corrente.learner.model import device_of, hidden_states, model_logits, to_device
from corrente.learner.packing import Pack, PackInputs, as_rows, as_tree
from corrente.learner.probes import ModelTraits, probe_model, sliding_window
from corrente.learner.support import SupportMask
from corrente.models.moe_routing import routers_of


class PolicyOutput(NamedTuple):
    """Result of one forward pass. A tuple: FSDP2 and DDP find the tensors of an output inside tuples, not inside other classes.

    ``logprobs_K``: of the trained tokens, at the sampling temperature, among the tokens each was drawn from and through the
    experts that were recorded. ``entropy_K``: of the distribution each was drawn from. ``extra_KJ``: log-probs of
    ``extra_targets_KJ``. ``router_logits``: per layer with experts, of the positions forwarded (N, E). All of them are
    differentiable. ``inputs``: the positions that were forwarded.
    """

    logprobs_K: Tensor
    entropy_K: Tensor
    extra_KJ: Tensor | None
    router_logits: tuple[Tensor, ...]
    inputs: PackInputs


class Policy(nn.Module):
    """Log-probabilities under one Hugging Face causal LM. It has no optimizer and takes no step."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        dtype: torch.dtype | None = None,
        traits: ModelTraits | None = None,
    ) -> None:
        """``temperature`` 0 (greedy sampling) counts as 1. ``dtype`` of matrix products; None: that of the parameters.
        ``traits``: where they are known already; None: the model is probed."""
        super().__init__()
        self.model = model
        self.temperature = temperature or 1.0
        self.dtype: torch.dtype = dtype or next(model.parameters()).dtype
        self.traits = traits or probe_model(model)
        self._window = sliding_window(model.config)
        self._routers = routers_of(model)
        if self.traits.prefix_tree:
            model.set_attn_implementation(attention.NAME)

    def forward(
        self, pack: Pack, *, extra_targets_KJ: Tokens | None = None, router_logits: bool = False
    ) -> PolicyOutput:
        """Log-probs of the K trained tokens of ``pack``.

        ``extra_targets_KJ``: J more tokens at each of the same places whose log-probs are wanted. ``router_logits``: return those
        of a mixture of experts. Raises AlignmentError where recorded experts or supports do not fit the model.
        """
        deepest = max(len(context) for context in pack.contexts)
        tree = self.traits.prefix_tree and (self._window is None or deepest <= self._window)
        inputs = as_tree(pack) if tree else as_rows(pack)
        self._set_routing(inputs, record=router_logits)
        out = self._token_logprobs(pack, inputs, extra_targets_KJ)
        return PolicyOutput(
            logprobs_K=out.logprobs_K,
            entropy_K=out.entropy_M[to_device(inputs.slot_K, out.entropy_M.device)],
            extra_KJ=out.extra_KJ,
            router_logits=tuple(self._routers.heard()) if router_logits and not isinstance(self._routers, str) else (),
            inputs=inputs,
        )

    def _token_logprobs(self, pack: Pack, inputs: PackInputs, extra_targets_KJ: Tokens | None) -> TokenLogprobs:
        device = device_of(self.model)
        select_M = to_device(inputs.select_M, device)
        wanted: dict[str, Any] = {
            "slot_K": to_device(inputs.slot_K, device),
            "targets_K": to_device(pack.targets_K, device),
            "extra_targets_KJ": None if extra_targets_KJ is None else to_device(extra_targets_KJ, device).long(),
            "support": None if inputs.support is None else SupportMask(inputs.support, device=device),
            "temperature": self.temperature,
        }
        mixed = self.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(device.type, self.dtype, enabled=mixed):
            if not self.traits.linear_head:
                return logprobs_from_logits(model_logits(self.model, inputs)[select_M], **wanted)
            hidden_MH = hidden_states(self.model, inputs)[select_M].to(self.dtype)
        head = self.model.get_output_embeddings()
        # the weight itself, not a call of the layer: under FSDP2 the output layer must share a unit with this module (the root)
        return token_logprobs(hidden_MH, head.weight, getattr(head, "bias", None), **wanted)

    def _set_routing(self, inputs: PackInputs, *, record: bool) -> None:
        """Have the next forward pass, and its recomputation, route tokens as was recorded."""
        if not isinstance(self._routers, str):
            self._routers.replay(
                None if inputs.experts is None else to_device(inputs.experts, device_of(self.model)).long()
            )
            if record:
                self._routers.listen()
        elif inputs.experts is not None:
            raise AlignmentError(
                f"the rows say which experts were chosen, but they cannot be replayed: {self._routers}"
            )
