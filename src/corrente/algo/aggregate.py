"""Averages of token losses: the weight of a row's token losses in the sum over the whole optimizer step. numpy only.

Shapes: R rows. ``sequences`` and ``tokens`` are those of the step (``Batch``), also of episodes whose rows were left out, and of
tokens that are withheld; that is the fixed denominator. The effective one counts rows and tokens that are trained instead; what
the corrections leave out of them is known only when they have been forwarded, see corrections.py.

Every weight holds a denominator of the whole step, never of a micro-batch. Averaging micro-batch means instead would weigh 100
tokens at loss 2.0 as much as 900 tokens at loss 0.5 (1.25); the mean over the step's tokens is 0.65.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]


def token_mean(trained_R: NDArray[np.int64], *, tokens: int) -> Weights:
    """1 / tokens: every token counts alike, long completions weigh more. DAPO, arXiv:2503.14476, equation 8."""
    return np.full(len(trained_R), 1 / max(tokens, 1))


def sequence_mean(tokens_R: NDArray[np.float64], *, sequences: float) -> Weights:
    """1 / (sequences * tokens of the row's sequence): every completion counts alike. GRPO, arXiv:2402.03300, equation 3.

    ``tokens_R``: sampled tokens, those too old to be trained on included, so that withholding some raises the weight of no other;
    with an effective denominator, trained ones. They are counted over all rows of the sequence."""
    return 1 / (max(sequences, 1) * np.maximum(tokens_R, 1))


def sequence_sum(trained_R: NDArray[np.int64], *, sequences: float) -> Weights:
    """1 / sequences: a completion counts by the sum of its tokens, as the gradient of a sequence's log-probability does.
    LUSPO, arXiv:2602.05261; TOPR and Kimi, whose objectives are of sequences."""
    return np.full(len(trained_R), 1 / max(sequences, 1))


def fixed_length(trained_R: NDArray[np.int64], *, sequences: float, max_tokens: int) -> Weights:
    """1 / (sequences * max_tokens): no division by a length that depends on the sample, hence no bias towards long wrong and
    short right answers. Dr. GRPO, arXiv:2503.20783, section 3.2."""
    return np.full(len(trained_R), 1 / (max(sequences, 1) * max_tokens))
