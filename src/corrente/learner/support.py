"""Masks of the support of a draw (the tokens that top-k, top-p and min-p left), made for a few positions at a time.

The learner renormalises over the support a token was drawn from: logits outside it count as so low that their probability is 0,
as in sampling. With the same temperature before it, log-probs and entropy are those of the distribution that was sampled.
Shapes: M positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corrente.data.support import WORD_BITS, Support
from corrente.errors import AlignmentError


class SupportMask:
    """``support`` of M positions on a device. A mask (rows, V) is made from it when it is needed; all M would not fit."""

    def __init__(self, support: Support, *, device: torch.device) -> None:
        self._vocabulary = support.vocabulary
        self._at = support.spans()
        self._counts_M = torch.from_numpy(support.counts).to(device)
        self._words = torch.from_numpy(support.words).to(device)
        self._bits = torch.arange(WORD_BITS, device=device, dtype=torch.int32)

    def mask_in_place(self, logits: Tensor, rows: slice) -> Tensor:
        """Set the logits (rows, V) outside the supports of positions ``rows`` to a probability of 0, in place."""
        return logits.masked_fill_(self.outside(rows, len(logits[0])), _floor(logits))

    def outside(self, rows: slice, vocabulary: int) -> Tensor:
        """True where a token is outside its support (rows, V). Raises AlignmentError where the vocabulary is another."""
        if vocabulary != self._vocabulary:
            raise AlignmentError(
                f"kept sets out of {self._vocabulary} tokens, but the model has logits of {vocabulary}"
            )
        # a support is stored as its ids where these are fewer than the words of a bit map, as a bit map otherwise; 0: no cut
        counts = self._counts_M[rows]
        words = self._words[self._at[rows.start] : self._at[rows.stop]]
        per_map = -(-self._vocabulary // WORD_BITS)
        sizes = counts.clamp(max=per_map)
        owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), sizes)
        listed = (counts <= per_map)[owner]
        outside = (counts > 0)[:, None].expand(-1, vocabulary).clone()
        outside[owner[listed], words[listed].long()] = False
        mapped = (counts > per_map).nonzero()[:, 0]
        if len(mapped):
            maps = words[~listed].view(len(mapped), per_map)
            bits = ((maps[:, :, None] >> self._bits) & 1).flatten(1)[:, :vocabulary]
            outside[mapped] = bits == 0
        return outside


def mask_logits(logits_MV: Tensor, support: SupportMask | None) -> Tensor:
    """The logits with those outside the supports at a probability of 0; differentiable."""
    if support is None:
        return logits_MV
    outside_MV = support.outside(slice(0, len(logits_MV)), logits_MV.shape[1])
    return logits_MV.masked_fill(outside_MV, _floor(logits_MV))


def _floor(logits: Tensor) -> float:
    """Finite, so that 0 times it is 0, and far enough from the end of the range that differences do not overflow."""
    return torch.finfo(logits.dtype).min / 4
