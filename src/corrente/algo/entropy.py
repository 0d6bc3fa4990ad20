"""Entropy in the loss: rewarded as a mean over tokens, and as a choice of the tokens that are trained on. Shapes: K tokens, flat.

    loss - coef * mean of H_t over the step's trained tokens,        H_t = -sum_v pi(v) log pi(v) where token t was drawn

The mean is over trained tokens whatever the objective's aggregation, as in TRL, so that the coefficient means the same for all.
The gradient goes through the whole distribution (learner/head.py). Mnih et al. 2016, arXiv:1602.01783.

    top_entropy_quantile rho: the policy objective of the step's tokens below the (1 - rho) quantile of H is left out

Wang et al. 2025, arXiv:2506.01939, "Beyond the 80/20 rule", with rho = 0.2: tokens where the text could have gone another way
carry the signal. The quantile is of the whole step; the entropy bonus acts on the same tokens. Degenerate case: rho = 1 keeps
all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from corrente.data.step_totals import LOCAL_TOTALS, StepTotals

SLACK = 1e-5
"""Relative. Tokens drawn from one context have one entropy; float32 gives it other last digits in another micro-batch, and that
must not decide which of them are trained on."""


def highest(entropies: Sequence[Tensor], *, share: float, totals: StepTotals = LOCAL_TOTALS) -> list[Tensor]:
    """Per part, which tokens (K,) are at or above the quantile of all parts of the step together."""
    # sorted by numpy: torch.quantile refuses more than 2^24 values
    ordered = np.sort(totals.concat(np.concatenate([part.detach().double().cpu().numpy() for part in entropies])))
    place = (1 - share) * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    bound = float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
    return [part.detach().double() >= bound * (1 - SLACK) for part in entropies]
