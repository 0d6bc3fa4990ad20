"""The staleness policy's contract: checks when groups are consumed. The gate on top of them is the buffer's slot count."""

from __future__ import annotations

from typing import Protocol

import msgspec

from corrente.data.types import Group


class StalenessVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """``stale``: drop the group, and why (empty: keep). ``oldest_trainable``: tokens of older versions are withheld."""

    stale: str = ""
    oldest_trainable: int | None = None


class StalenessPolicy(Protocol):
    """Contract: a pure function of a group and the version about to be trained; called once per group, when it is taken."""

    def judge(self, group: Group, version: int) -> StalenessVerdict: ...
