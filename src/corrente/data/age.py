"""How old tokens are when they are trained on: the bound, and the buckets in which a run reports them. numpy only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from corrente.data.types import Mask, Tokens
from corrente.errors import LedgerError

BUCKETS = (("0", 0, 0), ("1", 1, 1), ("2", 2, 2), ("3-4", 3, 4), ("5+", 5, np.iinfo(np.int32).max))
"""Name, least and largest lag."""


def assert_age(lags_K: Tokens, *, bound: int | None) -> None:
    """LedgerError when a token is older than ``bound`` versions, or from the future; None: as old as it likes."""
    if len(lags_K) and (lags_K.min() < 0 or (bound is not None and lags_K.max() > bound)):
        raise LedgerError(f"tokens of lag {lags_K.min()} to {lags_K.max()} reached the learner; the bound is {bound}")


def buckets(lags_K: Tokens) -> Iterator[tuple[str, Mask]]:
    """Each bucket that holds a token, and which of the K are in it."""
    for name, least, most in BUCKETS:
        mine_K = (lags_K >= least) & (lags_K <= most)
        if mine_K.any():
            yield name, mine_K
