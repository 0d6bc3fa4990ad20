"""Log-probabilities of chosen tokens from hidden states, without keeping logits that no trained token needs.

    logprob_k = z[m_k, y_k] - logsumexp_{v in S_m} z[m_k, v],      z = (hidden W^T + b) / temperature

Shapes: M positions, H hidden size, V vocabulary, K trained tokens; ``slot_K`` says at which of the M positions token k is
predicted, so tokens that share a position share its row of logits. S_m is the support of the draw at m: the tokens that top-k,
top-p and min-p left to draw from, all of V where none is in use. The backward pass is written out,

    d loss / d z[m, v] = sum_{k at m} g_k (1[v = y_k] - p[m, v]) - h_m p[m, v] (log p[m, v] + H[m]),       p = softmax(z),

g the gradient of the log-probs and h that of the entropies H (left out where no loss uses them), because autograd would keep
three arrays of M x V where one is enough. Logits are made in chunks of rows. Where all of them fit in ``KEEP_BYTES``, their
softmax is stored for the backward pass; otherwise it is recomputed there. Softmax and its sums are in float32 at least, whatever
the model computes in. The matrix products are in the dtype of ``hidden``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from corrente.learner.support import SupportMask, mask_logits

KEEP_BYTES = 1 << 30
"""Largest softmax that is stored from the forward to the backward pass."""
CHUNK_BYTES = 64 << 20
"""Size of the logits that exist at once."""


class TokenLogprobs(NamedTuple):
    """Log-probs (K,), and the entropy (M,) of the distribution at each position. ``extra_KJ``: log-probs of J more tokens at the
    places of each of the K; None where none were asked for. All are differentiable."""

    logprobs_K: Tensor
    entropy_M: Tensor
    extra_KJ: Tensor | None = None


def token_logprobs(
    hidden_MH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    *,
    slot_K: Tensor,
    targets_K: Tensor,
    temperature: float,
    extra_targets_KJ: Tensor | None = None,
    support: SupportMask | None = None,
) -> TokenLogprobs:
    """Log-probs of ``targets_K`` and ``extra_targets_KJ`` at positions ``slot_K`` of ``hidden_MH``, within ``support``.

    The logits of all positions never exist at once; see the module's docstring.
    """
    slots, targets = _targets(slot_K, targets_K, extra_targets_KJ)
    logprobs, entropy_M = _TokenLogprobs.apply(hidden_MH, weight_VH, bias_V, slots, targets, temperature, support)
    return TokenLogprobs(logprobs[: len(slot_K)], entropy_M, _extra(logprobs, extra_targets_KJ))


def logprobs_from_logits(
    logits_MV: Tensor,
    *,
    slot_K: Tensor,
    targets_K: Tensor,
    temperature: float,
    extra_targets_KJ: Tensor | None = None,
    support: SupportMask | None = None,
) -> TokenLogprobs:
    """The same as ``token_logprobs``, from logits that the model computed in its own way."""
    if logits_MV.dtype in (torch.bfloat16, torch.float16):
        logits_MV = logits_MV.float()
    logprobs_MV = torch.log_softmax(mask_logits(logits_MV / temperature, support), -1)
    entropy_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
    slots, targets = _targets(slot_K, targets_K, extra_targets_KJ)
    logprobs = logprobs_MV[slots, targets]
    return TokenLogprobs(logprobs[: len(slot_K)], entropy_M, _extra(logprobs, extra_targets_KJ))


def _targets(slot_K: Tensor, targets_K: Tensor, extra_targets_KJ: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions and tokens to evaluate: the K, then J more at the place of each."""
    if extra_targets_KJ is None:
        return slot_K, targets_K
    more = slot_K.repeat_interleave(extra_targets_KJ.shape[1])
    return torch.cat([slot_K, more]), torch.cat([targets_K, extra_targets_KJ.flatten()])


def _extra(logprobs: Tensor, extra_targets_KJ: Tensor | None) -> Tensor | None:
    return None if extra_targets_KJ is None else logprobs[len(extra_targets_KJ) :].view(extra_targets_KJ.shape)


class _TokenLogprobs(torch.autograd.Function):
    """See the module's docstring for both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slot: Tensor,
        target: Tensor,
        temperature: float,
        support: SupportMask | None,
    ) -> tuple[Tensor, Tensor]:
        positions, vocabulary = len(hidden), len(weight)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        lse = hidden.new_empty(positions, dtype=exact)
        entropy, chosen = torch.empty_like(lse), hidden.new_empty(len(slot), dtype=exact)
        store = any(ctx.needs_input_grad) and positions * vocabulary * exact.itemsize <= KEEP_BYTES
        stored: list[Tensor] = []
        for rows in _chunks(positions, vocabulary * exact.itemsize):
            z = _logits(hidden[rows], weight, bias, temperature, exact)
            z = z if support is None else support.mask_in_place(z, rows)
            here = (slot >= rows.start) & (slot < rows.stop)
            chosen[here] = z[slot[here] - rows.start, target[here]]
            lse[rows] = torch.logsumexp(z, -1)
            p = torch.exp(z - lse[rows, None])
            entropy[rows] = lse[rows] - torch.linalg.vecdot(p, z)
            stored.extend([p] if store else [])
        ctx.save_for_backward(hidden, weight, bias, slot, target, lse, entropy, *stored)
        ctx.temperature, ctx.support = temperature, support
        ctx.set_materialize_grads(False)  # a loss without entropy then costs no backward pass for it
        return chosen - lse[slot], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, slot, target, lse, entropy, *stored = ctx.saved_tensors
        of_logprobs, of_entropy = grads
        grad = lse.new_zeros(len(slot)) if of_logprobs is None else of_logprobs / ctx.temperature
        total = torch.zeros_like(lse).index_add_(0, slot, grad)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = grad_bias = None
        for number, rows in enumerate(_chunks(len(hidden), len(weight) * lse.dtype.itemsize)):
            if stored:
                # not in place: a second backward through a retained graph reads the stored softmax again
                p, spare = stored[number], torch.empty_like(stored[number])
            else:
                z = _logits(hidden[rows], weight, bias, ctx.temperature, lse.dtype)
                z = z if ctx.support is None else ctx.support.mask_in_place(z, rows)
                p = z.sub_(lse[rows, None]).exp_()
                spare = p if of_entropy is None else torch.empty_like(p)
            dz = torch.mul(p, -total[rows, None], out=spare)
            if of_entropy is not None:
                slope = torch.special.xlogy(p, p).addcmul_(p, entropy[rows, None])
                dz.addcmul_(slope, of_entropy[rows, None], value=-1 / ctx.temperature)
            here = (slot >= rows.start) & (slot < rows.stop)
            dz.index_put_((slot[here] - rows.start, target[here]), grad[here], accumulate=True)
            dz = dz.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(dz, weight.to(dz.dtype), out=grad_hidden[rows])
            if wants_weight:
                part = (dz.T @ hidden[rows]).to(weight.dtype)
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
            if wants_bias and bias is not None:
                part = dz.sum(0).to(bias.dtype)
                grad_bias = part if grad_bias is None else grad_bias.add_(part)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunks(count: int, bytes_each: int) -> list[slice]:
    size = max(1, CHUNK_BYTES // bytes_each)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, exact: torch.dtype) -> Tensor:
    bias = None if bias is None else bias.to(hidden.dtype)
    z = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).to(exact)
    return z if temperature == 1 else z.div_(temperature)
