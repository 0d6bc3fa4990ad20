"""The age of tokens when they are trained on: the check of the bound, and the buckets of the metrics. numpy only.

Shapes: K trained tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from corrente.data.types import Mask, Tokens
from corrente.errors import LedgerError

LAG_BUCKETS = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5+", 5, np.iinfo(np.int32).max))
"""Name, smallest and largest lag of each bucket, in versions."""


def assert_age_bound(lags_K: Tokens, *, bound: int | None) -> None:
    """Raise LedgerError when a token is older than ``bound`` versions, or newer than the step. None: no bound."""
    if len(lags_K) and (lags_K.min() < 0 or (bound is not None and lags_K.max() > bound)):
        raise LedgerError(f"tokens of lag {lags_K.min()} to {lags_K.max()} reached the learner; the bound is {bound}")


def split_by_lag(lags_K: Tokens) -> Iterator[tuple[str, Mask]]:
    """Yield the name of each bucket that holds a token, and the mask (K,) of the tokens in it."""
    for name, least, most in LAG_BUCKETS:
        mine_K = (lags_K >= least) & (lags_K <= most)
        if mine_K.any():
            yield name, mine_K
