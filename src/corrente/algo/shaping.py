"""Length shaping: rewards less a penalty for length. The penalty is part of the reward before any baseline is made of it.

    overlong   0                                   l <= max - buffer          soft punishment: DAPO, arXiv:2503.14476, equation 13
               penalty * (max - buffer - l) / buffer        up to max: from 0 to -penalty
    length     - penalty * l / max

l: sampled tokens of an episode; max: ``sampling.max_tokens``; an episode of several turns that is longer than max gets the whole
penalty. Subtracting a penalty after the baseline was made would push every long episode down whatever the others did; made of
the same quantity, it only ranks episodes of a group. Degenerate case: equal lengths change no advantage. An episode
without a reward stays without.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from corrente.config import Algo


def overlong(lengths_G: NDArray[np.int64], *, buffer: int, longest: int) -> NDArray[np.float64]:
    """The soft punishment (G,): from 0 to -1 over the last ``buffer`` tokens before ``longest``."""
    return np.clip((longest - buffer - lengths_G) / buffer, -1.0, 0.0)


def shaped(
    rewards_G: NDArray[np.float64], lengths_G: NDArray[np.int64], *, algo: Algo, longest: int
) -> NDArray[np.float64]:
    """Rewards (G,) less the penalties for length that ``algo`` asks for; NaN stays NaN."""
    out_G = rewards_G - algo.length_penalty * np.minimum(lengths_G / longest, 1.0)
    if algo.overlong_tokens:
        out_G = out_G + algo.overlong_penalty * overlong(lengths_G, buffer=algo.overlong_tokens, longest=longest)
    return out_G
