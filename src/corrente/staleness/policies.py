"""Version checks at consumption, composable: reject drops whole groups, mask withholds single tokens."""

from __future__ import annotations

from corrente.config import Staleness
from corrente.data.types import Group
from corrente.staleness.base import StalenessPolicy, StalenessVerdict


def build(section: Staleness) -> StalenessPolicy:
    """The checks that ``staleness.reject`` and ``staleness.mask`` ask for."""
    if section.reject is None and section.mask is None:
        return Accept()
    return ByVersion(reject=section.reject, mask=section.mask)


class Accept:
    """No check: the gate alone bounds age."""

    def judge(self, group: Group, version: int) -> StalenessVerdict:
        return StalenessVerdict()


class ByVersion:
    """Mask tokens older than ``mask`` versions, then reject a group whose oldest trainable token is older than ``reject``.

    A group of which nothing is left after masking is stale. Age is ``version`` (about to be trained) minus the version that
    sampled the token: time spent in the queue counts. A group without tokens is as old as its admission.
    """

    def __init__(self, *, reject: int | None = None, mask: int | None = None) -> None:
        self._reject = reject
        self._mask = mask

    def judge(self, group: Group, version: int) -> StalenessVerdict:
        limit = None if self._mask is None else version - self._mask
        sampled = [v for e in group.episodes for v in e.sampled_versions()] or [group.admitted_version]
        left = [v for v in sampled if limit is None or v >= limit]
        if not left:
            return StalenessVerdict(stale=f"every token is older than staleness.mask = {self._mask} versions")
        age = version - min(left)
        if self._reject is not None and age > self._reject:
            return StalenessVerdict(stale=f"older than staleness.reject = {self._reject} versions")
        return StalenessVerdict(oldest_trainable=limit)
