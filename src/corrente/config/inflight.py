"""The inflight axis: what a live generation does when new weights land."""

from __future__ import annotations

from corrente.config.section import Kind, Natural


class Swap(Kind, frozen=True, kw_only=True, tag="swap"):
    """Live sequences go on under the new weights and keep their key/value cache."""


class Recompute(Kind, frozen=True, kw_only=True, tag="recompute"):
    """Live sequences go on; their key/value cache is rebuilt under the new weights."""


class Drain(Kind, frozen=True, kw_only=True, tag="drain"):
    """Live requests finish first, new ones wait, then weights change: no sequence mixes versions."""


class Barrier(Kind, frozen=True, kw_only=True, tag="barrier"):
    """Every admitted group finishes first: no group mixes versions."""


class Resume(Kind, frozen=True, kw_only=True, tag="resume"):
    """Live requests are aborted and sent again from where they were: the cache is rebuilt by an ordinary prefill."""


class Cancel(Kind, frozen=True, kw_only=True, tag="cancel"):
    """Groups still generating that are too old are given up as wholes, and others admitted; the rest goes on as with swap."""

    max_age: Natural = 1
    """Versions since its admission that a group may see land while it generates."""


class OldWeights(Kind, frozen=True, kw_only=True, tag="snapshot"):
    """Live requests finish under the weights they began with, new ones use the new: no sequence mixes versions and none waits.
    The next version is staged once nobody uses the oldest."""
