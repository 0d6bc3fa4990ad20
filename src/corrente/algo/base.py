"""From finished groups to training rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from corrente.types import Batch, Group


class Algorithm(Protocol):
    """Contract: pure and torch-free.

    - ``trainable`` says whether a scored group carries a learning signal; a reason when not ("" when it does).
    - ``batch`` builds the rows of one step. ``oldest_trainable`` per group withholds tokens of older versions (None: all
      may be trained on). Advantages of a group use the rewards of all its surviving episodes.
    """

    def trainable(self, group: Group) -> str: ...

    def batch(
        self, groups: Sequence[Group], *, step: int, version: int, oldest_trainable: Sequence[int | None]
    ) -> Batch: ...
